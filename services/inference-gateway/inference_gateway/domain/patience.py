"""How long each of many waits in a row may take, with one timer for all of them.

Owns the timer and the interruption. What a wait that was too long means is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


class Patience:
    """Interrupts whoever waits too long, as asyncio.timeout around each wait would. One waits at a time; whoever makes it calls `close`.

    A wait that ends in time, as nearly all do, touches no timer: the one that runs looks at the wait there is when it rings, and is
    set anew. That is a tenth of what a timer for each piece of an answer costs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = self._until = 0.0
        self._waiting: asyncio.Task[object] | None = None
        self.lost = False
        """Whether a wait was interrupted."""

    async def within(self, seconds: float, coming: Awaitable[Result]) -> Result:
        """What `coming` gives. Raises TimeoutError, with `lost`, after `seconds`, or sooner after `lose`."""
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        self._waiting, self._until = task, self._loop.time() + seconds
        if self._timer is None or self._rings_at > self._until:
            self._set(self._until)
        try:
            return await coming
        except asyncio.CancelledError as error:
            if self.lost and task.cancelling() - 1 <= cancelled:  # nobody else has cancelled the task as well
                raise TimeoutError from error
            raise
        finally:
            self._waiting = None
            if self.lost:
                task.uncancel()

    def lose(self) -> None:
        """Interrupt the wait in progress, if there is one, as if its time were over."""
        if self._waiting is not None and not self.lost:
            self._until = self._loop.time()
            self._set(self._until)

    def close(self) -> None:
        """Stop the timer. Nobody may be waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        self.close()
        self._rings_at, self._timer = at, self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiting is None:  # between two waits: the next one sets it
            return
        if self._loop.time() < self._until:
            self._set(self._until)
            return
        self.lost = True
        self._waiting.cancel()
