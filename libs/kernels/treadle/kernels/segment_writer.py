"""Writes a segment as its rows come in: room first, then rows and checksums, then the header, then the name.

Owns the unfinished file `<path>.partial`. A segment gets its name only when all of it is on the file system, so no reader
ever sees a part of one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, ResourceExhausted, Table, Unavailable
from treadle.contract.lasting_files import sync_folder
from treadle.kernels.held import checked_ranges, chunk_runs
from treadle.kernels.pages import FileBytes, place_file
from treadle.kernels.segment_encoder import SegmentEncoder
from treadle.kernels.segment_layout import HEADER_BYTES, Layout

MODE = 0o640  # the owner writes, the group reads; what others may see is for the folder to say
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SegmentWriter:
    """A segment being written; leaving its `with` block without `publish` removes the unfinished file.

    Anonymous memory is a few hundred bytes for each chunk of CHUNK_BYTES, whatever the size of the table.
    """

    def __init__(
        self, path: Path, *, rows: int, row_bytes: int, token_map: NDArray[np.int32] | None = None,
        header_bytes: int = HEADER_BYTES, held: Sequence[tuple[int, int]] | None = None, numa: str = "",
    ) -> None:  # fmt: skip
        """Allocate what will be written of `<path>.partial`: all of it, or what `held` touches.

        token_map:    [V] int32, copied
        header_bytes: room for what `publish` is given (`segment_layout.header_bytes_for`); the rows begin behind it
        held:         ranges [first, last) of the rows that this file is to hold; None: all
        numa:         on which memory nodes, as `numa.place` says; empty: as the kernel likes
        Raises ResourceExhausted naming path and bytes if there is no room, Unavailable if someone else is writing that path,
        InvalidArgument for sizes beyond the limits.
        """
        if token_map is not None and (token_map.dtype != np.int32 or token_map.ndim != 1):
            raise InvalidArgument(f"token_map: int32 [V] expected, got {token_map.dtype.name} {list(token_map.shape)}")
        self.path = path
        layout = Layout(rows, row_bytes, 0 if token_map is None else token_map.shape[0], header_bytes)
        ranges = None if held is None else checked_ranges(held, rows)
        self._partial = path.with_name(path.name + ".partial")
        self._descriptor: int | None = _open_alone(self._partial)
        try:
            _allocate(self._descriptor, layout, chunk_runs(ranges, row_bytes, layout.chunks), self._partial, numa)
            self._bytes = FileBytes(self._descriptor, layout.file_bytes)
        except BaseException:
            self._partial.unlink()
            os.close(self._descriptor)
            raise
        self._encoder = SegmentEncoder(layout, token_map, ranges, self._bytes)

    def append(self, rows: NDArray[np.uint8]) -> None:
        """Add rows [n, row_bytes] uint8, C-contiguous, any n; borrowed until this returns.

        Raises InvalidArgument for another shape or more rows than were announced.
        """
        self._open_descriptor()
        self._encoder.append(rows)

    def append_bytes(self, flat: NDArray[np.uint8]) -> None:
        """Add the next bytes of the rows, uint8 [n], any n; borrowed until this returns."""
        self._open_descriptor()
        self._encoder.append_bytes(flat)

    def skip(self, digest: bytes) -> None:
        """Pass over the next chunk, which is not held here; `digest`: its sha256. Raises InvalidArgument for one that is held."""
        self._open_descriptor()
        self._encoder.skip(digest)

    def table(self) -> Table:
        """Rows and version of the table that was written. Raises InvalidArgument while rows are missing."""
        return self._encoder.table()

    def publish(self, metadata: Mapping[str, str]) -> None:
        """Write the header with `metadata`, sync, and give the file its name: from now on readers see all of it, read-only.

        Raises InvalidArgument while rows are missing, or for metadata that does not fit the header.
        """
        descriptor = self._open_descriptor()
        self._encoder.finish(metadata)
        os.fchmod(descriptor, MODE)
        os.fsync(descriptor)
        os.rename(self._partial, self.path)
        sync_folder(self.path.parent)
        self._close()

    def abort(self) -> None:
        """Remove the unfinished file; nothing happens after `publish`."""
        if self._descriptor is not None:
            self._partial.unlink(missing_ok=True)
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise InvalidArgument(f"{self.path}: this writer has published or given up")
        return self._descriptor

    def _close(self) -> None:
        self._bytes.close()
        os.close(self._open_descriptor())
        self._descriptor = None


def _open_alone(partial: Path) -> int:
    """Open `partial` for writing under an exclusive lock; a file that a dead writer left behind is replaced."""
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise Unavailable(f"{partial}: another writer is at it") from error
        if _is_named(descriptor, partial):
            os.ftruncate(descriptor, 0)
            return descriptor
        os.close(descriptor)  # between open and lock its writer finished: the next turn makes a new file


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _allocate(descriptor: int, layout: Layout, runs: Sequence[tuple[int, int]], path: Path, numa: str) -> None:
    """Every byte that will be written, now: a write into a hole of a full tmpfs would be SIGBUS for whoever has it mapped."""
    size, space = layout.stored_bytes(runs), os.fstatvfs(descriptor)
    free = space.f_bavail * space.f_frsize
    no_room = f"{path}: no room for {size} bytes"
    if space.f_blocks and free < size:  # asked first: filling the file system on the way to failure would hurt others
        raise ResourceExhausted(f"{no_room}, {free} are free")
    spans = [(0, layout.header_bytes), (layout.tail_at, layout.file_bytes)]
    spans += [(layout.header_bytes + begin, layout.header_bytes + end) for begin, end in (layout.span(*run) for run in runs)]
    try:
        os.ftruncate(descriptor, layout.file_bytes)
        if numa:
            place_file(descriptor, layout.file_bytes, numa)
        for begin, end in _joined(sorted(spans)):
            os.posix_fallocate(descriptor, begin, end - begin)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ResourceExhausted(f"{no_room}: {error.strerror}") from error
        raise


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rising spans, those that touch made one: a whole table is allocated in one call."""
    joined = [spans[0]]
    for begin, end in spans[1:]:
        if begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
