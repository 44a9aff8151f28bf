"""A circuit breaker for one worker: who fails again and again is left alone for a while, then tried with one request.

Owns the decision from outcomes alone. Which errors are the worker's and which the request's own, dispatch knows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether a worker gets requests."""

    CLOSED = "closed"  # all of them
    OPEN = "open"  # none
    HALF_OPEN = "half_open"  # one at a time, to see whether it is well again


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens and for how long.

    failures_max:     failures in a row that open it
    failure_share:    of the outcomes of the last `window_seconds` that open it, once there were `outcomes_min`
    open_seconds:     until the first probe; doubled with each probe that fails, up to `open_seconds_max`
    outcomes_kept:    most outcomes remembered
    """

    failures_max: int = 5
    failure_share: float = 0.5
    outcomes_min: int = 10
    window_seconds: float = 30.0
    open_seconds: float = 2.0
    open_seconds_max: float = 30.0
    outcomes_kept: int = 256


class Breaker:
    """Watches the calls of one worker. Not thread-safe: one event loop uses it.

    A call tells `began` and later one of `failed`, `succeeded` and `undecided` (its caller left, or the request was wrong), with the
    number that `began` gave it. One that has succeeded may still fail: a first piece shows that the worker works, a broken stream
    that it does not.
    """

    def __init__(self, limits: BreakerLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._limits, self._clock = limits or BreakerLimits(), clock
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=self._limits.outcomes_kept)
        self._in_a_row = 0
        self._probes = self._probe = 0  # how many there were; the one that is out, 0: none
        self._probe_at: float | None = None  # None: closed
        self._open_seconds = self._limits.open_seconds

    @property
    def state(self) -> BreakerState:
        """The state at this moment."""
        if self._probe_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() >= self._probe_at else BreakerState.OPEN

    def allows(self) -> bool:
        """Whether the worker may get a request now. Changes nothing: who sends one says `began`."""
        return self._probe_at is None or (not self._probe and self._clock() >= self._probe_at)

    def began(self) -> int:
        """A call begins. Its number if it is the probe of a breaker that is not closed; 0: it is none."""
        if self._probe_at is None or self._probe:
            return 0
        self._probes += 1
        self._probe = self._probes
        return self._probe

    def succeeded(self) -> None:
        """The worker answered."""
        self._outcomes.append((self._clock(), True))
        self._in_a_row = 0
        if self._probe_at is not None:
            self.reset()

    def failed(self, probe: int = 0) -> None:
        """The worker was lost, or did not answer in time."""
        now = self._clock()
        self._outcomes.append((now, False))
        self._in_a_row += 1
        if self._probe_at is not None:
            if self._is_out(probe):  # not a call from before it opened
                self._open_seconds = min(self._open_seconds * 2, self._limits.open_seconds_max)
                self._open(now)
        elif self._in_a_row >= self._limits.failures_max or self._share(now) >= self._limits.failure_share:
            self._open(now)

    def undecided(self, probe: int = 0) -> None:
        """The call ended and says nothing about the worker; if it was the probe, another may be."""
        if self._is_out(probe):
            self._probe = 0

    def reset(self) -> None:
        """Forget everything: the worker works, or is another process now."""
        self._outcomes.clear()
        self._in_a_row, self._probe, self._probe_at = 0, 0, None
        self._open_seconds = self._limits.open_seconds

    def _is_out(self, probe: int) -> bool:
        return bool(probe) and probe == self._probe

    def _open(self, now: float) -> None:
        self._probe, self._probe_at = 0, now + self._open_seconds

    def _share(self, now: float) -> float:
        """Failures among the outcomes of the window; 0 while there are too few to tell."""
        while self._outcomes and self._outcomes[0][0] < now - self._limits.window_seconds:
            self._outcomes.popleft()
        count = len(self._outcomes)
        return 0.0 if count < self._limits.outcomes_min else sum(not well for _, well in self._outcomes) / count
