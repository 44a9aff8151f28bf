"""Segment files: an Engram table as one immutable safetensors file that any number of processes map.

Owns reading and verifying; `segment_writer` writes, `segment_layout` says what is where. Which segment belongs to which
model and version, and when it may go, is for the pool to know.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, NotFound
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels import crc32c
from treadle.kernels.pages import file_system, map_for_gather, mapped_page_bytes, populate, will_need
from treadle.kernels.segment_layout import HEADER_BYTES, SMALL_ALIGN_BYTES, Layout, header_bytes_of, parse_header, seal_of, unsealed
from treadle.kernels.segment_writer import SegmentWriter

__all__ = ["Segment", "SegmentWriter", "segment_bytes"]


class Segment:
    """A published segment, mapped read-only; also a context manager.

    metadata:          what the writer was given, and "schema"
    rows_offset_bytes: where the rows begin in the file, a multiple of 2 MiB, or of 64 KiB in a small file
    token_map:         [V] int32, a copy in this process, or None
    """

    def __init__(self, path: Path) -> None:
        """Map `path` and check everything but the rows (see `verify`).

        Raises NotFound, or DataLoss for a file that is torn, damaged, of the wrong size or no segment.
        """
        self.path = path
        self._mapping, self._file_system = _mapped(path)
        try:
            self._layout, self.metadata = _checked_header(self._mapping)
            self._rows: NDArray[np.uint8] | None = np.frombuffer(
                self._mapping, dtype=np.uint8, count=self._layout.table_bytes, offset=self._layout.header_bytes
            ).reshape(self._layout.rows, self._layout.row_bytes)
            self._crcs, self.token_map = _checked_tail(self._mapping, self._layout)
        except DataLoss as error:
            self.close()
            raise DataLoss(f"{path}: {error}") from error
        self.row_count = self._layout.rows
        self.row_bytes = self._layout.row_bytes
        self.rows_offset_bytes = self._layout.header_bytes
        self.file_bytes = self._layout.file_bytes

    @property
    def rows(self) -> NDArray[np.uint8]:
        """[N, row_bytes] uint8, read-only, backed by the mapping. Raises InvalidArgument once closed."""
        if self._rows is None:
            raise InvalidArgument(f"{self.path}: this segment is closed")
        return self._rows

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every row against the checksums; `progress(bytes done, bytes in all)` after each chunk.

        Raises DataLoss naming the first bad chunk and its offset in the file.
        """
        flat = self.rows.reshape(-1)
        for chunk, expected in enumerate(self._crcs):
            begin = chunk * CHUNK_BYTES
            end = min(begin + CHUNK_BYTES, flat.size)
            if end < flat.size:
                will_need(self._mapping, self.rows_offset_bytes + end, min(CHUNK_BYTES, flat.size - end))
            actual = crc32c(flat[begin:end])
            if actual != expected:
                raise DataLoss(
                    f"{self.path}: chunk {chunk} at byte {self.rows_offset_bytes + begin} is damaged: CRC32C {actual:08x}, written as {expected:08x}"
                )
            if progress is not None:
                progress(end, flat.size)
        if self._mapping[self._layout.pad_at :].strip(b"\0"):
            raise DataLoss(f"{self.path}: the pad at byte {self._layout.pad_at} is damaged: not all zeros")

    def populate(self) -> bool:
        """Enter all pages of a segment in memory (tmpfs, hugetlbfs) into this process's page table; False where that is not done."""
        return populate(self._mapping, self._file_system)

    def page_bytes(self) -> int:
        """Size of the pages that hold the rows in this process, as the kernel reports it: 2 MiB where huge pages cover them.

        Reads a row, so that there is a page to ask about. Takes milliseconds for a large mapping.
        """
        self.rows[0].tobytes()
        return mapped_page_bytes(int(self.rows.ctypes.data))

    def close(self) -> None:
        """Let go of the mapping. Arrays over it that are still held elsewhere stay valid: it goes with the last of them."""
        self._rows = None
        try:
            self._mapping.close()
        except BufferError:  # someone still holds an array over it, and that array keeps it alive
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def segment_bytes(rows: int, row_bytes: int, token_map_size: int = 0, header_bytes: int = HEADER_BYTES) -> int:
    """Size of the file that holds such a table (see Layout.file_bytes). Raises InvalidArgument beyond the limits."""
    return Layout(rows, row_bytes, token_map_size, header_bytes).file_bytes


def _mapped(path: Path) -> tuple[mmap.mmap, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such segment") from error
    try:
        size = os.fstat(descriptor).st_size
        if size < SMALL_ALIGN_BYTES:
            raise DataLoss(f"{path}: {size} bytes are no whole segment")
        return map_for_gather(descriptor, size), file_system(descriptor)
    finally:
        os.close(descriptor)


def _checked_header(mapping: mmap.mmap) -> tuple[Layout, dict[str, str]]:
    text, seal = unsealed(mapping[: header_bytes_of(mapping[:8])])
    layout, metadata = parse_header(text)
    if layout.file_bytes != len(mapping):
        raise DataLoss(f"{len(mapping)} bytes, the header says {layout.file_bytes}: torn or truncated")
    tail = mapping[layout.tail_at : layout.pad_at]
    if seal_of(text, tail) != seal:
        raise DataLoss("header, checksums or token map are damaged: the seal does not fit")
    return layout, metadata


def _checked_tail(mapping: mmap.mmap, layout: Layout) -> tuple[list[int], NDArray[np.int32] | None]:
    tail = mapping[layout.tail_at : layout.pad_at]  # a copy: the tail of odd-sized rows is not aligned
    crcs = np.frombuffer(tail, dtype="<u4", count=layout.chunks)
    if not layout.token_map_size:
        return crcs.tolist(), None
    token_map = np.frombuffer(tail, dtype="<i4", offset=4 * layout.chunks).astype(np.int32)
    token_map.setflags(write=False)
    return crcs.tolist(), token_map
