"""The engine on its thread, answered to asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from inference_worker.domain.engine import Engine
from inference_worker.domain.engine_thread import AnswerStream, EngineThread
from inference_worker.domain.errors import Draining, StepFailed
from inference_worker.domain.limits import Limits
from inference_worker.domain.report import StepReport
from inference_worker.domain.request import Finish, FinishReason, Piece, Request, Sampling, Usage, total
from inference_worker.domain.text import Vocabulary
from treadle.contract.errors import Unavailable
from treadle.nn.model import CausalLM

MakeEngine = Callable[..., Engine]
Prompt = Callable[..., tuple[int, ...]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
ANSWER = Sampling(max_tokens=8, ignore_eos=True)


async def test_answers_stream_piece_by_piece(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    with EngineThread(tiny_engine()) as thread:
        stream, _ = thread.submit(Request(prompt(10), ANSWER))
        pieces = [piece async for piece in stream.pieces()]
    assert sum(len(piece.token_ids) for piece in pieces) == 8
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_many_callers_are_answered_together(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    with EngineThread(tiny_engine()) as thread:

        async def generate(seed: int) -> Piece:
            stream, _ = thread.submit(Request(prompt(10, seed), ANSWER))
            return total([piece async for piece in stream.pieces()])

        answers = await asyncio.gather(*(generate(seed) for seed in range(20)))
        assert thread.engine.totals.steps < 20 * 8
    assert all(len(piece.token_ids) == 8 for piece in answers)


async def test_pieces_that_nobody_took_are_merged() -> None:
    stream = AnswerStream(asyncio.get_running_loop())
    for token in range(1000):
        stream.deliver(Piece([token], "x"))
    stream.deliver(Piece([1000], "!", finish=Finish(FinishReason.LENGTH, Usage(1, 0, 1001))))
    pieces = [piece async for piece in stream.pieces()]
    assert len(pieces) == 1
    assert len(pieces[0].token_ids) == 1001


async def test_what_came_before_an_error_is_delivered_first() -> None:
    stream = AnswerStream(asyncio.get_running_loop())
    stream.deliver(Piece([1], "x"))
    stream.fail(Unavailable("gone"))
    pieces = stream.pieces()
    assert (await anext(pieces)).text == "x"
    with pytest.raises(Unavailable):
        await anext(pieces)


class Observing:
    """An Observer that counts nothing."""

    def step(self, report: StepReport) -> None: ...
    def ended(self, outcome: str) -> None: ...
    def hinted(self, tokens: int) -> None: ...
    def prefix_used(self, outcome: str, lookups: int, lookups_outside: int) -> None: ...


class HoldingObserver(Observing):
    """Holds the engine at the end of its second step until it is let go: whoever has the first piece is in no hurry then."""

    def __init__(self) -> None:
        self.steps, self.go_on = 0, threading.Event()

    def step(self, report: StepReport) -> None:
        self.steps += 1
        if self.steps == 2:
            self.go_on.wait(30)


async def test_cancelling_stops_the_work(
    tiny: CausalLM, tiny_vocabulary: Vocabulary, prompt: Prompt, eventually: Eventually
) -> None:
    holding = HoldingObserver()
    with EngineThread(Engine(tiny, tiny_vocabulary, Limits(), observer=holding)) as thread:
        stream, sequence = thread.submit(Request(prompt(10), Sampling(ignore_eos=True)))
        await anext(stream.pieces())
        thread.engine.cancel(sequence)
        holding.go_on.set()
        await eventually(lambda: not thread.engine.load.requests_running)
        assert thread.engine.totals.completion_tokens <= 2


async def test_leaving_stops_the_thread_with_work_in_progress(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    with EngineThread(tiny_engine()) as thread:
        stream, _ = thread.submit(Request(prompt(10), Sampling(ignore_eos=True)))
        await anext(stream.pieces())
    with pytest.raises(Draining):
        _ = [piece async for piece in stream.pieces()]
    assert thread.engine.load.requests_running == 0
    assert thread.engine.draining


class FailingObserver(Observing):
    """Raises at its first step."""

    def __init__(self) -> None:
        self.failed = False

    def step(self, report: StepReport) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no more metrics")


async def test_nobody_waits_for_a_thread_that_failed_and_it_goes_on(
    tiny: CausalLM, tiny_vocabulary: Vocabulary, prompt: Prompt
) -> None:
    with EngineThread(Engine(tiny, tiny_vocabulary, Limits(), observer=FailingObserver())) as thread:
        stream, _ = thread.submit(Request(prompt(10), ANSWER))
        with pytest.raises(StepFailed):
            _ = [piece async for piece in stream.pieces()]
        stream, _ = thread.submit(Request(prompt(10), ANSWER))
        assert len(total([piece async for piece in stream.pieces()]).token_ids) == 8


async def test_a_closed_door_does_not_keep_an_idle_thread_busy(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    engine.close_door()
    began = time.monotonic()
    engine.wait_for_work(0.05)
    assert time.monotonic() - began >= 0.04
    engine.wake()
    engine.wait_for_work(60.0)
    assert time.monotonic() - began < 30.0
