"""The line before the workers: who begins now, who waits a little, and who is better told to come back.

Owns the number of generations at once, the order of those that wait and the predicted wait. Does not know workers: how many
generations they take at once is asked for. A line must be short: what waits long here is late anyway, and keeps others waiting.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from inference_gateway.domain.generation import Priority
from inference_gateway.domain.ports import LineFigures
from treadle.contract import Deadline
from treadle.contract.errors import ResourceExhausted

RECENT = 0.1  # weight of the newest generation in the mean that waits are predicted from
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 1.0, 60.0
LOOK_SECONDS = 0.1  # how often who waits sees whether a worker came: nobody rings when the number of slots grows


_STEPS_BEHIND = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
_AGING_SHARE = 0.25  # of the longest wait: so much sooner a class is served than the next; whoever waits longer overtakes it


@dataclass(frozen=True, slots=True)
class LineLimits:
    """wait_seconds_max: longest wait; who would wait longer is refused at once. waiting_max: most requests that wait."""

    wait_seconds_max: float = 1.0
    waiting_max: int = 256


@dataclass(slots=True, order=True)
class _Waiter:
    """One that waits. `turn`: the moment it came, later by the steps of its class: the order of the line."""

    turn: float
    number: int
    called: asyncio.Event = field(default_factory=asyncio.Event, compare=False)


class WaitingLine:
    """Places for generations. Not thread-safe: one event loop uses it."""

    def __init__(
        self, limits: LineLimits, slots: Callable[[], int | None], figures: LineFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """slots: generations that the workers take at once now; None: not known, then nobody waits. clock: seconds, monotonic."""
        self._limits, self._slots, self._figures, self._clock = limits, slots, figures, clock
        self._line: list[_Waiter] = []
        self._taken = self._numbers = 0
        self._mean_seconds: float | None = None  # of a generation; None: none has ended yet

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._line)

    @property
    def taken(self) -> int:
        """Generations in progress, second calls for one request included."""
        return self._taken

    def predicted_wait_seconds(self, priority: Priority = Priority.NORMAL) -> float:
        """How long a request of this class that came now would wait; 0 while there is no measure of how long generations take."""
        return self._predicted(bisect_left(self._line, self._waiter(priority)))

    def check(self, priority: Priority, deadline: Deadline) -> None:
        """Raise ResourceExhausted, with the time to come back, for a request that would wait too long."""
        if self._is_free():
            return
        predicted = self.predicted_wait_seconds(priority)
        if predicted > min(self._limits.wait_seconds_max, deadline.remaining_seconds()):
            raise self._refused("wait", f"the workers are busy, the wait would be about {predicted:.2g} s", predicted)
        if len(self._line) >= self._limits.waiting_max:
            raise self._refused("full", f"{len(self._line)} requests wait, the limit queue_max", predicted)

    @asynccontextmanager
    async def place(self, priority: Priority, deadline: Deadline, *, joins: bool = False) -> AsyncIterator[None]:
        """Runs the body of the context as one generation; waits for its place first.

        Raises ResourceExhausted before the body: at once where the wait would be too long, or when it has been. One that `joins`
        others of its request, which has been let in, waits as long as its deadline allows. An end without an error tells how long
        a generation takes.
        """
        await self._enter(priority, deadline, joins)
        begun = self._clock()
        try:
            yield
            self._note(self._clock() - begun)
        finally:
            self.give_back()

    def take_spare(self) -> bool:
        """Take a place beside the caller's own if nobody needs it now; then `give_back` it."""
        if not self._is_free():
            return False
        self._taken += 1
        return True

    def give_back(self) -> None:
        """A generation is over."""
        self._taken -= 1
        self._call()

    async def _enter(self, priority: Priority, deadline: Deadline, joins: bool) -> None:
        self._call()
        if self._is_free():
            self._taken += 1
            self._figures.waited(0.0)
            return
        if not joins:
            self.check(priority, deadline)
        waiter, begun = self._waiter(priority), self._clock()
        insort(self._line, waiter)
        try:
            left = deadline.remaining_seconds()
            await self._called(waiter, left if joins else min(self._limits.wait_seconds_max, left))
        except BaseException:
            if waiter.called.is_set():  # its place came while it was leaving
                self.give_back()
            else:
                self._line.remove(waiter)
            raise
        self._figures.waited(self._clock() - begun)

    async def _called(self, waiter: _Waiter, seconds: float) -> None:
        until = self._clock() + seconds
        while not waiter.called.is_set():
            left = until - self._clock()
            if left <= 0:
                predicted = self._predicted(len(self._line))
                raise self._refused("waited", f"no worker was free within {seconds:.2g} s", predicted)
            try:
                async with asyncio.timeout(min(left, LOOK_SECONDS)):
                    await waiter.called.wait()
            except TimeoutError:
                self._call()

    def _call(self) -> None:
        """Give free places to those that wait, in order."""
        while self._line and self._has_slot():
            self._taken += 1
            self._line.pop(0).called.set()

    def _is_free(self) -> bool:
        return not self._line and self._has_slot()

    def _has_slot(self) -> bool:
        slots = self._slots()
        return slots is None or self._taken < slots

    def _waiter(self, priority: Priority) -> _Waiter:
        self._numbers += 1
        behind = _STEPS_BEHIND[priority] * _AGING_SHARE * self._limits.wait_seconds_max
        return _Waiter(self._clock() + behind, self._numbers)

    def _predicted(self, ahead: int) -> float:
        slots = self._slots()
        if self._mean_seconds is None or slots is None or (not self._line and self._taken < slots):
            return 0.0
        over = max(0, self._taken - slots)  # after a worker went
        return (ahead + over + 1) * self._mean_seconds / max(1, slots)

    def _note(self, seconds: float) -> None:
        mean = self._mean_seconds
        self._mean_seconds = seconds if mean is None else mean + RECENT * (seconds - mean)

    def _refused(self, reason: str, told: str, predicted_seconds: float) -> ResourceExhausted:
        self._figures.refused(reason)
        retry_seconds = min(max(predicted_seconds, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)
        return ResourceExhausted(f"{told}; try again in {retry_seconds:.0f} s", retry_seconds)
