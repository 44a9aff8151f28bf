"""Where rows that Mooncake reads come down: registered slots, kept for life, and the threads that read into them.

Owns the time limit of a read (Mooncake's own is 5 s or more), the number of slices in flight, and quarantine: after a read that
failed or was given up, Mooncake may still write to its slot, so that slot is never used or freed again. Does not know what the
bytes mean (`mooncake_source`).
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.mooncake_engine import Engine, Span
from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable

SLOT_BYTES = 4 << 20
SLOTS = 8  # reads at once of one process
QUARANTINED_SLOTS_MAX = 32  # 128 MiB that are never used again; beyond, something is badly wrong with the network
READERS_MAX = 16  # threads: one that waits for a dead owner comes back after Mooncake's own time limit
SLICES_MAX = 1024  # in flight; the engine rejects a batch, and what follows it, when about twice as many are queued


@dataclass(frozen=True, slots=True)
class LandingFigures:
    """Counts since the process began but for `quarantined_bytes`, which are so now."""

    reads: int = 0
    reads_failed: int = 0
    reads_abandoned: int = 0
    quarantined_bytes: int = 0


class Landing:
    """The slots and reading threads that go with one engine; thread-safe, and never closed."""

    def __init__(self, engine: Engine, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self.engine, self.slot_bytes = engine, slot_bytes
        self._slots, self._changed = slots, threading.Condition()
        self._free: list[NDArray[np.uint8]] = []
        self._made, self._quarantined, self._slices = 0, 0, 0
        self._reads, self._failed, self._abandoned = 0, 0, 0
        self._jobs: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._readers, self._idle = 0, 0
        self._slice_bytes = int(os.environ.get("MC_SLICE_SIZE", 64 << 10))

    @contextmanager
    def read(self, owner: str, pieces: Sequence[tuple[int, int]], deadline: Deadline) -> Iterator[NDArray[np.uint8]]:
        """The bytes of `pieces`, (address, length) each, side by side; u8, ours, valid inside the `with`.

        Raises DeadlineExceeded, Unavailable for a read that failed, ResourceExhausted when too many slots are in quarantine,
        InvalidArgument for more than a slot takes. After the first two the slot is in quarantine.
        """
        total = sum(length for _, length in pieces)
        slices = sum(-(-length // self._slice_bytes) for _, length in pieces)
        if total > self.slot_bytes or slices > SLICES_MAX:
            raise InvalidArgument(f"{total} bytes in {slices} slices, one read takes {self.slot_bytes} in {SLICES_MAX}")
        slot = self._take(slices, deadline)
        spans, at = [], slot.ctypes.data
        for address, length in pieces:
            spans.append(Span(at, address, length))
            at += length
        read = _Read(slot, slices, lambda: self.engine.read(owner, spans))
        self._start(read)
        if not read.ended.wait(deadline.remaining_seconds()):
            self._abandon(read, owner)
        if read.code != 0:
            raise Unavailable(f"Mooncake could not read {total} bytes from {owner} (code {read.code})") from read.failure
        try:
            yield slot[:total]
        finally:
            self._give_back(slot)

    def figures(self) -> LandingFigures:
        """What happened so far."""
        with self._changed:
            return LandingFigures(self._reads, self._failed, self._abandoned, self._quarantined * self.slot_bytes)

    # -- slots ----------------------------------------------------------------------------------------------------------

    def _take(self, slices: int, deadline: Deadline) -> NDArray[np.uint8]:
        """A slot, and room for so many slices."""
        with self._changed:
            while True:
                if self._quarantined >= QUARANTINED_SLOTS_MAX:
                    raise ResourceExhausted(
                        f"{self._quarantined} slots of {self.slot_bytes} bytes are in quarantine after reads that failed, the most "
                        "that is allowed: look at the network and the owners, then restart this process"
                    )
                if self._slices + slices <= SLICES_MAX and (self._free or self._made - self._quarantined < self._slots):
                    break
                if not self._changed.wait(deadline.remaining_seconds()):
                    raise DeadlineExceeded("no slot to read into became free in time")
            self._slices += slices
            try:
                return self._free.pop() if self._free else self._new_slot()
            except BaseException:
                self._slices -= slices
                raise

    def _new_slot(self) -> NDArray[np.uint8]:
        slot = np.frombuffer(mmap.mmap(-1, self.slot_bytes), dtype=np.uint8)  # page-aligned; the array keeps the mapping
        self.engine.register(slot)
        self._made += 1
        return slot

    def _give_back(self, slot: NDArray[np.uint8]) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    # -- reading --------------------------------------------------------------------------------------------------------

    def _start(self, read: _Read) -> None:
        with self._changed:
            self._reads += 1
            if self._idle == 0 and self._readers < READERS_MAX:
                self._readers += 1  # a daemon: a read that hangs does not keep the process
                threading.Thread(target=self._serve, name=f"treadle-mooncake-{self._readers}", daemon=True).start()
            else:
                self._idle = max(0, self._idle - 1)
        self._jobs.put(read)

    def _serve(self) -> None:
        while True:
            read = self._jobs.get()
            with self._changed:
                read.begun = not read.abandoned
            code = read.work() if read.begun else -1
            with self._changed:
                self._idle += 1
                self._slices -= read.slices
                self._ended(read, code)
                self._changed.notify_all()

    def _ended(self, read: _Read, code: int) -> None:
        """With the lock held. Of an abandoned read only one that was never begun, or arrived whole, gives its slot back."""
        read.code = code
        if not read.abandoned:
            if code != 0:
                self._failed += 1
                self._quarantined += 1
        elif not read.begun or code == 0:
            self._quarantined -= 1
            self._free.append(read.slot)
        read.ended.set()

    def _abandon(self, read: _Read, owner: str) -> None:
        with self._changed:
            if read.ended.is_set():  # it ended at the last moment
                return
            read.abandoned = True
            self._abandoned += 1
            self._quarantined += 1
        raise DeadlineExceeded(f"Mooncake did not read from {owner} in time; the slot stays in quarantine until the read has ended")


class _Read:
    """One read on its way to a thread and back."""

    def __init__(self, slot: NDArray[np.uint8], slices: int, work: Callable[[], int]) -> None:
        self.slot, self.slices, self._work = slot, slices, work
        self.ended, self.code = threading.Event(), -1
        self.abandoned, self.begun = False, False
        self.failure: Exception | None = None

    def work(self) -> int:
        """Read; the engine's code, -1 with a `failure` for what Python raised: a reading thread never dies of it."""
        try:
            return self._work()
        except Exception as error:
            self.failure = error
            return -1


_landings: dict[str, Landing] = {}
_landings_lock = threading.Lock()


def landing(host: str, protocol: str) -> Landing:
    """The landing of this process for `protocol`, made at first need: engine and slots are kept for life.

    host: this host's address towards the owners, used by the first call
    """
    with _landings_lock:
        if protocol not in _landings:
            _landings[protocol] = Landing(Engine(host, protocol))
        return _landings[protocol]


def landing_figures() -> LandingFigures:
    """All landings of this process together; zeros where Mooncake was never used."""
    with _landings_lock:
        each = [one.figures() for one in _landings.values()]
    return LandingFigures(
        sum(one.reads for one in each), sum(one.reads_failed for one in each), sum(one.reads_abandoned for one in each),
        sum(one.quarantined_bytes for one in each),
    )  # fmt: skip
