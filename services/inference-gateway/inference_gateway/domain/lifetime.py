"""How many requests there are at once, how long each may take, and how all of them end.

Owns the limit on requests in progress, their deadlines and the drain. Does not know what a request does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from treadle.contract import Deadline
from treadle.contract.errors import DeadlineExceeded, ResourceExhausted, TreadleError, Unavailable

BUSY_RETRY_SECONDS = 1.0  # a generation in progress ends within about that on a machine that keeps up
OVER_SECONDS = 0.01  # timers are rounded each in its own way: what ends so near to the deadline ends by it


class Lifetime:
    """The time one request has: an async context that is left by its deadline, or earlier by `end`."""

    def __init__(self, seconds: float) -> None:
        self.deadline = Deadline.after(seconds)
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._inside = False
        self._reason: TreadleError | None = None

    def shorten(self, seconds: float) -> None:
        """Let it take no longer than `seconds` from now; never longer than before."""
        deadline = Deadline.after(seconds)
        if deadline < self.deadline and self._reason is None and not self._timeout.expired():
            self.deadline, self._seconds = deadline, seconds
            self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def end(self, reason: TreadleError) -> None:
        """Leave the context now by raising `reason` from it. Once it is being left, this changes nothing."""
        if self._inside and self._reason is None and not self._timeout.expired():
            self._reason = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Lifetime:
        await self._timeout.__aenter__()
        self._inside = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            raise self._reason or self._late() from expired
        if isinstance(error, DeadlineExceeded) and self.deadline.remaining_seconds() < OVER_SECONDS:
            raise self._late() from error  # a call that was given what was left has noticed it first

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"not complete within {self._seconds:g} seconds")


class Admission:
    """Lets requests in up to a limit, and out in good order when the gateway stops."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._alive: set[Lifetime] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.leaving = self.draining = False
        """leaving: who looks is told not to send more; draining: what comes is refused."""

    @property
    def in_progress(self) -> int:
        """Requests let in and not yet out."""
        return len(self._alive)

    @asynccontextmanager
    async def admit(self, seconds: float) -> AsyncIterator[Lifetime]:
        """Runs the body of the context as one request that may take `seconds`.

        Raises ResourceExhausted at the limit and Unavailable once the gateway drains, both before the body; DeadlineExceeded
        when the time is over, and whatever reason the lifetime is ended with.
        """
        if self.draining:
            raise stopping()
        if len(self._alive) >= self._calls_max:
            raise ResourceExhausted(f"{self._calls_max} requests in progress, the limit calls_max", BUSY_RETRY_SECONDS)
        lifetime = Lifetime(seconds)
        self._alive.add(lifetime)
        self._empty.clear()
        try:
            async with lifetime:
                yield lifetime
        finally:
            self._alive.discard(lifetime)
            if not self._alive:
                self._empty.set()

    def leave(self) -> None:
        """Say that the end is near: whoever asks for readiness hears no, whoever comes late is still let in."""
        self.leaving = True

    async def drain(self, seconds: float) -> int:
        """Let nobody in; wait up to `seconds` for those inside, then end them. Returns how many had to be ended."""
        self.leaving = self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            left = list(self._alive)
            for lifetime in left:
                lifetime.end(stopping())
            return len(left)
        return 0


def stopping() -> Unavailable:
    """What a request is told that comes, or is still there, when the gateway stops."""
    return Unavailable("the gateway is stopping; try again in a moment")
