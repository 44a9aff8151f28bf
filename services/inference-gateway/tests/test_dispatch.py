"""One generation over several workers, without sockets: retries, silence, hedges, and what each tells the breaker."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from inference_gateway.domain.block_index import BlockChanges
from inference_gateway.domain.breaker import Breaker, BreakerLimits, BreakerState
from inference_gateway.domain.calls import PieceLimits
from inference_gateway.domain.dispatch import Dispatch, DispatchLimits
from inference_gateway.domain.errors import RequestRefused, WorkerLost, WorkerStalled
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generation import FinishReason, Generation, MemoryWish, Message, Piece, Sampling, WorkerStatus
from inference_gateway.domain.hedging import HedgeBudget
from inference_gateway.domain.member import Member
from inference_gateway.domain.routing import Ranking, RoutedBy
from inference_gateway.domain.served_model import WorkerWatch
from inference_gateway.domain.waiting_line import LineLimits
from treadle.contract import Deadline
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, TreadleError, Unavailable

GENERATION = Generation("r", [1, 2], Sampling(), MemoryWish(), "", model="m")
FIRST, LAST = Piece(token_ids=(1,), text="a"), Piece(finish_reason=FinishReason.STOP)
HANG = "hang"
Says = Sequence[Piece | TreadleError | str]


class FakeWorker:
    """Says in each call what the test laid down for it, by default a whole answer; HANG: nothing any more."""

    def __init__(self) -> None:
        self.says: list[Says] = []
        self.calls = self.ended = 0
        self.slots, self.pid, self.away, self.frozen = 4, 1, False, False
        self.asked = asyncio.Event()

    async def embed(self, request_id: str, texts: Sequence[Sequence[int]], timeout_seconds: float) -> list[bytes]:
        raise AssertionError("nobody asks for vectors here")

    async def watch_blocks(self, timeout_seconds: float) -> AsyncGenerator[BlockChanges, None]:
        yield BlockChanges(snapshot_complete=True)

    async def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        self.calls += 1
        self.asked.set()
        says = self.says.pop(0) if self.says else (FIRST, LAST)
        try:
            for said in says:
                if isinstance(said, TreadleError):
                    raise said
                if isinstance(said, str):
                    await asyncio.Event().wait()
                else:
                    yield said
        finally:
            self.ended += 1

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        if self.away:
            raise Unavailable("away")
        if self.frozen:
            raise DeadlineExceeded("no status in time")
        return WorkerStatus("m", Path("/m"), "d", 64, False, "0", self.pid, requests_running_max=self.slots)


class Ids:
    """A prompt encoder that is not asked here."""

    def encode_chat(self, messages: Sequence[Message], tokens_max: int) -> list[int]:
        raise AssertionError

    def encode_text(self, text: str, tokens_max: int) -> list[int]:
        raise AssertionError


class Counts:
    """Fits DispatchFigures."""

    def __init__(self) -> None:
        self.seen = Counter[str]()

    def waited(self, seconds: float) -> None:
        self.seen["waited"] += 1

    def refused(self, reason: str) -> None:
        self.seen[f"refused {reason}"] += 1

    def retried(self, reason: str) -> None:
        self.seen[f"retried {reason}"] += 1

    def hedged(self, outcome: str) -> None:
        self.seen[f"hedged {outcome}"] += 1

    def stalled(self, when: str) -> None:
        self.seen[f"stalled {when}"] += 1


class ByName:
    """Fits Policy: the fewest requests first, then by name, so that a is asked first."""

    needs_blocks = False

    def rank(self, members: Sequence[Member], generation: Generation) -> Ranking:
        return Ranking(sorted(members, key=lambda member: (member.load, member.name)), RoutedBy.LOAD)


class Stage:
    """Workers behind a dispatch."""

    def __init__(self, workers: int = 2, **limits: float) -> None:
        async def in_thread(work: Callable[[], object], /) -> object:
            return work()

        self.workers = [FakeWorker() for _ in range(workers)]
        self.members = [
            Member(
                "abc"[number],
                worker,
                WorkerWatch(worker, lambda *_: Ids(), in_thread, interval_seconds=60),  # type: ignore[arg-type]  # stand-ins of the same shape
                Breaker(BreakerLimits(failures_max=2)),
            )
            for number, worker in enumerate(self.workers)
        ]
        self.counts = Counts()
        pieces = PieceLimits(limits.pop("first", 10.0), limits.pop("idle", 10.0))
        hedge, attempts = limits.pop("hedge", 0.0), int(limits.pop("attempts", 3))
        self.dispatch = Dispatch(
            Fleet(self.members, ByName()), DispatchLimits(pieces, LineLimits(**limits), attempts, hedge, headroom=0),  # type: ignore[arg-type]  # stand-ins of the same shape
            self.counts, random.Random(0),
        )  # fmt: skip

    async def __aenter__(self) -> Stage:
        for member in self.members:
            await member.watch.poll()
        self._polling = [asyncio.create_task(member.watch.run()) for member in self.members]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for polling in self._polling:
            polling.cancel()
        await asyncio.wait(self._polling)

    async def answer(self, deadline_seconds: float = 20.0) -> list[Piece]:
        async with aclosing(self.dispatch.pieces(GENERATION, Deadline.after(deadline_seconds))) as pieces:
            return [piece async for piece in pieces]

    @property
    def calls(self) -> list[int]:
        return [worker.calls for worker in self.workers]

    def settled(self) -> bool:
        """Nothing is left over: no call, no place."""
        lines = self.dispatch.lines.values()
        ended = all(worker.calls == worker.ended for worker in self.workers)
        return ended and not any(member.in_flight for member in self.members) and not any(line.taken for line in lines)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_piece_names_its_worker() -> None:
    async with Stage() as stage:
        pieces = await stage.answer()
        assert [piece.worker for piece in pieces] == ["a", ""]
        assert [piece.text for piece in pieces] == ["a", ""]
        assert stage.settled()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WorkerLost("gone"), "lost"),
        (WorkerLost("draining"), "lost"),
        (ResourceExhausted("queue full", 3.0), "busy"),
        (Unavailable("no pool"), "unavailable"),
    ],
)
async def test_another_worker_is_asked_while_nothing_was_answered(error: TreadleError, reason: str) -> None:
    async with Stage() as stage:
        stage.workers[0].says = [(error,)]
        assert (await stage.answer())[0].worker == "b"
        assert stage.counts.seen == {"waited": 1, f"retried {reason}": 1}
        assert stage.settled()


@pytest.mark.parametrize("error", [InvalidArgument("bad"), RequestRefused("bad"), DeadlineExceeded("late"), TreadleError("a bug")])
async def test_an_error_that_another_worker_would_have_too_is_not_tried_again(error: TreadleError) -> None:
    async with Stage() as stage:
        stage.workers[0].says = [(error,)]
        with pytest.raises(type(error)):
            await stage.answer()
        assert stage.calls == [1, 0]
        assert stage.settled()


async def test_nothing_is_repeated_once_a_piece_was_handed_on() -> None:
    async with Stage() as stage:
        stage.workers[0].says = [(FIRST, WorkerLost("gone"))]
        with pytest.raises(WorkerLost):
            await stage.answer()
        assert stage.calls == [1, 0]
        assert stage.settled()


async def test_a_stream_without_a_last_message_is_a_lost_worker() -> None:
    async with Stage() as stage:
        stage.workers[0].says = [(FIRST,)]
        with pytest.raises(WorkerLost, match="without a last message"):
            await stage.answer()
        stage.workers[1].says = [()]
        assert (await stage.answer())[0].worker == "a"


async def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    async with Stage(3, attempts=2) as stage:
        for worker in stage.workers:
            worker.says = [(ResourceExhausted("full", 7.0),)]
        with pytest.raises(ResourceExhausted) as refused:
            await stage.answer()
        assert refused.value.retry_after_seconds == 7.0
        assert stage.calls == [1, 1, 0]


async def test_a_full_worker_is_not_asked_twice() -> None:
    async with Stage(1) as stage:
        stage.workers[0].says = [(ResourceExhausted("full"),)]
        with pytest.raises(ResourceExhausted):
            await stage.answer()
        assert stage.calls == [1]


async def test_a_single_worker_that_is_back_at_once_is_asked_again() -> None:
    async with Stage(1) as stage:
        stage.workers[0].says = [(WorkerLost("restarting"),)]
        assert (await stage.answer())[0].worker == "a"
        stage.workers[0].says = [(WorkerLost("gone for good"),)]
        stage.workers[0].away = True
        with pytest.raises(WorkerLost, match="gone for good"):
            await stage.answer()
        assert stage.settled()


async def test_a_worker_that_sends_nothing_at_first_is_left_for_another() -> None:
    async with Stage(first=0.05) as stage:
        stage.workers[0].says = [(HANG,)]
        assert (await stage.answer())[0].worker == "b"
        assert stage.counts.seen == {"waited": 1, "stalled first": 1, "retried stalled": 1}
        assert stage.settled()


async def test_a_worker_that_answers_others_meanwhile_is_busy_and_not_silent() -> None:
    async with Stage(1, first=0.2) as stage:
        stage.workers[0].says = [(FIRST,) * 3 + (HANG,), *([(HANG,)] * 3)]
        async with aclosing(stage.dispatch.pieces(GENERATION, Deadline.after(10))) as other:
            await anext(other)
            for _ in range(2):
                asking = asyncio.create_task(stage.answer())
                await settled()
                assert stage.members[0].first_waits
                await anext(other)
                with pytest.raises(ResourceExhausted, match="answers others") as refused:
                    await asking
                assert (refused.value.retry_after_seconds or 0) > 0.1
            assert stage.members[0].breaker.state is BreakerState.CLOSED
            with pytest.raises(WorkerStalled):  # nobody heard of it
                await stage.answer()
        assert stage.counts.seen["stalled first"] == 1
        assert stage.settled()


async def test_a_worker_that_answers_no_status_either_is_left_sooner() -> None:
    async with Stage(first=600) as stage:
        stage.workers[0].says = [(HANG,)]
        asking = asyncio.create_task(stage.answer(deadline_seconds=1000))
        await asyncio.wait_for(stage.workers[0].asked.wait(), 10)
        stage.workers[0].frozen = True
        await stage.members[0].watch.poll()
        assert stage.members[0].in_flight == 1  # once may be chance
        await stage.members[0].watch.poll()
        assert (await asyncio.wait_for(asking, 10))[0].worker == "b"
        assert stage.settled()


@pytest.mark.parametrize(("workers", "attempts"), [(1, 3), (2, 1)])
async def test_a_worker_that_answers_no_status_is_waited_for_while_nobody_else_could_be_asked(workers: int, attempts: int) -> None:
    async with Stage(workers, first=600, attempts=attempts) as stage:
        go = asyncio.Event()

        async def busy(generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
            stage.workers[0].asked.set()
            await go.wait()
            yield FIRST
            yield LAST

        stage.workers[0].generate = busy  # type: ignore[method-assign]
        asking = asyncio.create_task(stage.answer(deadline_seconds=1000))
        await asyncio.wait_for(stage.workers[0].asked.wait(), 10)
        stage.workers[0].frozen = True
        for _ in range(4):
            await stage.members[0].watch.poll()
            await settled()
        go.set()
        assert (await asyncio.wait_for(asking, 10))[0].worker == "a"
        assert stage.members[0].breaker.state is BreakerState.CLOSED
        assert not stage.members[0].first_waits


async def test_a_worker_that_comes_takes_over_from_one_that_answers_no_status() -> None:
    async with Stage(first=600) as stage:
        stage.workers[0].says, stage.workers[1].away = [(HANG,)], True
        await stage.members[1].watch.poll()
        asking = asyncio.create_task(stage.answer(deadline_seconds=1000))
        await asyncio.wait_for(stage.workers[0].asked.wait(), 10)
        stage.workers[0].frozen = True
        for _ in range(3):
            await stage.members[0].watch.poll()
            await settled()
        assert stage.members[0].in_flight == 1
        stage.workers[1].away = False
        await stage.members[1].watch.poll()
        await stage.members[0].watch.poll()
        assert (await asyncio.wait_for(asking, 10))[0].worker == "b"
        assert stage.settled()


async def test_a_worker_that_answers_no_status_may_still_end_what_it_has_begun() -> None:
    async with Stage() as stage, aclosing(stage.dispatch.pieces(GENERATION, Deadline.after(10))) as pieces:
        await anext(pieces)
        stage.workers[0].frozen = True
        for _ in range(3):
            await stage.members[0].watch.poll()
        assert (await anext(pieces)).finish_reason is FinishReason.STOP


async def test_a_worker_that_falls_silent_in_its_answer_ends_it_with_an_error_of_its_own() -> None:
    async with Stage(idle=0.05) as stage:
        stage.workers[0].says = [(FIRST, FIRST, HANG)]
        with pytest.raises(WorkerStalled, match=r"nothing for [\d.]+ seconds, in the middle"):
            await stage.answer()
        assert stage.counts.seen["stalled between"] == 1
        assert stage.calls == [1, 0]
        assert stage.settled()


async def test_a_reader_that_takes_its_time_is_no_silent_worker() -> None:
    async with Stage(idle=0.05) as stage, aclosing(stage.dispatch.pieces(GENERATION, Deadline.after(10))) as pieces:
        await anext(pieces)
        await asyncio.sleep(0.1)
        assert (await anext(pieces)).finish_reason is FinishReason.STOP


async def test_a_client_that_leaves_stops_the_worker_and_says_nothing_about_it() -> None:
    async with Stage() as stage:
        stage.workers[0].says = [(HANG,)]
        asking = asyncio.create_task(stage.answer())
        await stage.workers[0].asked.wait()
        asking.cancel()
        await asyncio.wait({asking})
        assert stage.settled()
        assert stage.members[0].breaker.state is BreakerState.CLOSED


async def test_a_worker_that_fails_again_and_again_gets_no_requests_until_it_is_another_process() -> None:
    async with Stage() as stage:
        for _ in range(2):
            stage.workers[0].says = [(TreadleError("a bug"),)]
            with pytest.raises(TreadleError, match="a bug"):
                await stage.answer()
        assert stage.members[0].breaker.state is BreakerState.OPEN
        assert (await stage.answer())[0].worker == "b"
        stage.workers[0].pid = 2
        await stage.members[0].watch.poll()
        assert (await stage.answer())[0].worker == "a"


@pytest.mark.parametrize(
    "error", [InvalidArgument("bad"), ResourceExhausted("full"), Unavailable("no rows"), DeadlineExceeded("late")]
)
async def test_errors_of_requests_do_not_open_the_breaker(error: TreadleError) -> None:
    async with Stage(1) as stage:
        for _ in range(5):
            stage.workers[0].says = [(error,)]
            with pytest.raises(type(error)):
                await stage.answer()
        assert stage.members[0].breaker.state is BreakerState.CLOSED


async def test_a_second_worker_is_asked_for_a_first_piece_that_does_not_come() -> None:
    async with Stage(hedge=0.02) as stage:
        stage.workers[0].says = [(HANG,)]
        pieces = await stage.answer()
        assert [piece.text for piece in pieces] == ["a", ""]
        assert pieces[0].worker == "b"
        assert stage.counts.seen["hedged won"] == 1
        assert stage.settled()


async def test_the_first_worker_may_still_be_quicker_than_the_second() -> None:
    async with Stage(hedge=0.02) as stage:
        go = asyncio.Event()

        async def slow(generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
            await go.wait()
            yield FIRST
            yield LAST

        stage.workers[0].generate = slow  # type: ignore[method-assign]
        stage.workers[1].says = [(HANG,)]
        asking = asyncio.create_task(stage.answer())
        await asyncio.wait_for(stage.workers[1].asked.wait(), 10)
        go.set()
        assert (await asking)[0].worker == "a"
        assert stage.counts.seen["hedged lost"] == 1
        assert stage.settled()


async def test_a_caller_that_is_cancelled_again_while_the_slower_call_ends_leaves_nothing_behind() -> None:
    async with Stage(hedge=0.02) as stage:
        ending, end = asyncio.Event(), asyncio.Event()

        async def slow_to_end(generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
            try:
                await asyncio.Event().wait()
                yield FIRST
            finally:
                ending.set()
                await end.wait()

        stage.workers[0].generate = slow_to_end  # type: ignore[method-assign]
        asking = asyncio.create_task(stage.answer())
        await asyncio.wait_for(ending.wait(), 10)  # the second call has won
        for _ in range(2):
            asking.cancel()
            await asyncio.wait({asking}, timeout=0.01)
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 10)
        assert stage.settled()


async def test_a_hedge_whose_first_call_fails_is_heard_by_the_second() -> None:
    async with Stage(hedge=0.02, first=0.1) as stage:
        stage.workers[0].says = [(HANG,)]
        assert (await stage.answer())[0].worker == "b"
        stage.workers[0].says, stage.workers[1].says = [(HANG,)], [(HANG,)]
        for member in stage.members:
            await member.watch.poll()
        stage.dispatch._budget = HedgeBudget()
        with pytest.raises(WorkerStalled):
            await stage.answer()
        assert stage.counts.seen["hedged failed"] == 1
        assert stage.settled()


async def test_no_second_worker_is_asked_while_places_are_scarce() -> None:
    async with Stage(hedge=0.02, first=0.1) as stage:
        stage.workers[0].slots, stage.workers[1].slots = 1, 1
        for member in stage.members:
            await member.watch.poll()
        async with aclosing(stage.dispatch.pieces(GENERATION, Deadline.after(10))) as other:
            await anext(other)
            stage.workers[1].says = [(HANG,)]
            assert (await stage.answer())[0].worker == "a"
        assert stage.counts.seen["retried stalled"] == 1
        assert not [name for name in stage.counts.seen if name.startswith("hedged")]


def test_second_calls_are_a_small_share_of_all() -> None:
    budget, hedges = HedgeBudget(), 0
    for _ in range(1000):
        budget.earn()
        hedges += budget.spend()
    assert hedges == 51  # one in advance
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 10


async def test_who_would_wait_too_long_is_refused_before_anybody_is_asked() -> None:
    async with Stage(1, waiting_max=0) as stage:
        stage.workers[0].slots = 1
        await stage.members[0].watch.poll()
        async with aclosing(stage.dispatch.pieces(GENERATION, Deadline.after(10))) as first:
            await anext(first)
            with pytest.raises(ResourceExhausted):
                await stage.answer()
        assert (stage.calls, stage.counts.seen["refused full"]) == ([1], 1)
        assert stage.settled()


async def test_nobody_waits_for_the_slots_of_another_model() -> None:
    async with Stage(1) as stage:
        other = replace(GENERATION, model="other")
        with pytest.raises(TreadleError, match="other"):
            _ = [piece async for piece in stage.dispatch.pieces(other, Deadline.after(10))]


async def test_a_memory_that_was_missing_once_leaves_the_answer_degraded() -> None:
    async with Stage() as stage:
        stage.workers[0].says = [(replace(FIRST, degraded=True), FIRST, LAST)]
        assert [piece.degraded for piece in await stage.answer()] == [True, True, True]
