"""How the pool is, for people who look: asked now and then, never for the sake of a request.

Owns the poll and what is known between two. A pool that does not answer is told of as such and slows nothing down.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from treadle.contract.errors import TreadleError

POLL_SECONDS = 3.0
ANSWER_SECONDS_MAX = 2.0
TABLES_MAX = 64  # told of; a pool may hold more


@dataclass(frozen=True, slots=True)
class PoolTable:
    """One resident version. bytes: of its segments; warm: cold, warming, warm or unknown, in the pool's own process."""

    model: str
    version: str
    current: bool
    bytes: int
    readers: int
    warm: str


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What a pool says of itself; bytes_max 0: as much as its file system holds."""

    bytes: int
    bytes_max: int
    page_bytes: int
    draining: bool
    build_version: str
    tables: tuple[PoolTable, ...]


class Pool(Protocol):
    """A pool that can be asked. Raises the errors of `treadle.contract`."""

    address: str

    async def figures(self, timeout_seconds: float) -> PoolFigures:
        """How it is now."""
        ...


@dataclass(frozen=True, slots=True)
class PoolState:
    """The last word about a pool. figures None: it never answered; reason "": it answered last time; taken_seconds: monotonic."""

    address: str
    figures: PoolFigures | None
    reason: str
    taken_seconds: float


class PoolWatch:
    """Follows one pool while somebody looks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._wanted = asyncio.Event()
        self._state = PoolState(pool.address, None, "the pool has not answered yet", time.monotonic())

    def state(self) -> PoolState:
        """The last word, at once; and somebody looks, so the pool is asked again."""
        self._wanted.set()
        return self._state

    async def run(self) -> None:
        """Ask, at most once every POLL_SECONDS and only if the state was read since, until cancelled."""
        while True:
            self._wanted.clear()
            await self.look()
            await asyncio.sleep(POLL_SECONDS)
            await self._wanted.wait()

    async def look(self) -> None:
        """Ask once."""
        figures: PoolFigures | None
        try:
            figures, reason = await self._pool.figures(ANSWER_SECONDS_MAX), ""
        except TreadleError as error:
            figures, reason = self._state.figures, str(error)
        self._state = PoolState(self._pool.address, figures, reason, time.monotonic())
