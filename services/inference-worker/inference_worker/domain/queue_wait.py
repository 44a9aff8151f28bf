"""How long the next request will wait for its place, from how long requests have taken."""

from __future__ import annotations

RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.5, 60.0
RECENT = 0.1  # weight of the newest request in the mean


class QueueWait:
    """Prediction for a batch of `sequences_max` places. Owned by whoever ends requests; reading it may be one request late."""

    def __init__(self, sequences_max: int) -> None:
        self._sequences_max, self._mean_request_seconds = sequences_max, 1.0

    def ended(self, seconds: float) -> None:
        """A request is over that took so long, waiting included."""
        self._mean_request_seconds += RECENT * (seconds - self._mean_request_seconds)

    def seconds(self, waiting: int) -> float:
        """When all who wait now, and one more, should have had a place: a batch frees one each `mean / sequences_max` seconds."""
        return (waiting + 1) * self._mean_request_seconds / self._sequences_max

    def retry_after_seconds(self, waiting: int) -> float:
        """The same as advice to who is refused."""
        return min(max(self.seconds(waiting), RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)
