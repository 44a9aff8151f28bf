"""Host memory of one table, registered for devices: pinned in chunks, seen by a device at one run of addresses, let go in the end.

Owns a mapping of its own where the one that it is given may only be read and the device registers no such memory: the file is mapped
once more, writable for as long as registering takes, and from then on protected against writes of this process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.contract import TreadleError, Unavailable
from treadle.cuda.library import Library

CHUNK_BYTES = (
    1 << 30
)  # pinned at a time: part of a second, after which an interrupt is heard; whole pages of every size but 1 GiB's
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A stretch of this process's addresses. path: of the file behind it; "": none. offset: of `first` in the file."""

    first: int
    last: int
    writable: bool
    shared: bool
    path: str
    offset: int


class RegisteredTable:
    """A table [N, row_bytes] uint8, C-contiguous, that a device reads. Keep the array's memory until `close()`.

    device: number of the device
    address: of the first row, as the device sees it
    Raises what registering raises, and Unavailable where the file may not be mapped for writing though the device needs that.
    """

    def __init__(self, library: Library, device: int, table: NDArray[np.uint8], *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._library, self._chunks = library, list[int]()
        self._own: mmap.mmap | None = None
        self.row_count, self.row_bytes = table.shape
        begin, byte_count = table.ctypes.data, table.nbytes
        behind = mapping_at(begin)
        read_only = not behind.writable
        if read_only and not library.registers_read_only(device):
            begin, self._own = _mapped_for_writing(behind, begin, byte_count)
            read_only = False
        try:
            for first, size in chunks_of(begin, byte_count, chunk_bytes):
                library.register(first, size, read_only=read_only)
                self._chunks.append(first)
            self.address = self._seen_by(device, begin)
            if self._own is not None:
                _protect(begin, byte_count)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go. No gather may be running. A second call does nothing."""
        failed: TreadleError | None = None
        while self._chunks:
            try:
                self._library.unregister(self._chunks.pop())
            except TreadleError as error:
                failed = error
        if self._own is not None and failed is None:  # else it stays mapped: the device may read it
            self._own.close()
            self._own = None
        if failed is not None:
            raise failed

    def _seen_by(self, device: int, begin: int) -> int:
        first = self._library.device_pointer(device, self._chunks[0])
        for chunk in self._chunks[1:]:
            if self._library.device_pointer(device, chunk) - first != chunk - self._chunks[0]:
                raise Unavailable(
                    "the device sees the chunks of a table apart from each other; this platform has no unified addresses"
                )
        return first + begin - self._chunks[0]


def chunks_of(begin: int, byte_count: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of whole pages that cover [begin, begin + byte_count), each at most `chunk_bytes` (whole pages)."""
    page = mmap.PAGESIZE
    first, last = begin // page * page, -(-(begin + byte_count) // page) * page
    return [(at, min(chunk_bytes, last - at)) for at in range(first, last, chunk_bytes)]


def mapping_at(address: int) -> Mapping:
    """What lies at an address of this process. Raises Unavailable for nothing."""
    with _MAPS.open() as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            first, last = (int(bound, 16) for bound in fields[0].split("-"))
            if first <= address < last:
                path = fields[5].rstrip("\n") if len(fields) > 5 else ""
                return Mapping(first, last, "w" in fields[1], "s" in fields[1], path, int(fields[2], 16))
    raise Unavailable(f"nothing is mapped at {address:#x}")


def _mapped_for_writing(behind: Mapping, begin: int, byte_count: int) -> tuple[int, mmap.mmap]:
    """Where the same bytes begin in a second, writable mapping of the file, and that mapping."""
    at = behind.offset + begin - behind.first
    skipped = at % mmap.ALLOCATIONGRANULARITY
    try:
        descriptor = os.open(behind.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(
                descriptor, skipped + byte_count, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=at - skipped
            )
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"{behind.path or 'anonymous memory'}: cannot be mapped for writing ({error}), and this device registers no memory that may "
            "only be read; run as the pool's user, or use the transport local"
        ) from error
    return np.frombuffer(mapping, dtype=np.uint8).ctypes.data + skipped, mapping


def _protect(begin: int, byte_count: int) -> None:
    """From now on this process does not write there."""
    ((first, size),) = chunks_of(begin, byte_count, 1 << 62)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(first, size, mmap.PROT_READ) != 0:
        raise Unavailable(f"the registered mapping cannot be protected against writes: {os.strerror(ctypes.get_errno())}")
