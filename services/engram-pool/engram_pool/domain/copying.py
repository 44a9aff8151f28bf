"""Copies the rows of every layer from a source into a staging.

Two slices of memory, whatever the size: one is filled while the other is appended. Of a table that is spread over owners all chunks
are read and hashed, so that the version is that of the whole table; chunks that are not kept are not written, and from peers, which
tell their digests, not even read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.compute import Compute
from engram_pool.domain.grown_rows import check_table
from engram_pool.domain.peer_rows import PeerRows
from engram_pool.domain.ports import Meters
from engram_pool.domain.progress import Pace, Progress
from engram_pool.domain.row_sources import BLOCK_ROWS, RowSource, RowsWithFiles
from engram_pool.domain.storing import Ranges, Staging, TableWriter
from treadle.contract import Table
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels.held import chunk_runs, chunks_in, ranges_text
from treadle.kernels.segment_layout import Layout, header_bytes_for

SLICE_BYTES = 8 << 20  # two of them, their scratch and a random block stay far below the 256 MiB that a load may take
METADATA_BYTES = 16 << 10  # beside the template: the tables of up to 64 layers, digests of weights and card

Held = Mapping[int, Ranges | None]
Result = TypeVar("Result")


def bytes_needed(source: RowSource | PeerRows, held: Held) -> int:
    """Bytes that the segments of a load take, holes not counted, and what is kept beside them."""
    kept = source.kept_bytes if isinstance(source, RowsWithFiles) else 0
    return kept + sum(_segment_bytes(source, layer, held[layer]) for layer in source.model.layers)


def _segment_bytes(source: RowSource | PeerRows, layer: int, held: Ranges | None) -> int:
    words = 0 if source.token_map is None else source.token_map.shape[0]
    row_bytes = source.model.row.bytes
    layout = Layout(source.row_count(layer), row_bytes, words, _header_bytes(source, layer, held))
    return layout.stored_bytes(chunk_runs(held, row_bytes, layout.chunks))


def _header_bytes(source: RowSource | PeerRows, layer: int, held: Ranges | None) -> int:
    """Room for a manifest with its tables, for digests beside it, and for the ranges that are held."""
    ranges = 0 if held is None else len(ranges_text(held))
    return header_bytes_for(source.row_count(layer) * source.model.row.bytes, len(source.model.to_json()) + METADATA_BYTES + ranges)


class Copies:
    """Streams every layer of a source into the writers of a staging."""

    def __init__(self, source: RowSource | PeerRows, held: Held, staging: Staging, compute: Compute, meters: Meters) -> None:
        self.tables: dict[int, Table] = {}
        self._source, self._held, self._staging, self._compute, self._meters = source, held, staging, compute, meters
        self._total = sum(source.row_count(layer) for layer in source.model.layers) * source.model.row.bytes
        self._done, self._pace = 0, Pace()

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Progress a few times a second; `tables` is complete at the end."""
        source = self._source
        for layer in source.model.layers:
            yield Progress(self._done, self._total, f"layer {layer}")
            held, rows = self._held[layer], source.row_count(layer)
            writer = await self._compute.run(
                self._staging.writer,
                layer,
                rows,
                source.model.row.bytes,
                source.token_map,
                _header_bytes(source, layer, held),
                held,
            )
            copying = (
                self._chunks(source, layer, writer) if isinstance(source, PeerRows) else self._slices(source, layer, rows, writer)
            )
            async with aclosing(copying) as steps:
                async for byte_count in steps:
                    self._done += byte_count
                    self._meters.rows_loaded(byte_count)
                    if self._pace.due():
                        yield Progress(self._done, self._total, f"layer {layer}")
            self.tables[layer] = await self._compute.run(writer.table)
            check_table(source.model, layer, self.tables[layer])
        yield Progress(self._total, self._total, "publishing")

    async def _slices(self, source: RowSource, layer: int, rows: int, writer: TableWriter) -> AsyncGenerator[int, None]:
        """Rows in order; yields the bytes of each slice that was appended."""
        row_bytes = source.model.row.bytes
        slice_rows = max(1, SLICE_BYTES // (row_bytes * BLOCK_ROWS)) * BLOCK_ROWS
        here, there = (np.empty((min(slice_rows, rows), row_bytes), dtype=np.uint8) for _ in range(2))

        def fill(buffer: NDArray[np.uint8], first: int) -> int:
            count: int = min(buffer.shape[0], rows - first)
            if count:
                source.read(layer, first, buffer[:count])
            return count

        filled = await self._compute.run(fill, here, 0)
        first = filled
        while filled:
            ahead = await _both(self._compute.run(writer.append, here[:filled]), self._compute.run(fill, there, first))
            yield filled * row_bytes
            here, there, filled, first = there, here, ahead, first + ahead

    async def _chunks(self, source: PeerRows, layer: int, writer: TableWriter) -> AsyncGenerator[int, None]:
        """Chunks in order, those that are not kept by their digests; yields the bytes of each that was dealt with."""
        table_bytes = source.row_count(layer) * source.model.row.bytes
        digests = source.digests[layer]
        kept = chunks_in(chunk_runs(self._held[layer], source.model.row.bytes, len(digests)))
        wanted = next(kept, None)
        data = await self._compute.run(_read, source, layer, wanted)
        for chunk, digest in enumerate(digests):
            if chunk != wanted:
                writer.skip(digest)
            else:
                assert data is not None
                wanted = next(kept, None)
                data = await _both(self._compute.run(writer.append_bytes, data), self._compute.run(_read, source, layer, wanted))
            yield min(CHUNK_BYTES, table_bytes - chunk * CHUNK_BYTES)


def _read(source: PeerRows, layer: int, chunk: int | None) -> NDArray[np.uint8] | None:
    return None if chunk is None else source.read_chunk(layer, chunk)


async def _both(appending: Awaitable[None], reading: Awaitable[Result]) -> Result:
    """What was read, once both threads have ended: a source may be as slow as the checksums."""
    appended, ahead = await asyncio.gather(appending, reading, return_exceptions=True)
    for result in (appended, ahead):
        if isinstance(result, BaseException):
            raise result
    return ahead  # type: ignore[return-value]  # no exception
