"""When a child that died is started again, and when that is given up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RESTARTS_MAX = 5  # deaths within the window that are forgiven
RESTART_WINDOW_SECONDS = 120.0
BACKOFF_FIRST_SECONDS = 0.25  # short: a pool killed by hand is back before a chat notices
BACKOFF_MAX_SECONDS = 10.0


@dataclass(slots=True)
class RestartPolicy:
    """Exponential backoff over the deaths of the last window. Time is a parameter (monotonic seconds)."""

    restarts_max: int = RESTARTS_MAX
    window_seconds: float = RESTART_WINDOW_SECONDS
    backoff_first_seconds: float = BACKOFF_FIRST_SECONDS
    backoff_max_seconds: float = BACKOFF_MAX_SECONDS
    _deaths: deque[float] = field(default_factory=deque)

    def delay_after_death(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None: it died too often, give up."""
        while self._deaths and now - self._deaths[0] > self.window_seconds:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self.restarts_max:
            return None
        return min(self.backoff_max_seconds, self.backoff_first_seconds * 2.0 ** (len(self._deaths) - 1))
