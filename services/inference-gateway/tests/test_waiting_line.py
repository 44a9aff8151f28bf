"""The line before the workers: who begins, in which order, and who is refused at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from inference_gateway.domain.generation import Priority
from inference_gateway.domain.waiting_line import LineLimits, WaitingLine
from treadle.contract import Deadline
from treadle.contract.errors import ResourceExhausted

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


class Counts:
    """Fits LineFigures."""

    def __init__(self) -> None:
        self.refusals = Counter[str]()
        self.waits: list[float] = []

    def waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Street:
    """A line with as many slots as the test says, and requests that stay until they are told to go."""

    def __init__(self, slots: int | None = 1, *, wait_seconds_max: float = 8.0, waiting_max: int = 8) -> None:
        self.slots, self.counts, self.clock = slots, Counts(), Clock()
        self.line = WaitingLine(LineLimits(wait_seconds_max, waiting_max), lambda: self.slots, self.counts, self.clock)
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}
        self.has_begun: dict[str, asyncio.Event] = {}

    async def comes(self, name: str, priority: Priority = NORMAL, deadline_seconds: float = 1000.0, *, joins: bool = False) -> None:
        self._leave[name], self.has_begun[name] = asyncio.Event(), asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, priority, Deadline.after(deadline_seconds), joins))
        await settled()

    async def _stay(self, name: str, priority: Priority, deadline: Deadline, joins: bool) -> None:
        async with self.line.place(priority, deadline, joins=joins):
            self.begun.append(name)
            self.has_begun[name].set()
            await self._leave[name].wait()

    async def goes(self, name: str, after_seconds: float = 0.0) -> None:
        self.clock.now += after_seconds
        self._leave[name].set()
        await self.tasks[name]
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_comes_to_a_free_slot_begins_at_once() -> None:
    street = Street(2)
    for name in "ab":
        await street.comes(name)
    assert street.begun == ["a", "b"]
    await street.comes("c")
    assert (street.begun, street.line.waiting, street.line.taken) == (["a", "b"], 1, 2)
    for name in "abc":
        await street.goes(name)
    assert (street.begun, street.line.taken, street.counts.waits) == (["a", "b", "c"], 0, [0, 0, 0])


async def test_among_those_that_wait_the_class_comes_first_and_then_who_came_first() -> None:
    street = Street()
    await street.comes("now")
    for name, priority in (("l1", LOW), ("n1", NORMAL), ("h1", HIGH), ("n2", NORMAL), ("h2", HIGH), ("l2", LOW)):
        await street.comes(name, priority)
    for name in ("now", "h1", "h2", "n1", "n2", "l1", "l2"):
        await street.goes(name)
    assert street.begun == ["now", "h1", "h2", "n1", "n2", "l1", "l2"]


async def test_who_has_waited_long_is_overtaken_by_no_class() -> None:
    street = Street()
    await street.comes("now")
    await street.comes("low", LOW)
    street.clock.now += 4.1  # half of the longest wait: two classes
    await street.comes("high", HIGH)
    await street.goes("now")
    assert street.begun == ["now", "low"]
    for name in ("low", "high"):
        await street.goes(name)


async def test_who_would_wait_too_long_is_refused_at_once_and_told_when_to_come_back() -> None:
    street = Street(2)
    await street.comes("first")
    await street.goes("first", after_seconds=9.0)  # so long takes a generation
    for name in "abc":
        await street.comes(name)
    assert street.line.predicted_wait_seconds() == pytest.approx(2 * 9.0 / 2)
    assert street.line.predicted_wait_seconds(HIGH) == pytest.approx(9.0 / 2)
    with pytest.raises(ResourceExhausted, match="busy") as refused:
        street.line.check(NORMAL, Deadline.after(1000))
    assert refused.value.retry_after_seconds == pytest.approx(9.0)
    street.line.check(HIGH, Deadline.after(1000))
    assert street.counts.refusals == {"wait": 1}
    for name in "abc":
        await street.goes(name)


async def test_who_could_begin_only_after_its_deadline_is_refused_at_once() -> None:
    street = Street()
    await street.comes("first")
    await street.goes("first", after_seconds=3.0)
    await street.comes("now")
    with pytest.raises(ResourceExhausted):
        street.line.check(NORMAL, Deadline.after(2.0))
    street.line.check(NORMAL, Deadline.after(1000))
    await street.goes("now")


async def test_a_wait_that_was_predicted_wrongly_ends_at_the_limit() -> None:
    street = Street()
    await street.comes("now")
    await street.comes("waits")
    street.clock.now += 8.1
    with pytest.raises(ResourceExhausted, match="no worker was free"):
        await asyncio.wait_for(street.tasks["waits"], 10)
    assert (street.line.waiting, street.counts.refusals) == (0, {"waited": 1})
    await street.goes("now")
    assert street.line.taken == 0


async def test_a_line_is_no_longer_than_its_limit() -> None:
    street = Street(waiting_max=2)
    for name in ("now", "a", "b"):
        await street.comes(name)
    await street.comes("c", HIGH)
    with pytest.raises(ResourceExhausted, match="queue_max"):
        await street.tasks["c"]
    assert street.counts.refusals == {"full": 1}
    for name in ("now", "a", "b"):
        await street.goes(name)


async def test_a_line_that_nobody_may_stand_in_still_gives_free_places() -> None:
    street = Street(1, waiting_max=0)
    street.line.check(NORMAL, Deadline.after(1000))
    await street.comes("now")
    with pytest.raises(ResourceExhausted):
        street.line.check(NORMAL, Deadline.after(1000))
    await street.goes("now")


async def test_a_further_answer_of_a_request_waits_in_its_turn_and_as_long_as_it_takes() -> None:
    street = Street(waiting_max=1)
    await street.comes("now")
    await street.goes("now", after_seconds=10)  # longer than anybody may wait
    for name in ("now", "joins", "later"):
        await street.comes(name, joins=name == "joins")
    with pytest.raises(ResourceExhausted):
        await street.tasks["later"]
    street.clock.now += 9
    await settled()
    await street.goes("now")
    assert (street.begun, street.line.taken) == (["now", "now", "joins"], 1)
    await street.goes("joins")
    assert street.line.taken == 0


async def test_a_further_answer_takes_no_free_place_before_those_that_came_earlier() -> None:
    street = Street()
    for name in ("now", "waits"):
        await street.comes(name)
    await street.comes("joins", joins=True)
    for name in ("now", "waits"):
        await street.goes(name)
    assert street.begun == ["now", "waits", "joins"]
    await street.goes("joins")


async def test_who_leaves_while_waiting_gives_its_turn_to_the_next() -> None:
    street = Street()
    for name in ("now", "leaves", "stays"):
        await street.comes(name)
    street.tasks["leaves"].cancel()
    await settled()
    await street.goes("now")
    assert street.begun == ["now", "stays"]
    await street.goes("stays")
    assert street.line.taken == 0


async def test_who_leaves_when_its_place_has_come_gives_it_back() -> None:
    street = Street()
    for name in ("now", "leaves", "stays"):
        await street.comes(name)
    street._leave["now"].set()
    await asyncio.sleep(0)  # the place is given, and whoever gets it has not run yet
    assert street.line.waiting == 1
    street.tasks["leaves"].cancel()
    await settled()
    assert street.begun == ["now", "stays"]
    await street.goes("stays")
    assert street.line.taken == 0


async def test_a_worker_that_comes_is_found_by_those_that_wait() -> None:
    street = Street()
    for name in ("now", "waits"):
        await street.comes(name)
    street.slots = 2
    await asyncio.wait_for(street.has_begun["waits"].wait(), 10)
    for name in ("now", "waits"):
        await street.goes(name)


async def test_nobody_waits_where_the_number_of_slots_is_not_known() -> None:
    street = Street(None)
    for name in "abcd":
        await street.comes(name)
    assert street.begun == ["a", "b", "c", "d"]
    assert street.line.predicted_wait_seconds() == 0.0
    for name in "abcd":
        await street.goes(name)


async def test_a_generation_that_failed_tells_nothing_about_how_long_they_take() -> None:
    street = Street()
    await street.comes("fails")
    street.clock.now += 50
    street.tasks["fails"].cancel()
    await settled()
    await street.comes("now")
    assert street.line.predicted_wait_seconds() == 0.0
    await street.goes("now")


async def test_a_spare_place_is_given_only_while_nobody_waits() -> None:
    street = Street(2)
    await street.comes("a")
    assert street.line.take_spare()
    assert not street.line.take_spare()
    await street.comes("b")
    street.line.give_back()
    await settled()
    assert street.begun == ["a", "b"]
    assert not street.line.take_spare()
    async with AsyncExitStack() as stack:
        for name in "ab":
            stack.push_async_callback(street.goes, name)
