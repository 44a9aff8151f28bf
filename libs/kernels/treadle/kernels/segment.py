"""Segment files: an Engram table as one immutable safetensors file that any number of processes map.

Owns reading and verifying; `segment_writer` writes, `segment_layout` says what is where. Which segment belongs to which
model and version, and when it may go, is for the pool to know.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, NotFound
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels import crc32c
from treadle.kernels.held import HELD_KEY, chunk_runs, chunks_in, ranges_of
from treadle.kernels.numa_nodes import sampled_nodes
from treadle.kernels.pages import (
    DEVICE,
    HUGE_PAGE_BYTES,
    MEMORY_FILE_SYSTEMS,
    enter_pages,
    file_system,
    map_for_gather,
    mapped_page_bytes,
    will_need,
)
from treadle.kernels.segment_layout import (
    DIGEST_BYTES,
    HEADER_BYTES,
    SMALL_ALIGN_BYTES,
    Layout,
    header_bytes_of,
    parse_header,
    seal_of,
    unsealed,
)
from treadle.kernels.segment_writer import SegmentWriter

__all__ = ["Segment", "SegmentWriter", "segment_bytes"]


class Segment:
    """A published segment, mapped read-only; also a context manager.

    metadata:          what the writer was given, and "schema"
    offset:            where the segment begins in `path`, a multiple of 2 MiB; 0 in a file of its own
    rows_offset_bytes: where the rows begin in the segment, a multiple of 2 MiB, or of 64 KiB in a small one
    token_map:         [V] int32, a copy in this process, or None
    held:              ranges [first, last) of the rows that are here; None: all. Other rows read as zeros: check ids first
    chunk_digests:     sha256 of each chunk of the whole table; empty in files of older releases
    """

    def __init__(self, path: Path, offset: int = 0, size_bytes: int | None = None) -> None:
        """Map the segment and check everything but the rows (see `verify`).

        size_bytes: of the segment; None: as its header says, and in a file up to its end
        Raises NotFound, or DataLoss for a segment that is torn, damaged, of the wrong size or none at all.
        """
        self.path, self.offset = path, offset
        self._mapping, self._file_system, header = _mapped(path, offset, size_bytes)
        try:
            self._layout, self.metadata = _checked_header(self._mapping, header)
            self._whole = np.frombuffer(self._mapping, dtype=np.uint8)
            begin = self._layout.header_bytes
            flat = self._whole[begin : begin + self._layout.table_bytes]
            self._rows: NDArray[np.uint8] | None = flat.reshape(self._layout.rows, self._layout.row_bytes)
            self._crcs, self.chunk_digests, self.token_map = _checked_tail(self._mapping, self._layout)
            text = self.metadata.pop(HELD_KEY, None)
            self.held = None if text is None else ranges_of(text, self._layout.rows)
        except DataLoss as error:
            self.close()
            raise DataLoss(f"{path}: {error}") from error
        self._runs = chunk_runs(self.held, self._layout.row_bytes, self._layout.chunks)
        self.row_count = self._layout.rows
        self.row_bytes = self._layout.row_bytes
        self.rows_offset_bytes = self._layout.header_bytes
        self.file_bytes = self._layout.file_bytes
        self.stored_bytes = self._layout.stored_bytes(self._runs)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """[N, row_bytes] uint8, read-only, backed by the mapping. Raises InvalidArgument once closed."""
        if self._rows is None:
            raise InvalidArgument(f"{self.path}: this segment is closed")
        return self._rows

    @property
    def chunks(self) -> list[int]:
        """The chunks that are here, rising."""
        return list(chunks_in(self._runs))

    def chunk(self, chunk: int) -> NDArray[np.uint8]:
        """uint8 [n], read-only, backed by the mapping: the bytes of one chunk that is here."""
        begin, end = self._layout.span(chunk, chunk + 1)
        return self.rows.reshape(-1)[begin:end]

    def check_chunk(self, chunk: int) -> None:
        """Raise DataLoss, naming the chunk and its offset in the file, unless its bytes fit their checksum."""
        actual = crc32c(self.chunk(chunk))
        if actual != self._crcs[chunk]:
            at = self.offset + self.rows_offset_bytes + chunk * CHUNK_BYTES
            raise DataLoss(
                f"{self.path}: chunk {chunk} at byte {at} is damaged: CRC32C {actual:08x}, written as {self._crcs[chunk]:08x}"
            )

    def fits(self, chunk: int, data: NDArray[np.uint8]) -> bool:
        """True if `data`, uint8 [n], is what a chunk held when it was written: size, CRC32C, and sha256 where it is kept."""
        if data.size != self.chunk(chunk).size or crc32c(data) != self._crcs[chunk]:
            return False
        return not self.chunk_digests or hashlib.sha256(data.data).digest() == self.chunk_digests[chunk]

    def check_frame(self) -> None:
        """Raise DataLoss unless all but the rows is as it was: the file's size, header, digests, token map, pad."""
        _check_size(self.path, self.offset + self.file_bytes)
        if self._rows is None:
            raise InvalidArgument(f"{self.path}: this segment is closed")
        try:
            _checked_header(self._mapping, self._mapping[: self.rows_offset_bytes])
        except DataLoss as error:
            raise DataLoss(f"{self.path}: {error}") from error
        if self._mapping[self._layout.pad_at :].strip(b"\0"):
            raise DataLoss(f"{self.path}: the pad at byte {self.offset + self._layout.pad_at} is damaged: not all zeros")

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every row that is here against the checksums; `progress(bytes done, bytes in all)` after each chunk.

        Raises DataLoss naming the first bad chunk and its offset in the file.
        """
        self.check_frame()
        chunks, done = self.chunks, 0
        total = sum(self._layout.span(*run)[1] - self._layout.span(*run)[0] for run in self._runs)
        for place, chunk in enumerate(chunks):
            if place + 1 < len(chunks):
                self.will_need(chunks[place + 1])
            self.check_chunk(chunk)
            done += self.chunk(chunk).size
            if progress is not None:
                progress(done, total)

    def will_need(self, chunk: int) -> None:
        """Start reading a chunk from disk, whatever was advised for the mapping; nothing where it lies in memory."""
        if self._file_system not in (*MEMORY_FILE_SYSTEMS, DEVICE):
            will_need(self._mapping, self.rows_offset_bytes + chunk * CHUNK_BYTES, self.chunk(chunk).size)

    def spans_to_enter(self) -> list[NDArray[np.uint8]]:
        """Stretches of the mapping, uint8 [n] each, for `pages.enter_pages`; none for files on disk, whose pages are to stay evictable.

        Only what is here: reading a hole of a tmpfs would fill it with pages. Each keeps the mapping alive.
        """
        if self._file_system not in (*MEMORY_FILE_SYSTEMS, DEVICE):
            return []
        begin, flat = self.rows_offset_bytes, self.rows.reshape(-1)
        spans = [flat[first:last] for first, last in (self._layout.span(*run) for run in self._runs)]
        return [self._whole[:begin], *spans, self._whole[self._layout.tail_at :]]

    def populate(self) -> bool:
        """Enter all pages of a segment in memory (tmpfs, hugetlbfs) into this process's page table; False where that is not done."""
        spans = self.spans_to_enter()
        return bool(spans) and all(enter_pages(span) for span in spans)

    def page_bytes(self) -> int:
        """Size of the pages that hold the rows in this process, as the kernel reports it: 2 MiB where huge pages cover them.

        Reads a byte of the rows, so that there is a page to ask about. Takes milliseconds for a large mapping.
        """
        if self._runs:
            self.chunk(self._runs[0][0])[:1].tobytes()
        return mapped_page_bytes(int(self.rows.ctypes.data))

    def nodes(self) -> dict[int, int]:
        """How many of some sampled pages of the rows lie on each memory node; empty for a file on disk, or where nobody tells."""
        spans = self.spans_to_enter()
        return sampled_nodes(max(spans, key=lambda span: span.nbytes)) if spans else {}

    def close(self) -> None:
        """Let go of the mapping. Arrays over it that are still held elsewhere stay valid: it goes with the last of them."""
        self._rows, self._whole = None, np.empty(0, dtype=np.uint8)
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


def _mapped(path: Path, offset: int, size_bytes: int | None) -> tuple[mmap.mmap, str, bytes]:
    """The mapping, never longer than the file, the type of its file system, and the header as it was read before mapping."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such segment") from error
    try:
        status = os.fstat(descriptor)
        if offset % HUGE_PAGE_BYTES or offset < 0:
            raise InvalidArgument(f"{path}: segments begin at multiples of {HUGE_PAGE_BYTES} bytes, got {offset}")
        if stat.S_ISCHR(status.st_mode):
            if size_bytes is None:
                raise InvalidArgument(f"{path} is a device: name the size of the segment on it")
            with mmap.mmap(descriptor, HEADER_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset) as begin:
                header = _claimed_header(path, begin[:], size_bytes)
        else:
            room = status.st_size - offset
            if room < max(SMALL_ALIGN_BYTES, size_bytes or 0):
                raise DataLoss(f"{path}: {room} bytes are no whole segment")
            header = _claimed_header(path, os.pread(descriptor, HEADER_BYTES, offset), size_bytes or room)
        return map_for_gather(descriptor, size_bytes or room, offset), file_system(descriptor), header
    finally:
        os.close(descriptor)


def _claimed_header(path: Path, begin: bytes, size_bytes: int) -> bytes:
    """The header, if it claims exactly `size_bytes`: compared before anything is mapped, as reading behind a file's end kills."""
    try:
        header = begin[: header_bytes_of(begin)]
        layout, _ = parse_header(unsealed(header)[0])
        if layout.file_bytes != size_bytes:
            raise DataLoss(f"{size_bytes} bytes, the header says {layout.file_bytes}: torn or truncated")
    except DataLoss as error:
        raise DataLoss(f"{path}: {error}") from error
    return header


def _check_size(path: Path, needed: int) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:  # deleted: our mapping keeps its bytes
        return
    if stat.S_ISREG(status.st_mode) and status.st_size < needed:
        raise DataLoss(f"{path}: {status.st_size} bytes are left of {needed}: truncated under its readers")


def _checked_header(mapping: mmap.mmap, header: bytes) -> tuple[Layout, dict[str, str]]:
    text, seal = unsealed(header)
    layout, metadata = parse_header(text)
    tail = mapping[layout.tail_at : layout.pad_at]
    if seal_of(text, tail) != seal:
        raise DataLoss("header, checksums or token map are damaged: the seal does not fit")
    return layout, metadata


def _checked_tail(mapping: mmap.mmap, layout: Layout) -> tuple[list[int], tuple[bytes, ...], NDArray[np.int32] | None]:
    tail = mapping[layout.tail_at : layout.pad_at]  # a copy: the tail of odd-sized rows is not aligned
    crcs = np.frombuffer(tail, dtype="<u4", count=layout.chunks)
    digests = tail[4 * layout.chunks : layout.token_map_at - layout.tail_at]
    pieces = tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
    if not layout.token_map_size:
        return crcs.tolist(), pieces, None
    token_map = np.frombuffer(tail, dtype="<i4", offset=layout.token_map_at - layout.tail_at).astype(np.int32)
    token_map.setflags(write=False)
    return crcs.tolist(), pieces, token_map
