"""How long a memory that did not answer is still waited for: a wait in vain at every layer of every step would hang an answer.

Owns the decision for one handle. A step's policy names the longest wait; this may shorten it, and never prolongs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

IN_VAIN_SECONDS_MAX = 3.0  # of waits after which rows were still missing, one after the other
GIVEN_UP_SECONDS = (
    0.001  # longest wait after that: rows are asked for when a step begins, so a memory that is well has them by then
)
PROBE_SECONDS = 10.0  # between two waits of full length for a memory that is given up, should it be well and slow


class Patience:
    """One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._in_vain_seconds = 0.0
        self._probe_at = 0.0

    @property
    def given_up(self) -> bool:
        """Whether waits are short now."""
        return self._in_vain_seconds >= IN_VAIN_SECONDS_MAX

    def allowed_seconds(self, wanted_seconds: float) -> float:
        """Longest wait now, where the policy wants `wanted_seconds`."""
        if not self.given_up:
            return wanted_seconds
        now = self._clock()
        if now >= self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            return wanted_seconds
        return min(wanted_seconds, GIVEN_UP_SECONDS)

    def waited(self, seconds: float, *, in_vain: bool) -> None:
        """A wait of so long is over; `in_vain`: rows had not come by then."""
        if not in_vain:
            self._in_vain_seconds = 0.0
            return
        was_given_up = self.given_up
        self._in_vain_seconds += seconds
        if self.given_up and not was_given_up:
            self._probe_at = self._clock() + PROBE_SECONDS
