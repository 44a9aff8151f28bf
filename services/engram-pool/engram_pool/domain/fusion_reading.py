"""Fusion weights of grown memories, handed out in pieces to whoever fuses their rows."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from engram_pool.domain.compute import Compute, Turnstile
from engram_pool.domain.gathering import PIECE_BYTES
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Meters
from treadle.contract import Deadline, NotFound

READS_MAX = 8  # at once: an engine reads a version's weights once, when it opens it


class FusionReading:
    """ReadFusion over the versions of a pool; at most READS_MAX calls at once."""

    def __init__(self, pool: Pool, compute: Compute, meters: Meters) -> None:
        self._pool, self._compute, self._meters = pool, compute, meters
        self._calls = Turnstile("reading of fusion weights", "readings of fusion weights", READS_MAX, retry_after_seconds=0.5)

    async def read(self, model: str, version: str, deadline: Deadline) -> AsyncGenerator[tuple[int, bytes], None]:
        """(size of the whole file, piece) in order, at most PIECE_BYTES at a time.

        Raises NotFound for no such version or one without weights, ResourceExhausted, DeadlineExceeded, DataLoss.
        """
        with self._pool.at_work(), self._calls.turn():
            resident = self._pool.find_readable(model, version)
            fusion = resident.stored.fusion
            if fusion is None:
                raise NotFound(
                    f"{model} {resident.version}: no fusion weights are kept here; memories loaded from a grown folder have them"
                )
            with resident.in_use():
                for first in range(0, fusion.file_bytes, PIECE_BYTES):
                    resident.check_intact()
                    deadline.check(before=f"byte {first} of {fusion.file_bytes}")
                    piece = await self._compute.run(fusion.read, first, min(PIECE_BYTES, fusion.file_bytes - first))
                    self._meters.fusion_read(len(piece))
                    yield fusion.file_bytes, piece
