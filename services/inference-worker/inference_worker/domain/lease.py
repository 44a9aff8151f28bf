"""A request's use of a memory, from the moment it is taken in until it is over. Knows no memory from inside, and no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

MemoryT = TypeVar("MemoryT")  # an EngramMemory, an OpenPrefix: the scheduler and its tests know requests without torch


class Lease(Generic[MemoryT]):
    """One request's use of a memory, or of none: the memory stays open until `release`, which counts once. Any thread."""

    def __init__(self, memory: MemoryT | None = None, released: Callable[[], None] | None = None) -> None:
        self.memory = memory
        self._released, self._lock = released, threading.Lock()

    def release(self) -> None:
        """The request is over. Further calls do nothing."""
        with self._lock:
            released, self._released = self._released, None
        if released is not None:
            released()
