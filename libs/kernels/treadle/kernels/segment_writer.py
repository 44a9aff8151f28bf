"""Writes a segment as its rows come in: room first, then rows and checksums, then the header, then the name.

Owns the unfinished file `<path>.partial`. A segment gets its name only when all of it is on the file system, so no reader
ever sees a part of one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, ResourceExhausted, Table, Unavailable
from treadle.contract.table_manifest import CHUNK_BYTES, table_version
from treadle.kernels import crc32c
from treadle.kernels.pages import FileBytes
from treadle.kernels.segment_layout import HEADER_BYTES, Layout, header, seal_of, sealed

MODE = 0o640  # the owner writes, the group reads; what others may see is for the folder to say
_BLOCK_BYTES = 256 << 10  # copied, checksummed and hashed while still in the second-level cache
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SegmentWriter:
    """A segment being written; leaving its `with` block without `publish` removes the unfinished file.

    Anonymous memory is a few hundred bytes for each chunk of CHUNK_BYTES, whatever the size of the table.
    """

    def __init__(
        self, path: Path, *, rows: int, row_bytes: int, token_map: NDArray[np.int32] | None = None, header_bytes: int = HEADER_BYTES
    ) -> None:
        """Allocate the whole file as `<path>.partial`.

        token_map:    [V] int32, copied
        header_bytes: room for what `publish` is given (`segment_layout.header_bytes_for`); the rows begin behind it
        Raises ResourceExhausted naming path and bytes if there is no room, Unavailable if someone else is writing that path,
        InvalidArgument for sizes beyond the limits.
        """
        if token_map is not None and (token_map.dtype != np.int32 or token_map.ndim != 1):
            raise InvalidArgument(f"token_map: int32 [V] expected, got {token_map.dtype.name} {list(token_map.shape)}")
        self.path = path
        self._layout = Layout(rows, row_bytes, 0 if token_map is None else token_map.shape[0], header_bytes)
        self._token_map = b"" if token_map is None else token_map.astype("<i4").tobytes()
        self._written = 0  # bytes of rows
        self._crc, self._sha256 = 0, hashlib.sha256()  # of the chunk that is being filled
        self._crcs: list[int] = []
        self._digests: list[bytes] = []
        self._partial = path.with_name(path.name + ".partial")
        self._descriptor: int | None = _open_alone(self._partial)
        try:
            _allocate(self._descriptor, self._layout.file_bytes, self._partial)
            self._bytes = FileBytes(self._descriptor, self._layout.file_bytes)
        except BaseException:
            self._partial.unlink()
            os.close(self._descriptor)
            raise

    def append(self, rows: NDArray[np.uint8]) -> None:
        """Add rows [n, row_bytes] uint8, C-contiguous, any n; borrowed until this returns.

        Raises InvalidArgument for another shape or more rows than were announced.
        """
        self._open_descriptor()
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self._layout.row_bytes or not rows.flags.c_contiguous:
            raise InvalidArgument(
                f"rows: uint8 [n, {self._layout.row_bytes}], C-contiguous, expected, got {rows.dtype.name} {list(rows.shape)}"
            )
        flat = rows.reshape(-1)
        if self._written + flat.size > self._layout.table_bytes:
            raise InvalidArgument(
                f"rows: {self._layout.rows} were announced, these make {(self._written + flat.size) // rows.shape[1]}"
            )
        while flat.size:
            count = min(flat.size, _BLOCK_BYTES, CHUNK_BYTES - self._written % CHUNK_BYTES)
            self._append_block(flat[:count])
            flat = flat[count:]

    def table(self) -> Table:
        """Rows and version of the table that was written. Raises InvalidArgument while rows are missing."""
        if self._written != self._layout.table_bytes:
            raise InvalidArgument(f"rows: {self._layout.rows} were announced, {self._written // self._layout.row_bytes} came")
        return Table(self._layout.rows, table_version(self._layout.rows, self._layout.row_bytes, self._digests))

    def publish(self, metadata: Mapping[str, str]) -> None:
        """Write the header with `metadata`, sync, and give the file its name: from now on readers see all of it, read-only.

        Raises InvalidArgument while rows are missing, or for metadata that does not fit the header.
        """
        descriptor = self._open_descriptor()
        self.table()
        tail = np.array(self._crcs, dtype="<u4").tobytes() + self._token_map
        text = header(self._layout, metadata)
        self._bytes.write(self._layout.tail_at, tail)
        self._bytes.write(0, sealed(text, seal_of(text, tail)))
        os.fchmod(descriptor, MODE)
        os.fsync(descriptor)
        os.rename(self._partial, self.path)
        _sync_folder(self.path.parent)
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

    def _append_block(self, block: NDArray[np.uint8]) -> None:
        self._bytes.write(self._layout.header_bytes + self._written, block)
        self._crc = crc32c(block, self._crc)
        self._sha256.update(block.data)
        self._written += block.size
        if self._written % CHUNK_BYTES == 0 or self._written == self._layout.table_bytes:
            self._crcs.append(self._crc)
            self._digests.append(self._sha256.digest())
            self._crc, self._sha256 = 0, hashlib.sha256()

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


def _allocate(descriptor: int, size: int, path: Path) -> None:
    space = os.fstatvfs(descriptor)
    free = space.f_bavail * space.f_frsize
    no_room = f"{path}: no room for {size} bytes"
    if space.f_blocks and free < size:  # asked first: filling the file system on the way to failure would hurt others
        raise ResourceExhausted(f"{no_room}, {free} are free")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise ResourceExhausted(f"{no_room}: {error.strerror}") from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
