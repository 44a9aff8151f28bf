"""Limits on how many requests there are and how long they live, the drain, and following the worker, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_gateway.domain.api_keys import ANYBODY
from inference_gateway.domain.block_index import BlockChanges
from inference_gateway.domain.errors import ClientLeft, MemoryRefused, ModelNotFound, RequestRefused, WorkerLost
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generating import Generating
from inference_gateway.domain.generation import (
    ChatPrompt,
    FinishReason,
    Generation,
    MemoryWish,
    Message,
    Piece,
    Prompt,
    Sampling,
    TextPrompt,
    Wish,
    WorkerStatus,
)
from inference_gateway.domain.lifetime import Admission
from inference_gateway.domain.member import Member
from inference_gateway.domain.memories import Memory, MemoryChoice
from inference_gateway.domain.served_model import WorkerWatch
from treadle.contract import Deadline
from treadle.contract.errors import DeadlineExceeded, NotFound, ResourceExhausted, TreadleError, Unavailable

WISH = Wish("m", ChatPrompt((Message("user", "hi"),)), Sampling())


async def test_a_request_ends_at_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"0\.01 seconds"):
        async with Admission(1).admit(0.01):
            await asyncio.Event().wait()


async def test_a_request_that_is_over_says_so_though_a_call_has_noticed_it_first() -> None:
    async def request(seconds: float) -> None:
        async with Admission(1).admit(seconds) as lifetime:
            while 0 < lifetime.deadline.remaining_seconds() < 1:  # the loop, and so its timer, does not run meanwhile
                pass
            raise DeadlineExceeded("the worker did not finish in time")

    with pytest.raises(DeadlineExceeded, match=r"not complete within 0\.01 seconds"):
        await request(0.01)
    with pytest.raises(DeadlineExceeded, match="the worker did not finish"):  # by its own prediction, long before
        await request(600)


async def test_a_request_ends_with_the_reason_that_it_is_given_and_only_the_first() -> None:
    async def request() -> None:
        async with Admission(1).admit(10) as lifetime:
            lifetime.end(ClientLeft("first"))
            lifetime.end(Unavailable("second"))
            await asyncio.Event().wait()

    with pytest.raises(ClientLeft):
        await request()


async def test_an_end_that_comes_after_the_request_changes_nothing() -> None:
    async with Admission(1).admit(10) as lifetime:
        pass
    lifetime.end(ClientLeft("late"))
    await asyncio.sleep(0)


async def test_a_time_limit_of_the_work_itself_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with Admission(1).admit(10):
            raise TimeoutError


async def test_a_place_is_free_again_after_any_end() -> None:
    admission = Admission(1)

    async def request() -> None:
        async with admission.admit(10):
            with pytest.raises(ResourceExhausted, match="calls_max"):
                await admission.admit(10).__aenter__()
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        await request()
    assert admission.in_progress == 0
    async with admission.admit(10):
        assert admission.in_progress == 1


async def test_a_drain_waits_for_who_is_inside_and_lets_nobody_in() -> None:
    admission, inside = Admission(2), asyncio.Event()

    async def stay() -> str:
        async with admission.admit(10):
            await inside.wait()
            return "done"

    request = asyncio.create_task(stay())
    await asyncio.sleep(0)
    drain = asyncio.create_task(admission.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="stopping"):
        async with admission.admit(10):
            pass
    inside.set()
    assert await drain == 0
    assert await request == "done"


class Ids:
    """A prompt encoder: an id for each letter."""

    tool_form = None

    def encode_chat(self, prompt: ChatPrompt, tokens_max: int) -> list[int]:
        return [ord(letter) for message in prompt.messages for letter in message.content]

    def encode_text(self, text: str, tokens_max: int) -> list[int]:
        return [ord(letter) for letter in text]


class FakeWorker:
    """A worker that says what the test lets it say."""

    def __init__(self) -> None:
        self.model = "m"
        self.fails: list[TreadleError] = [Unavailable("away")]
        self.polls = 0
        self.asked = asyncio.Event()
        self.memories: list[Memory] = []
        self.refuses: TreadleError | None = None  # generations alone

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        self.polls += 1
        self.asked.set()
        if self.fails:
            raise self.fails[0]
        return WorkerStatus(self.model, Path("/m"), self.model, 8, False, "0", 1, tuple(self.memories))

    async def embed(self, request_id: str, texts: Sequence[Sequence[int]], timeout_seconds: float) -> list[bytes]:
        raise AssertionError("nobody asks for vectors here")

    async def watch_blocks(self, timeout_seconds: float) -> AsyncGenerator[BlockChanges, None]:
        yield BlockChanges(snapshot_complete=True)

    async def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        if self.fails or self.refuses:
            raise self.refuses or self.fails[0]
        yield Piece(token_ids=(1,), text="a", degraded=True)
        yield Piece(finish_reason=FinishReason.STOP)


async def in_thread(work: Callable[[], Any], /) -> Any:
    return work()


def watch_of(worker: FakeWorker, opened: list[str] | None = None) -> WorkerWatch:
    def source(folder: Path, tokenizer_digest: str) -> Ids:
        if tokenizer_digest == "broken":
            raise NotFound("no tokenizer.json")
        if opened is not None:
            opened.append(tokenizer_digest)
        return Ids()

    return WorkerWatch(worker, source, in_thread, interval_seconds=60)


def generating_of(worker: FakeWorker, watch: WorkerWatch) -> Generating:
    return Generating(Fleet([Member("w", worker, watch)]), in_thread)


@pytest.mark.parametrize(
    ("prompt", "threads"),
    [
        (ChatPrompt((Message("user", "hi"),)), 0),
        (TextPrompt("x" * 1000), 0),
        (TextPrompt("x" * 1001), 1),
        (ChatPrompt((Message("user", "x" * 1001),)), 1),
        (ChatPrompt((Message("user", "hi", name="x" * 1001),)), 1),
        (ChatPrompt((Message("user", ""),) * 51), 1),
        (ChatPrompt((Message("tool", "hi", tool_call_id="x" * 1001),)), 1),
        (ChatPrompt((Message("assistant", "", tool_calls=({"function": {"arguments": {"a": "x" * 1001}}},)),)), 1),
        (ChatPrompt((Message("user", "hi"),), ({"function": {"name": "f"}},)), 1),
    ],
)
async def test_a_prompt_of_which_a_template_may_write_much_is_encoded_in_a_thread(prompt: Prompt, threads: int) -> None:
    worker, done = FakeWorker(), list[str]()

    async def counted(work: Callable[[], Any], /) -> Any:
        done.append("in a thread")
        return work()

    worker.fails.clear()
    watch = watch_of(worker)
    await watch.poll()
    generating = Generating(Fleet([Member("w", worker, watch)]), counted)
    with suppress(RequestRefused):  # the model's context is as small as the worker
        await generating.plan(replace(WISH, prompt=prompt), request_id="r", caller=ANYBODY)
    assert len(done) == threads


async def test_a_worker_that_was_away_is_confirmed_by_the_request_that_needs_it() -> None:
    worker = FakeWorker()
    watch = watch_of(worker)
    fleet = Fleet([Member("w", worker, watch)])
    polling = asyncio.create_task(watch.run())
    try:
        with pytest.raises(Unavailable, match="away"):
            await fleet.confirmed("m")
        worker.fails.clear()
        assert (await fleet.confirmed("m")).name == "m"
        polls = worker.polls
        assert (await fleet.confirmed("m")).name == "m"
        assert worker.polls == polls  # a worker that answers is not asked before every request
    finally:
        polling.cancel()


async def test_a_lost_worker_is_asked_what_it_runs_before_the_next_prompt_is_encoded() -> None:
    worker, opened = FakeWorker(), list[str]()
    watch = watch_of(worker, opened)
    polling = asyncio.create_task(watch.run())
    generating = generating_of(worker, watch)
    try:
        worker.fails.clear()
        plan = await generating.plan(WISH, request_id="r", caller=ANYBODY)
        worker.fails.append(WorkerLost("away"))
        with pytest.raises(Unavailable):
            _ = [piece async for piece in generating.pieces(plan, Deadline.after(10))]
        worker.fails.clear()
        worker.model = "another"
        with pytest.raises(NotFound, match="another"):
            await generating.plan(WISH, request_id="r", caller=ANYBODY)
        assert opened == ["m", "another"]
    finally:
        polling.cancel()


async def test_a_model_whose_tokenizer_cannot_be_read_is_not_served_with_the_old_one() -> None:
    worker = FakeWorker()
    worker.fails.clear()
    watch = watch_of(worker)
    await watch.poll()
    worker.model = "broken"
    await watch.poll()
    assert watch.not_ready_because() == "no tokenizer.json"
    with pytest.raises(Unavailable):
        await Fleet([Member("w", worker, watch)]).confirmed("m")
    worker.model = "m"
    await watch.poll()
    assert watch.not_ready_because() is None


async def test_the_poll_outlives_an_error_that_nobody_thought_of() -> None:
    worker = FakeWorker()
    worker.fails = [TreadleError("odd"), *worker.fails]
    watch = watch_of(worker)
    await watch.poll()
    assert watch.not_ready_because() == "odd"
    worker.fails.clear()
    worker.model = None  # type: ignore[assignment]
    await watch.poll()
    worker.model = "m"
    await watch.poll()
    assert watch.not_ready_because() is None


async def test_an_answer_stays_degraded_once_memory_was_missing() -> None:
    worker = FakeWorker()
    worker.fails.clear()
    watch = watch_of(worker)
    await watch.poll()
    generating = generating_of(worker, watch)
    plan = await generating.plan(WISH, request_id="r", caller=ANYBODY)
    pieces = [piece async for piece in generating.pieces(plan, Deadline.after(10))]
    assert [piece.degraded for piece in pieces] == [True, True]


async def test_a_refusal_that_is_about_one_request_does_not_lose_the_worker() -> None:
    worker = FakeWorker()
    worker.fails.clear()
    watch = watch_of(worker)
    await watch.poll()
    generating = generating_of(worker, watch)
    plan = await generating.plan(WISH, request_id="r", caller=ANYBODY)
    worker.fails.append(Unavailable("engram rows missing"))
    with pytest.raises(Unavailable):
        _ = [piece async for piece in generating.pieces(plan, Deadline.after(10))]
    assert watch.not_ready_because() is None


def wish_of(model: str = "m", engram: MemoryChoice | None = None) -> Wish:
    return replace(WISH, model=model, memory=MemoryWish(engram))


async def test_a_memory_that_is_not_known_is_the_workers_to_find_and_is_listed_soon() -> None:
    worker, opened = FakeWorker(), list[str]()
    worker.fails.clear()
    watch = watch_of(worker, opened)
    polling = asyncio.create_task(watch.run())
    try:
        await watch.next_poll(10)
        worker.memories = [Memory("kjv", "1b" * 32)]
        worker.asked.clear()
        plan = await generating_of(worker, watch).plan(wish_of("m+kjv"), request_id="r", caller=ANYBODY)
        assert plan.generation.engram == MemoryChoice("kjv")
        assert plan.uses_memory
        await asyncio.wait_for(worker.asked.wait(), 10)  # the next poll by itself would be in a minute
        assert opened == ["m"]  # a memory that comes changes nothing about the tokenizer
    finally:
        polling.cancel()


@pytest.mark.parametrize(
    ("wish", "kind", "told"),
    [
        (wish_of("m+kjv"), ModelNotFound, r"'m\+kjv' is not served here: the worker cannot use it: gone"),
        (wish_of(engram=MemoryChoice("kjv")), RequestRefused, "'treadle.engram': the worker cannot use it: gone"),
    ],
)
async def test_a_memory_that_went_is_refused_by_how_it_was_chosen_and_the_worker_is_asked_again(
    wish: Wish, kind: type[TreadleError], told: str
) -> None:
    worker = FakeWorker()
    worker.fails.clear()
    worker.memories = [Memory("kjv", "1b" * 32)]
    watch = watch_of(worker)
    polling = asyncio.create_task(watch.run())
    try:
        await watch.next_poll(10)
        generating = generating_of(worker, watch)
        plan = await generating.plan(wish, request_id="r", caller=ANYBODY)
        worker.refuses = MemoryRefused("gone")
        worker.asked.clear()
        with pytest.raises(kind, match=told):
            _ = [piece async for piece in generating.pieces(plan, Deadline.after(10))]
        await asyncio.wait_for(worker.asked.wait(), 10)  # the next poll by itself would be in a minute
    finally:
        polling.cancel()
