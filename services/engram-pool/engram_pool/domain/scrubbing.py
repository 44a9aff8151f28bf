"""Checks every chunk of every version in the background, at a bounded rate, one chunk at a time, yielding to gathers.

Owns the pace and the count of a pass. What becomes of a version with a bad chunk is the pool's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.compute import Compute
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Meters
from engram_pool.domain.verification import check_chunk
from treadle.contract import DataLoss, InvalidArgument, TreadleError, Unavailable
from treadle.contract.table_manifest import CHUNK_BYTES

log = logging.getLogger("engram_pool")
PAUSE_SECONDS = 1.0  # between two passes, and while there is nothing to check
YIELD_SECONDS = 0.01  # a gather takes milliseconds
YIELDS_MAX = 100  # a pool that is never idle is scrubbed all the same


@dataclass(slots=True)
class Scrubbed:
    """Since the start. `pass_ended_at_seconds`: since the epoch; 0: no whole pass yet."""

    checked: int = 0
    bad: int = 0
    repaired: int = 0
    pass_ended_at_seconds: float = 0.0


class Scrubber:
    """Over the versions of `pool`. `busy`: whether gathers are in progress."""

    def __init__(
        self, pool: Pool, compute: Compute, meters: Meters, *, bytes_per_second: int, busy: Callable[[], bool] = lambda: False
    ) -> None:
        """bytes_per_second: at most; 0: no scrubbing. Raises InvalidArgument."""
        if bytes_per_second < 0:
            raise InvalidArgument(f"scrub_bytes_per_second: at least 0, got {bytes_per_second}")
        self._pool, self._compute, self._meters = pool, compute, meters
        self._bytes_per_second, self._busy = bytes_per_second, busy
        self._due = 0.0
        self.figures = Scrubbed()

    async def run_forever(self) -> None:
        """Pass after pass, until cancelled."""
        while self._bytes_per_second:
            try:
                await self.run_once()
            except (TreadleError, OSError) as error:  # a broken disk, say, must not end the scrubber
                log.error("scrubbing failed", exc_info=error)
            await asyncio.sleep(PAUSE_SECONDS)

    async def run_once(self) -> None:
        """One pass over the versions that are there now."""
        residents = self._pool.residents()
        for resident in residents:
            try:
                await self._scrub(resident)
            except Unavailable:  # it is being deleted
                continue
        if residents:
            self.figures.pass_ended_at_seconds = time.time()

    async def _scrub(self, resident: Resident) -> None:
        for layer, segment in resident.stored.segments.items():
            if not await self._whole(resident, CHUNK_BYTES, segment.check_frame):
                return
            for chunk in segment.chunks:
                bad = self.figures.bad
                if not await self._whole(resident, CHUNK_BYTES, partial(check_chunk, resident.stored, layer, chunk)):
                    return
                self.figures.checked += 1
                self.figures.repaired += self.figures.bad - bad
                self._meters.scrubbed("ok", 1)
        if resident.stored.fusion is not None:
            await self._whole(resident, resident.stored.fusion.file_bytes, resident.stored.fusion.verify)

    async def _whole(self, resident: Resident, byte_count: int, check: Callable[[], None]) -> bool:
        """True if what `check` reads is whole, or whole again; False if the version has gone out of service."""
        await self._wait_for_turn(byte_count)
        if resident.corrupt:
            return False
        try:
            with resident.in_use():
                await self._compute.run(check)
        except DataLoss as error:
            self.figures.bad += 1
            self._meters.scrubbed("bad", 1)
            return await self._pool.found_damaged(resident, error)
        return True

    async def _wait_for_turn(self, byte_count: int) -> None:
        """Keep the rate, then let gathers pass."""
        now = time.monotonic()
        self._due = max(self._due, now) + byte_count / self._bytes_per_second
        await asyncio.sleep(self._due - byte_count / self._bytes_per_second - now)
        for _ in range(YIELDS_MAX):
            if not self._busy():
                return
            await asyncio.sleep(YIELD_SECONDS)
