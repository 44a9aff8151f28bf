"""Turns rows into the bytes of a segment as they come in: checksums and digests on the way, tail and sealed header at the end.

Owns what is written where in the segment. Where that lies (a file, a region of a device), its allocation and its publication are
for the writers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, Table
from treadle.contract.table_manifest import CHUNK_BYTES, table_version
from treadle.kernels import crc32c
from treadle.kernels.held import HELD_KEY, Ranges, chunk_runs, ranges_text
from treadle.kernels.segment_layout import DIGEST_BYTES, Layout, header, seal_of, sealed

_BLOCK_BYTES = 256 << 10  # copied, checksummed and hashed while still in the second-level cache


class Sink(Protocol):
    """Bytes that are written in place, counted from the start of the segment."""

    def write(self, at: int, data: NDArray[np.uint8] | bytes) -> None:
        """Write `data` (contiguous) at `at`."""


class SegmentEncoder:
    """One segment on its way into a sink.

    held: the rows that are kept, or None for all; chunks without any are hashed, not written
    """

    def __init__(self, layout: Layout, token_map: NDArray[np.int32] | None, held: Ranges | None, sink: Sink) -> None:
        self.layout, self.held, self._sink = layout, held, sink
        self.runs = chunk_runs(held, layout.row_bytes, layout.chunks)
        self._token_map = b"" if token_map is None else token_map.astype("<i4").tobytes()
        self._edges = [edge for run in self.runs for edge in run]
        self._written = 0  # bytes of rows
        self._crc, self._sha256 = 0, hashlib.sha256()  # of the chunk that is being filled
        self._crcs: list[int] = []
        self._digests: list[bytes] = []

    @property
    def next_chunk(self) -> int:
        """The chunk that the next byte belongs to."""
        return self._written // CHUNK_BYTES

    def checksum(self, chunk: int) -> int:
        """CRC32C of a chunk that came in."""
        return self._crcs[chunk]

    def keeps(self, chunk: int) -> bool:
        """True if the chunk is written."""
        return bisect_right(self._edges, chunk) % 2 == 1

    def append(self, rows: NDArray[np.uint8]) -> None:
        """Add rows [n, row_bytes] uint8, C-contiguous, any n; borrowed until this returns.

        Raises InvalidArgument for another shape or more rows than were announced.
        """
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.layout.row_bytes or not rows.flags.c_contiguous:
            raise InvalidArgument(
                f"rows: uint8 [n, {self.layout.row_bytes}], C-contiguous, expected, got {rows.dtype.name} {list(rows.shape)}"
            )
        self.append_bytes(rows.reshape(-1))

    def append_bytes(self, flat: NDArray[np.uint8]) -> None:
        """Add the next bytes of the rows, uint8 [n], any n; borrowed until this returns. Raises InvalidArgument for too many."""
        if self._written + flat.size > self.layout.table_bytes:
            made = (self._written + flat.size) // self.layout.row_bytes
            raise InvalidArgument(f"rows: {self.layout.rows} were announced, these make {made}")
        while flat.size:
            count = min(flat.size, _BLOCK_BYTES, CHUNK_BYTES - self._written % CHUNK_BYTES)
            self._append_block(flat[:count])
            flat = flat[count:]

    def skip(self, digest: bytes) -> None:
        """Pass over the next chunk, which is not kept; `digest`: its sha256. Raises InvalidArgument for one that is kept."""
        chunk = self.next_chunk
        if self._written % CHUNK_BYTES or chunk >= self.layout.chunks or self.keeps(chunk) or len(digest) != DIGEST_BYTES:
            raise InvalidArgument(f"chunk {chunk}: only a whole chunk that is not kept is passed over, by its sha256")
        self._written = self.layout.span(chunk, chunk + 1)[1]
        self._crcs.append(0)
        self._digests.append(digest)

    def table(self) -> Table:
        """Rows and version of the table that came in. Raises InvalidArgument while rows are missing."""
        if self._written != self.layout.table_bytes:
            raise InvalidArgument(f"rows: {self.layout.rows} were announced, {self._written // self.layout.row_bytes} came")
        return Table(self.layout.rows, table_version(self.layout.rows, self.layout.row_bytes, self._digests))

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the tail, then the sealed header. Raises InvalidArgument while rows are missing, or for metadata that does not fit."""
        self.table()
        if HELD_KEY in metadata:
            raise InvalidArgument(f"metadata: {HELD_KEY} is not yours to set")
        held = {} if self.held is None else {HELD_KEY: ranges_text(self.held)}
        text = header(self.layout, dict(metadata) | held)
        digests = b"".join(self._digests) if self.layout.digests else b""
        tail = np.array(self._crcs, dtype="<u4").tobytes() + digests + self._token_map
        self._sink.write(self.layout.tail_at, tail)
        self._sink.write(0, sealed(text, seal_of(text, tail)))

    def _append_block(self, block: NDArray[np.uint8]) -> None:
        if self.keeps(self.next_chunk):
            self._sink.write(self.layout.header_bytes + self._written, block)
        self._crc = crc32c(block, self._crc)
        self._sha256.update(block.data)
        self._written += block.size
        if self._written % CHUNK_BYTES == 0 or self._written == self.layout.table_bytes:
            self._crcs.append(self._crc)
            self._digests.append(self._sha256.digest())
            self._crc, self._sha256 = 0, hashlib.sha256()
