"""A client that asks for rows without end and compares every one with what it must be. Run as a process of its own.

Counts what it saw into a file (see `counters`). Three ways of asking take turns: rows by id, rows by tokens, and a prefetch with
deadlines; each layer that comes back is one gather. It goes over to a new version when there is one, and finishes on the old one
what it began there.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.client import Fabric
from treadle.client.engram import EngramHandle
from treadle.contract import Deadline, TreadleError, WaitPolicy
from treadle.contract.policy import Late
from treadle_loadtests.counters import Counters
from treadle_loadtests.rows import MODEL, Steps, Truth

OPEN_SECONDS_MAX = 30.0  # an open is tried again for so long
OPEN_RETRY_SECONDS = 0.02
LOOK_EVERY = 16  # steps between two looks at the current version
STEPS_KEPT = 64
DEADLINE_SECONDS = 1.0
POLICY = WaitPolicy(wait_seconds_max=5.0, late=Late.FAIL)


@dataclass(frozen=True, slots=True)
class Task:
    """What a client does.

    engram:    address of a pool, or of several
    transport: as in `EngramPool.open`
    tokens:    of a step; a gather has 16 times as many rows
    rest_seconds: between two steps, so that clients leave the machine to others
    """

    engram: str
    transport: str
    seeds: tuple[int, ...]
    prime_base: int
    tokens: int
    number: int
    counters: str
    rest_seconds: float = 0.0

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read one."""
        fields = json.loads(text)
        return cls(**{**fields, "seeds": tuple(fields["seeds"])})


class CheckingClient:
    """Asks and compares until `over` is set."""

    def __init__(self, task: Task) -> None:
        self._task, self.counters = task, Counters(Path(task.counters))
        self._fabric = Fabric(engram=task.engram, timeout_seconds=2.0)
        self._steps = Steps(STEPS_KEPT, task.tokens, task.prime_base, seed=task.number)
        self._truths = {truth.version: truth for truth in (Truth(seed, task.prime_base) for seed in task.seeds)}
        self._current: str | None = None
        self.over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch-versions", daemon=True)

    def run(self) -> None:
        """Until it is over."""
        self.counters.add("starts")
        self._watcher.start()
        handle = self._open(first=True)
        while handle is not None:
            following = self._use(handle)
            handle.close()
            handle = following
        self._fabric.close()

    def _use(self, handle: EngramHandle) -> EngramHandle | None:
        """Work on one version until another is current: that one, opened; None once it is over."""
        self.counters.use(handle.version)
        ways = (self._by_ids, self._by_tokens, self._by_ticket)
        for number in itertools.takewhile(lambda _: not self.over.is_set(), itertools.count()):
            self._timed(ways[number % len(ways)], handle, number % STEPS_KEPT)
            if self._task.rest_seconds:
                time.sleep(self._task.rest_seconds)
            if number % LOOK_EVERY == 0 and self._current not in (None, handle.version):
                following = self._open(first=False)
                if following is not None and following.version != handle.version:
                    self.counters.add("swaps")
                    return following
                if following is not None:
                    following.close()
        return None

    def _timed(self, way: Callable[[EngramHandle, int], None], handle: EngramHandle, step: int) -> None:
        begun = time.monotonic()
        try:
            way(handle, step)
        except TreadleError as error:
            self.counters.add("failed")
            self.counters.say(f"{time.time():.3f} {way.__name__} {handle.version[:8]}: {type(error).__name__}: {error}")
        now = time.monotonic()
        self.counters.largest("slowest_call_us", round((now - begun) * 1e6))
        self.counters.largest("last_seen_ms", round(now * 1e3))

    def _by_ids(self, handle: EngramHandle, step: int) -> None:
        for layer in handle.layers:
            self._compare(handle, layer, step, handle.gather(layer, self._steps.ids[step][layer]))

    def _by_tokens(self, handle: EngramHandle, step: int) -> None:
        for layer, rows in handle.lookup(self._steps.windows[step]).items():
            self._compare(handle, layer, step, rows)

    def _by_ticket(self, handle: EngramHandle, step: int) -> None:
        deadlines = {layer: Deadline.after(DEADLINE_SECONDS) for layer in handle.layers}
        ticket = handle.prefetch(self._steps.windows[step], deadlines)
        for layer, rows in ticket.wait(POLICY).items():
            if rows.missing is not None:
                self.counters.add("late")
            self._compare(handle, layer, step, rows.rows)

    def _compare(self, handle: EngramHandle, layer: int, step: int, rows: NDArray[np.uint8]) -> None:
        ids = self._steps.ids[step][layer]
        wrong = self._truths[handle.version].wrong(layer, ids, rows)
        self.counters.add("gathers")
        self.counters.add("rows", ids.size)
        if wrong:
            self.counters.add("wrong_rows", wrong)
            self.counters.say(f"{time.time():.3f} {wrong} wrong rows of layer {layer}, version {handle.version[:8]}")

    def _open(self, *, first: bool) -> EngramHandle | None:
        """The current version. Tried again where it is the first; else None leaves the caller on the one it has."""
        begun = time.monotonic()
        while not self.over.is_set():
            try:
                handle = self._fabric.engram.open(MODEL, transport=self._task.transport)
            except TreadleError as error:
                if not first:
                    return None
                if time.monotonic() - begun > OPEN_SECONDS_MAX:
                    self.counters.add("open_failed")
                    self.counters.say(f"{time.time():.3f} open: {type(error).__name__}: {error}")
                    return None
                time.sleep(OPEN_RETRY_SECONDS)
                continue
            self.counters.add("opens")
            self.counters.largest("slowest_open_us", round((time.monotonic() - begun) * 1e6))
            return handle
        return None

    def _watch(self) -> None:
        """Follow which version is current; a pool that is down tells nothing."""
        while not self.over.is_set():
            try:
                for models in self._fabric.engram.watch():
                    self._current = next(
                        (each.version for each in models if each.current and each.model.name == MODEL), self._current
                    )
            except TreadleError:
                self.over.wait(OPEN_RETRY_SECONDS)
            except ValueError:  # the channel was closed under the watch: it is over
                return


def main(argv: list[str] | None = None) -> Any:
    """argv: a Task as JSON. Prints one ready line."""
    (text,) = sys.argv[1:] if argv is None else argv
    client = CheckingClient(Task.from_json(text))
    signal.signal(signal.SIGTERM, lambda *_: client.over.set())
    print(json.dumps({"ready": True, "service": "checking-client", "pid": os.getpid()}), flush=True)
    client.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
