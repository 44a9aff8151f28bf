"""How far a long piece of work is."""

from __future__ import annotations

import time
from dataclasses import dataclass

PROGRESS_SECONDS = 0.25  # a few times a second: a bar that moves, a stream that stays quiet


@dataclass(frozen=True, slots=True)
class Progress:
    """`bytes_done` of `bytes_total`; `step` is what is being worked on, e.g. "layer 2"."""

    bytes_done: int
    bytes_total: int
    step: str


class Pace:
    """Says when the next report is due."""

    def __init__(self, seconds: float = PROGRESS_SECONDS) -> None:
        self._seconds, self._next = seconds, 0.0

    def due(self) -> bool:
        """True if the last report is long enough ago; then this one counts as made."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
