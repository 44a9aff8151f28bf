"""Writes a segment into a region of a DAX device: room first, rows, flush, read back. The directory says last that it is ready.

Owns one region from `take` to its read-back. A writer that dies leaves it WRITING, which the next owner of the device gives back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, ResourceExhausted, Table
from treadle.kernels import crc32c
from treadle.kernels.dax_directory import Region
from treadle.kernels.dax_space import DaxSpace
from treadle.kernels.held import checked_ranges, chunks_in
from treadle.kernels.segment_encoder import SegmentEncoder
from treadle.kernels.segment_layout import HEADER_BYTES, Layout


class RegionWriter:
    """A segment being written on a device; leaving its `with` block without `publish` gives the region back."""

    def __init__(
        self, space: DaxSpace, *, layer: int, load: bytes, rows: int, row_bytes: int, token_map: NDArray[np.int32] | None = None,
        held: tuple[tuple[int, int], ...] | None = None,
    ) -> None:  # fmt: skip
        """Take a region. Raises ResourceExhausted, Unavailable on a device that we only read, InvalidArgument beyond the limits."""
        if held is not None:
            checked_ranges(held, rows)  # as of a file; a region has no holes, so the room is that of the whole table
        layout = Layout(rows, row_bytes, 0 if token_map is None else token_map.shape[0], HEADER_BYTES)
        self._space = space
        self.region: Region = space.take(layer, layout.file_bytes, load)
        self.size_bytes, self._published = layout.file_bytes, False
        try:
            if not space.facts.is_device:
                _allocate(space, self.region)
            self._target = space.rows_of(self.region)
        except BaseException:
            space.give_back({self.region.offset})
            raise
        self._encoder = SegmentEncoder(layout, token_map, None if held is None else checked_ranges(held, rows), self)

    def write(self, at: int, data: NDArray[np.uint8] | bytes) -> None:
        """For the encoder: into the mapping."""
        source = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data.reshape(-1)
        self._target[at : at + source.size] = source

    def append(self, rows: NDArray[np.uint8]) -> None:
        """See SegmentWriter."""
        self._encoder.append(rows)

    def append_bytes(self, flat: NDArray[np.uint8]) -> None:
        """See SegmentWriter."""
        self._encoder.append_bytes(flat)

    def skip(self, digest: bytes) -> None:
        """See SegmentWriter."""
        self._encoder.skip(digest)

    def table(self) -> Table:
        """See SegmentWriter."""
        return self._encoder.table()

    def publish(self, metadata: Mapping[str, str]) -> None:
        """Pad, tail and header, flush, and read every row that is here back through the mapping.

        The region is still WRITING: `DaxSpace.make_ready` shows all regions of a version at once. Raises DataLoss if a row does
        not read as it was written.
        """
        layout = self._encoder.layout
        self._target[layout.pad_at : self.size_bytes] = 0
        self._encoder.finish(metadata)
        self._space.flush(self.region, 0, self.size_bytes)
        flat = self._target[layout.header_bytes : layout.tail_at]
        for chunk in chunks_in(self._encoder.runs):
            begin, end = layout.span(chunk, chunk + 1)
            if crc32c(flat[begin:end]) != self._encoder.checksum(chunk):
                raise DataLoss(
                    f"{self._space.facts.path}: chunk {chunk} of the region at byte {self.region.offset} does not read as written"
                )
        self._published, self._target = True, np.empty(0, dtype=np.uint8)

    def abort(self) -> None:
        """Give the region back; nothing happens after `publish`."""
        if not self._published:
            self._published = True
            self._target = np.empty(0, dtype=np.uint8)
            self._space.give_back({self.region.offset})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


def _allocate(space: DaxSpace, region: Region) -> None:
    """A file's bytes, before they are touched: a hole in a full file system would be SIGBUS."""
    descriptor = os.open(space.facts.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, region.offset, region.size_bytes)
    except OSError as error:
        raise ResourceExhausted(f"{space.facts.path}: no room for {region.size_bytes} bytes: {error.strerror}") from error
    finally:
        os.close(descriptor)
