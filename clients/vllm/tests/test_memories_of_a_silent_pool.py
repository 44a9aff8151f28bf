"""A pool that accepts connections and says nothing: it costs the batch one wait, and no place of a memory for good."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from treadle.contract.errors import DeadlineExceeded, NotFound, ResourceExhausted
from treadle.vllm import MemoryConfig, memories
from treadle.vllm.batch import BatchView, EngramBatch
from treadle.vllm.config import Choice
from treadle.vllm.memories import LanguageModel, Memories, Memory

MODEL = LanguageModel(30, 49152, 576, lambda: pytest.fail("no memory is ever opened"))
SECONDS_MAX = 30.0


def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def step(batch: EngramBatch, *chosen: str) -> float:
    """Begin a step of new requests; how long it stood still."""
    ids = [f"{time.monotonic()}-{place}" for place in range(len(chosen))]
    args = {one: {"treadle": {"engram": name}} for one, name in zip(ids, chosen, strict=True)}
    count = len(ids)
    view: Any = BatchView(ids, args.__getitem__, np.zeros(count, int), np.ones(count, int), None, None)  # type: ignore[arg-type]  # what a step reads of it
    began = time.monotonic()
    batch.begin(view)
    seconds = time.monotonic() - began
    verdicts = batch.take_verdicts()
    assert all(verdicts[one].outcome.degraded for one, name in zip(ids, chosen, strict=True) if name != "none")
    return seconds


def test_all_openings_of_a_step_wait_together_and_later_steps_hardly_at_all(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "RETRY_SECONDS", 1.0)  # long beside what a busy machine adds, as the wait below
    batch = EngramBatch(MemoryConfig(engram_pool=silent, open_seconds_max=2.0), MODEL, torch.device("cpu"))
    try:
        assert 1.9 < step(batch, *["kjv"] * 8, "other", "third", "none") < 5.9  # one wait, not one for each memory
        assert step(batch, *["kjv"] * 8, "other") < 1.9  # what was given up is not waited for again
        until(lambda: batch._memories._openings[Choice("kjv")].future.done())
        waited = sum(step(batch, *["kjv"] * 8) for _ in range(8))  # the pool was silent, and may still be
        assert waited < 4 * memories.RETRY_SECONDS
    finally:
        batch.close()


class Opens(Memories):
    """Its openings are what the test says, on the thread where openings are."""

    def __init__(self, config: MemoryConfig, open_one: Callable[[Choice], Any]) -> None:
        super().__init__(config, MODEL, torch.device("cpu"))
        self._open_one = open_one

    def _opened(self, choice: Choice) -> Memory:
        return Memory(self._open_one(choice), None, fused=True)  # type: ignore[arg-type]  # what a step reads of it


class Handle:
    """Of an open version."""

    def __init__(self, choice: Choice) -> None:
        self.model, self.version, self.transport = SimpleNamespace(name=choice.name), choice.version or "a" * 64, "mapped"
        self.open = True

    def close(self) -> None:
        self.open = False


def test_openings_that_nobody_asks_for_again_give_their_places_back() -> None:
    def absent(choice: Choice) -> Handle:
        if choice.name.startswith("absent"):
            raise NotFound(choice.name)
        return Handle(choice)

    here = Opens(MemoryConfig(engram_pool="127.0.0.1:1", memories_max=2), absent)
    for name in ("absent1", "absent2"):
        here.open_ahead(Choice(name))
    until(lambda: all(opening.future.done() for opening in here._openings.values()))
    assert here.take(Choice("healthy")).used.name == "healthy"
    here.open_ahead(Choice("left"))
    until(lambda: all(opening.future.done() for opening in here._openings.values()))
    assert here.take(Choice("second")).requests == 1  # "left" was open by then, and idle
    with pytest.raises(ResourceExhausted):
        here.take(Choice("third"))
    here.close()


def test_a_version_that_opened_after_its_request_had_left_is_closed_when_it_is_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "SUPERSEDED_SECONDS", 0.0)
    may_open, handles = threading.Event(), []

    def slow(choice: Choice) -> Handle:
        assert may_open.wait(SECONDS_MAX)
        handles.append(Handle(choice))
        return handles[-1]

    here = Opens(MemoryConfig(engram_pool="127.0.0.1:1"), slow)
    old, new = Choice("kjv", "a" * 64), Choice("kjv", "b" * 64)
    with pytest.raises(DeadlineExceeded):
        here.take(old, until=time.monotonic())
    may_open.set()

    def tidied(holds: Callable[[], bool]) -> bool:
        here.tidy()
        return holds()

    until(lambda: tidied(lambda: not here._openings))
    here.release(here.take(new))
    until(lambda: tidied(lambda: not handles[0].open))
    assert handles[1].open
    here.close()


def test_a_version_that_was_opened_ahead_stays_until_it_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker keeps a pinned version and that of a request beside it: what it holds, the engine does not close."""
    monkeypatch.setattr(memories, "SUPERSEDED_SECONDS", 0.0)
    opened: list[Handle] = []

    def at_once(choice: Choice) -> Handle:
        opened.append(Handle(choice))
        return opened[-1]

    here = Opens(MemoryConfig(engram_pool="127.0.0.1:1", memories_max=3), at_once)
    pinned, current, other = Choice("kjv", "a" * 64), Choice("kjv", "b" * 64), Choice("other", "c" * 64)
    for choice in (pinned, current):
        until(lambda choice=choice: here.open_ahead(choice) == "open")  # type: ignore[misc]  # of this turn of the loop
    here.release(here.take(other))
    for choice in (pinned, current) * 3:
        here.tidy()
        here.release(here.take(choice))
    here.release(here.take(Choice("fourth", "d" * 64)))  # in the place of the one that nobody holds
    assert [one.version[0] for one in opened] == ["a", "b", "c", "d"]
    assert [one.open for one in opened] == [True, True, False, True]
    assert here.open_ahead(pinned) == "open"
    here.let_go(pinned)  # as when it was closed and opened again, whichever is heard of first
    memory = here.take(current)
    for choice in (current, Choice("fourth", "d" * 64), Choice("never")):
        here.let_go(choice)
    here.tidy()
    assert opened[1].open, "a request uses it"
    here.release(memory)
    here.tidy()
    assert [one.open for one in opened] == [True, False, False, True]
    here.close()
