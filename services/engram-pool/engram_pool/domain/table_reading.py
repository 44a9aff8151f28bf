"""The bytes of tables as they lie here, for pools that load from this one or repair a chunk from it.

Owns limits and pieces. A chunk that turned out damaged is read out too: the other pool compares digests, and may need the next one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np

from engram_pool.domain.compute import Compute, Turnstile
from engram_pool.domain.gathering import PIECE_BYTES
from engram_pool.domain.pool import Pool
from engram_pool.domain.storing import TableSegment
from treadle.contract import Deadline, RowOutOfRange
from treadle.contract.table_manifest import CHUNK_BYTES

READS_MAX = 8  # at once: pools that load or repair
_RETRY_AFTER_SECONDS = 0.25


class TableReading:
    """ReadTable over the versions of a pool."""

    def __init__(self, pool: Pool, compute: Compute) -> None:
        self._pool, self._compute = pool, compute
        self._reads = Turnstile("table read", "table reads", READS_MAX, _RETRY_AFTER_SECONDS)

    async def describe(self, model: str, version: str, layer: int) -> tuple[bytes, bytes]:
        """(sha256 of each chunk of the whole table, joined; token map, int32 little-endian). Raises NotFound, InvalidArgument."""
        with self._pool.at_work(), self._reads.turn():
            resident = self._pool.find_readable(model, version, damaged_too=True)
            resident.model.layer_position(layer)
            segment = resident.stored.segments[layer]
            words = b"" if segment.token_map is None else segment.token_map.astype("<i4").tobytes()
            return b"".join(segment.chunk_digests), words

    async def read(
        self, model: str, version: str, layer: int, first_byte: int, byte_count: int, deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        """Bytes [first_byte, first_byte + byte_count) of the rows, at most PIECE_BYTES at a time.

        Raises RowOutOfRange, before anything is read, where they are not all here; NotFound, InvalidArgument, DeadlineExceeded.
        """
        with self._pool.at_work(), self._reads.turn():
            resident = self._pool.find_readable(model, version, damaged_too=True)
            with resident.in_use():
                resident.model.layer_position(layer)
                segment = resident.stored.segments[layer]
                last_byte = first_byte + byte_count
                _check_span(segment, first_byte, last_byte)
                flat = segment.rows.reshape(-1)
                for at in range(first_byte, last_byte, PIECE_BYTES):
                    deadline.check(before=f"byte {at} of layer {layer}")
                    yield await self._compute.run(np.ndarray.tobytes, flat[at : min(at + PIECE_BYTES, last_byte)])


def _check_span(segment: TableSegment, first_byte: int, last_byte: int) -> None:
    size = segment.row_count * segment.row_bytes
    if last_byte > size:
        raise RowOutOfRange(f"bytes [{first_byte}, {last_byte}): the table has {size}")
    if segment.held is None:
        return
    here = set(segment.chunks)
    for chunk in range(first_byte // CHUNK_BYTES, -(-last_byte // CHUNK_BYTES)):
        if chunk not in here:
            raise RowOutOfRange(f"chunk {chunk} is not held here: another owner of this table has it")
