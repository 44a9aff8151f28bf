"""Waiting for what threads do, without giving the processor away: what is waited for may last for microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 20.0  # no wait here comes near it unless something is broken


def wait_for(condition: Callable[[], bool]) -> None:
    """Return once it is true; fails after SECONDS."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, "it never came true"
