"""Changes of what a pool holds, told to whoever waits for them, until the pool stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from treadle.contract import Unavailable


class Changes:
    """For one event loop. `draining`: the pool takes no new work."""

    def __init__(self) -> None:
        self.draining = False
        self._changed, self._generation = asyncio.Condition(), 0

    def refuse_if_draining(self) -> None:
        """Raise Unavailable once the pool stops."""
        if self.draining:
            raise Unavailable("the pool stops and takes no new work")

    async def announce(self) -> None:
        """Something has changed: wake everybody."""
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a change has made `condition` true, or the pool stops."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.draining or condition())

    async def each(self) -> AsyncGenerator[None, None]:
        """Once at once, and again after each change. Raises Unavailable when the pool stops."""
        seen = -1
        while True:
            async with self._changed:
                while not self.draining and self._generation == seen:
                    await self._changed.wait()
                seen = self._generation
            self.refuse_if_draining()
            yield
