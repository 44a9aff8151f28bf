"""The staging slots of the mooncake door: lent to clients for a while, with a generation, and never queued for.

Plain state over one array. Does not gather into slots or talk to anybody (`mooncake_door`).
"""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from treadle.contract import ResourceExhausted

RETRY_AFTER_SECONDS = 0.005  # a slot is lent for about a millisecond


class SlotRing:
    """Slots of `slot_bytes` in `memory`, flat u8. A slot is free, being filled, or lent until its lease ends. Thread-safe."""

    def __init__(self, memory: NDArray[np.uint8], slot_bytes: int) -> None:
        self._memory, self.slot_bytes = memory, slot_bytes
        self.count = memory.nbytes // slot_bytes
        self._lock = threading.Lock()
        self._free = list(range(self.count))
        self._generations = [0] * self.count
        self._lent: dict[int, float] = {}  # slot -> when its lease ends, monotonic seconds
        self.leases_expired = 0

    @property
    def in_use(self) -> int:
        """Slots that are being filled or lent."""
        with self._lock:
            return self.count - len(self._free)

    def take(self) -> int:
        """A slot to fill; its lease begins with `lend`. Raises ResourceExhausted when none is free and no lease has ended."""
        with self._lock:
            if not self._free:
                self._take_back_expired()
            if not self._free:
                raise ResourceExhausted(
                    f"all {self.count} slots are lent; try again in {RETRY_AFTER_SECONDS:g} s, or raise mooncake_slots",
                    RETRY_AFTER_SECONDS,
                )
            slot = self._free.pop()
            self._generations[slot] += 1
            return slot

    def view(self, slot: int, length: int) -> NDArray[np.uint8]:
        """The first `length` bytes of a slot."""
        begin = slot * self.slot_bytes
        return self._memory[begin : begin + length]

    def address(self, slot: int) -> int:
        """Where a slot begins in this process."""
        return int(self._memory.ctypes.data) + slot * self.slot_bytes

    def lend(self, slot: int, seconds: float) -> int:
        """From now on it is the client's, at most so long. Returns its generation."""
        with self._lock:
            self._lent[slot] = time.monotonic() + seconds
            return self._generations[slot]

    def give_back(self, slot: int) -> None:
        """A slot that was taken and could not be filled is free again."""
        with self._lock:
            self._free.append(slot)

    def release(self, slot: int, generation: int) -> bool:
        """The client has read it; False, and nothing done, where its lease had ended."""
        with self._lock:
            if slot not in self._lent or self._generations[slot] != generation:
                return False
            del self._lent[slot]
            self._free.append(slot)
            return True

    def _take_back_expired(self) -> None:
        now = time.monotonic()
        for slot in [slot for slot, ends in self._lent.items() if ends <= now]:
            del self._lent[slot]
            self._free.append(slot)
            self.leases_expired += 1
