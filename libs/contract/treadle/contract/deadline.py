"""Deadlines: absolute and monotonic inside a process, relative on the wire."""

from __future__ import annotations

import time
from dataclasses import dataclass

from treadle.contract.errors import DeadlineExceeded, InvalidArgument


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment on this process's monotonic clock, in nanoseconds. Never sent as it is: send `remaining_seconds()`."""

    at_ns: int

    @classmethod
    def after(cls, seconds: float, *, now_ns: int | None = None) -> Deadline:
        """The moment `seconds` from now. Raises InvalidArgument for a negative or non-finite time."""
        if not 0 <= seconds < 1e9:
            raise InvalidArgument(f"a deadline is 0 to 1e9 seconds ahead, got {seconds}")
        return cls((time.monotonic_ns() if now_ns is None else now_ns) + round(seconds * 1e9))

    @classmethod
    def never(cls) -> Deadline:
        """No deadline: of a hint, which is worked on while nothing else is to do."""
        return cls((1 << 63) - 1)

    def remaining_seconds(self, *, now_ns: int | None = None) -> float:
        """Seconds left, 0.0 once the moment has passed."""
        return max(0.0, self.slack_of(time.monotonic_ns() if now_ns is None else now_ns))

    def slack_of(self, completed_ns: int) -> float:
        """Slack of something completed at `completed_ns`: deadline minus completion in seconds, negative when late."""
        return (self.at_ns - completed_ns) / 1e9

    def check(self, *, before: str, now_ns: int | None = None) -> None:
        """Raise DeadlineExceeded, naming the step that will not be started, once the moment has passed."""
        late_ns = (time.monotonic_ns() if now_ns is None else now_ns) - self.at_ns
        if late_ns >= 0:
            raise DeadlineExceeded(f"deadline passed {late_ns / 1e6:.3f} ms before {before}")
