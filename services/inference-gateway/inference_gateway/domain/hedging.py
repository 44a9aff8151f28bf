"""A second worker for a first piece that does not come: whoever begins first is heard, the other is stopped.

Owns the race and its budget: second calls are a small share of all, so that a slow hour does not double the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from inference_gateway.domain.calls import Call, retry_reason
from inference_gateway.domain.generation import Piece
from treadle.contract.errors import TreadleError

SHARE_MAX = 0.05  # of requests that may get a second call
SAVED_MAX = 10.0  # second calls that quiet times save up for a bad moment


class HedgeBudget:
    """Counts requests, and gives a second call to a share of them."""

    def __init__(self) -> None:
        self._saved = 1.0

    def earn(self) -> None:
        """A request came."""
        self._saved = min(self._saved + SHARE_MAX, SAVED_MAX)

    def spend(self) -> bool:
        """Whether a second call may be made; if so, it is paid."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


class Race:
    """Two calls for one generation. A context: leaving it ends all calls but the one that `run` returned."""

    def __init__(self, told: Callable[[str], None]) -> None:
        """told: called once with `won` (the second call did), `lost` or `failed` (both) if there was a second call."""
        self._told = told
        self._tasks: dict[asyncio.Task[Piece], Call] = {}
        self._winner: Call | None = None

    async def run(self, first: Call, second: Callable[[], Call | None], wait_seconds: float) -> tuple[Call, Piece]:
        """The call that begins first, with its first piece; `second` makes another one after `wait_seconds`, or None.

        Raises the first call's error where all fail, and at once an error of either that no worker can do better about.
        """
        leading = self._begin(first)
        await asyncio.wait({leading}, timeout=wait_seconds)
        other = None if leading.done() else second()
        if other is not None:
            self._begin(other)
        winner = await self._first_good()
        if other is not None:
            self._told("failed" if winner is None else "lost" if winner is leading else "won")
        if winner is None:
            raise leading.exception() or AssertionError("a race that nobody wins has an error for each")
        self._winner = self._tasks[winner]
        return self._winner, winner.result()

    async def __aenter__(self) -> Race:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            async with AsyncExitStack() as stack:  # whatever one of them raises, the others are ended too
                for task, call in self._tasks.items():
                    if call is not self._winner:
                        stack.push_async_callback(_end, task, call)
        except BaseException:
            if self._winner is not None:  # it will not reach whoever would have closed it
                await self._winner.close()
            raise

    def _begin(self, call: Call) -> asyncio.Task[Piece]:
        task = asyncio.create_task(call.first())
        self._tasks[task] = call
        return task

    async def _first_good(self) -> asyncio.Task[Piece] | None:
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return task
                if not isinstance(error, TreadleError) or retry_reason(error) is None:
                    raise error
        return None


async def _end(task: asyncio.Task[Piece], call: Call) -> None:
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():  # or its worker would count one request too many for ever
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # looked at: an error that came second is nobody's any more
    await call.close()
    if cancelled is not None:
        raise cancelled
