"""Changes of what a store keeps and what names mean, told to whoever waits for them, until the store stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from treadle.contract.errors import Unavailable


class Changes:
    """For one event loop. `draining`: the store takes no new work."""

    def __init__(self) -> None:
        self.draining = False
        self.generation = 0
        self._changed = asyncio.Condition()

    def refuse_if_draining(self) -> None:
        """Raise Unavailable once the store stops."""
        if self.draining:
            raise Unavailable("the store stops and takes no new work")

    async def announce(self) -> None:
        """Something has changed: wake everybody."""
        async with self._changed:
            self.generation += 1
            self._changed.notify_all()

    async def drain(self) -> None:
        """Take no new work and wake everybody."""
        self.draining = True
        await self.announce()

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Return once a change has made `condition` true or the store stops: True; False after `seconds` of neither."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.draining or condition())
        except TimeoutError:
            return False
        return True

    async def since(self, generation: int, seconds: float) -> bool:
        """The same for a change of any kind after that generation."""
        return await self.until(lambda: self.generation != generation, seconds)
