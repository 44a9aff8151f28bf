"""A client that answers requests from a dictionary without end, and compares every state with what it must be. A process of its own.

A request fixes the version that is current when it begins and keeps it to its end; several are in progress at once, so that old and
new versions are read side by side while the pointer moves. Counts what it saw into a file (see `counters`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.client import Fabric
from treadle.client.asm import AsmStore, MappedDictionary, StoredDictionary
from treadle.contract import TreadleError
from treadle.contract.dictionary import tensor_name
from treadle.kernels import nearest
from treadle_loadtests.counters import Counters
from treadle_loadtests.dictionaries import HEAD_DIM, HEADS, LAYERS, NAME, Truth

REQUESTS_AT_ONCE = 4
RETRY_SECONDS = 0.05
States = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Task:
    """What a client does.

    transport: mapped, or rpc: the store looks up
    seeds:     of the versions that there may be; entries: K of each
    tokens:    queries of a lookup; steps: lookups of a request in each layer
    """

    store: str
    transport: str
    seeds: dict[str, int]
    entries: int
    tokens: int
    steps: int
    number: int
    counters: str

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read one."""
        return cls(**json.loads(text))


class Version(Protocol):
    """A version that can be looked up until it is closed."""

    version: str

    def lookup(self, layer: int, queries: NDArray[np.float32]) -> States:
        """queries: f32 [N, HEADS, HEAD_DIM]; states of the same shape, log Z [N, HEADS]."""

    def close(self) -> None:
        """Let go."""


class MappedVersion:
    """The version where it lies."""

    def __init__(self, mapped: MappedDictionary) -> None:
        self.version, self._mapped = mapped.version, mapped

    def lookup(self, layer: int, queries: NDArray[np.float32]) -> States:
        """See Version."""
        keys, states, log_z = (self._mapped.tensors[tensor_name(layer, part)][0] for part in ("keys", "states", "log_z"))
        entries, _ = nearest(queries.reshape(len(queries), -1), keys)
        return states[entries], log_z[entries]

    def close(self) -> None:
        """See Version."""
        self._mapped.close()


class RemoteVersion:
    """The version at the store, held there."""

    def __init__(self, asm: AsmStore, stored: StoredDictionary) -> None:
        self.version, self._asm, self._stored = stored.version, asm, stored
        self._held = asm.hold(stored.ref)

    def lookup(self, layer: int, queries: NDArray[np.float32]) -> States:
        """See Version."""
        found = self._asm.lookup(self._stored, layer, queries)
        return found.states, found.log_z

    def close(self) -> None:
        """See Version."""
        self._held.close()


@dataclass(slots=True)
class Request:
    """A request in progress, on the version with which it began."""

    version: Version
    steps_left: int


class ReadingClient:
    """Asks and compares until `over` is set."""

    def __init__(self, task: Task) -> None:
        self._task, self.counters = task, Counters(Path(task.counters))
        self._fabric = Fabric(asm=task.store, timeout_seconds=5.0)
        self._truths = {version: Truth(seed, task.entries) for version, seed in task.seeds.items()}
        self._chance = np.random.default_rng(task.number)
        self._current = self._newest = ""  # what the name means; on what the last request began
        self._watch = self._fabric.asm.watch([NAME])
        self._open: dict[str, tuple[Version, int]] = {}  # versions and how many requests use each
        self.over = threading.Event()

    def run(self) -> None:
        """Until it is over."""
        self.counters.add("starts")
        with ExitStack() as stack:
            stack.callback(self._fabric.close)
            stack.callback(self._watch.cancel)
            threading.Thread(target=self._follow, name="watch-pointer", daemon=True).start()
            requests: list[Request] = []
            while not self.over.is_set():
                while len(requests) < REQUESTS_AT_ONCE and (begun := self._begin()) is not None:
                    requests.append(begun)
                for request in list(requests):
                    self._step(request)
                    if not request.steps_left:
                        requests.remove(request)
                        self._end(request)
                if not requests:
                    self.over.wait(RETRY_SECONDS)
            for request in requests:
                self._end(request)

    def _begin(self) -> Request | None:
        """A request on the current version, opened where it is not open yet; None where that cannot be had."""
        version = self._opened(self._current)
        if version is None:
            return None
        kept, uses = self._open.get(version.version, (version, 0))
        if kept is not version:  # opened meanwhile under another name for it
            version.close()
        self._open[kept.version] = (kept, uses + 1)
        self._newest = kept.version
        self.counters.use(self._newest, next(iter(self._open)))
        steps = int(self._chance.integers(1, 2 * self._task.steps))
        return Request(kept, steps)

    def _end(self, request: Request) -> None:
        version, uses = self._open[request.version.version]
        self._open[version.version] = (version, uses - 1)
        for unused in [name for name, (_, uses) in self._open.items() if not uses and name != self._current]:
            self._open.pop(unused)[0].close()
            self.counters.use(self._newest, next(iter(self._open), self._newest))

    def _opened(self, wanted: str) -> Version | None:
        if wanted in self._open:
            return self._open[wanted][0]
        begun = time.monotonic()
        try:
            opened = self._current_version()
        except TreadleError as error:
            self._failed("open_failed", "open", error)
            self.over.wait(RETRY_SECONDS)
            return None
        self.counters.add("opens")
        self.counters.largest("slowest_open_us", round((time.monotonic() - begun) * 1e6))
        return opened

    def _current_version(self) -> Version:
        if self._task.transport == "mapped":
            return MappedVersion(self._fabric.asm.open(NAME))
        return RemoteVersion(self._fabric.asm, self._fabric.asm.find(NAME))

    def _step(self, request: Request) -> None:
        """One lookup in each layer."""
        request.steps_left -= 1
        truth = self._truths[request.version.version]
        for layer in range(LAYERS):
            asked = self._chance.integers(0, self._task.entries, self._task.tokens)
            begun = time.monotonic()
            try:
                states, log_z = request.version.lookup(layer, truth.keys(layer, asked).reshape(-1, HEADS, HEAD_DIM))
            except TreadleError as error:
                self._failed("failed", f"lookup in {request.version.version[:8]}", error)
                continue
            self.counters.largest("slowest_call_us", round((time.monotonic() - begun) * 1e6))
            self.counters.add("gathers")
            self.counters.add("rows", len(asked))
            if wrong := truth.wrong(layer, asked, states, log_z):
                self.counters.add("wrong_rows", wrong)
                self.counters.say(f"{time.time():.3f} {wrong} wrong states of layer {layer}, version {request.version.version[:8]}")

    def _failed(self, counter: str, what: str, error: TreadleError) -> None:
        self.counters.add(counter)
        self.counters.say(f"{time.time():.3f} {what}: {type(error).__name__}: {error}")

    def _follow(self) -> None:
        for changed in self._watch:
            for pointer in changed:
                self._current = pointer.version


def main(argv: list[str] | None = None) -> Any:
    """argv: a Task as JSON. Prints one ready line."""
    (text,) = sys.argv[1:] if argv is None else argv
    client = ReadingClient(Task.from_json(text))
    signal.signal(signal.SIGTERM, lambda *_: client.over.set())
    print(json.dumps({"ready": True, "service": "reading-client", "pid": os.getpid()}), flush=True)
    client.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
