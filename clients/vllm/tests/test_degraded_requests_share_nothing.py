"""Rows that do not come: the request says so, fails if it asked to, and no block of it is ever found by another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.vllm import MemoryConfig
from treadle.vllm.config import Choice
from treadle.vllm.outcomes import StepVerdict

Verses = Callable[..., list[int]]

FEW = 4  # steps that wait in vain


@pytest.fixture(scope="module")
def fabric(
    engines: Callable[..., Any], smollm_folder: Path, tmp_path_factory: pytest.TempPathFactory, start_pool: Callable[..., Any]
) -> Iterator[tuple[Any, Any]]:
    """An engine whose rows come by rpc from a pool of its own: a frozen pool answers nothing, and 0.2 s later rows are late.

    However long it was waited for in vain, it is not given up: what comes after it is thawed would be degraded too.
    """
    pool = start_pool(tmp_path_factory.mktemp("own") / "segments")
    config = MemoryConfig(
        engram_pool=pool.address, transport="rpc", default_memory=f"kjv@{pool.current['kjv']}", wait_seconds_max=0.2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.client.engram.patience.IN_VAIN_SECONDS_MAX", 600.0)
        yield engines(smollm_folder, config, max_num_batched_tokens=256), pool


@contextmanager
def patient(engine: Any) -> Iterator[None]:
    """While inside, steps wait for rows however slow this machine is."""
    config, engine.batch._config = engine.batch._config, replace(engine.batch._config, wait_seconds_max=30.0)
    try:
        yield
    finally:
        engine.batch._config = config


def healthy(engine: Any, prompt: list[int], **ours: Any) -> Any:
    with patient(engine):
        (answer,) = engine.say((prompt, None), **({"wait_seconds_max": 30.0} | ours))
    assert (answer.degraded, answer.outcome.rows_missing, answer.outcome.missing_because) == (False, 0, "")
    return answer


def test_a_degraded_request_says_so_and_leaves_no_block_behind(fabric: tuple[Any, Any], embedded: Any, verses: Verses) -> None:
    engine, pool = fabric
    healthy(engine, verses(10))  # the memory is open
    prompt = verses(100, 200)
    with pool.frozen():
        (late,) = engine.say((prompt, None), tokens=FEW)
    assert late.degraded
    assert late.outcome.rows_missing > 0
    assert (late.outcome.missing_because, late.outcome.error, late.finish) == ("late", None, "length")
    assert late.outcome.stall_seconds > 0.1
    for cached in (0, 96):
        answer = healthy(engine, prompt)
        assert answer.cached == cached
        answer.same_as(embedded.say(prompt, "kjv"))


def test_what_was_healthy_before_stays_shared(fabric: tuple[Any, Any], embedded: Any, verses: Verses) -> None:
    engine, pool = fabric
    begun, prompt = verses(64, 400), verses(120, 400)
    healthy(engine, begun)
    with pool.frozen():
        (late,) = engine.say((prompt, None), tokens=FEW)
    assert (late.degraded, late.cached) == (True, 64)
    answer = healthy(engine, prompt)
    assert answer.cached == 64
    answer.same_as(embedded.say(prompt, "kjv"))


def test_late_fail_ends_that_request_alone(fabric: tuple[Any, Any], verses: Verses) -> None:
    engine, pool = fabric
    healthy(engine, verses(10))
    with pool.frozen():
        (failed,) = engine.say((verses(50, 600), None), late="fail")
        masked, plain = engine.say((verses(50, 700), None), (verses(50, 800), "none"), tokens=FEW)
    assert (failed.tokens, failed.finish, failed.outcome.error.kind) == ([], "error", "Unavailable")
    assert "late = mask" in failed.outcome.error.message
    assert (masked.degraded, masked.finish, plain.degraded, plain.finish) == (True, "length", False, "length")
    assert not engine.scheduler.requests
    assert not engine.scheduler._known


@contextmanager
def verdicts_changed(engine: Any, change: Callable[[Mapping[str, StepVerdict]], dict[str, StepVerdict]]) -> Iterator[None]:
    """While inside, the scheduler hears `change` of what steps really did."""
    batch, told = engine.batch, []

    def changed() -> Mapping[str, StepVerdict]:
        verdicts = type(batch).take_verdicts(batch)
        told.append(verdicts)
        return change(verdicts) if len(told) == 1 else verdicts

    batch.take_verdicts = changed
    try:
        yield
    finally:
        del batch.take_verdicts


def spoiled(verdict: StepVerdict, position: int) -> StepVerdict:
    return StepVerdict(replace(verdict.outcome, degraded=True, rows_missing=1, missing_because="late"), position)


def test_who_continues_from_a_spoiled_block_of_the_same_step_is_degraded_too(fabric: tuple[Any, Any], verses: Verses) -> None:
    """The rows of the second request came; but its prompt begins with blocks that the first one made with rows missing."""
    engine, _ = fabric
    prompt = verses(100, 1000)
    with patient(engine), verdicts_changed(engine, lambda real: dict(real) | {min(real): spoiled(real[min(real)], 40)}):
        first, second, other = engine.say((prompt, None), (prompt[:99], None), (verses(60, 1500), None), wait_seconds_max=30.0)
    assert second.cached == 96
    assert (first.degraded, second.degraded, other.degraded) == (True, True, False)
    assert second.outcome.rows_missing == 0
    assert healthy(engine, prompt).cached == 32  # position 40 lies in the second block
    assert healthy(engine, verses(60, 1500)).cached == 32
    with patient(engine), verdicts_changed(engine, lambda real: dict(real) | {min(real): spoiled(real[min(real)], 0)}):
        first, second = engine.say((verses(100, 1700), None), (verses(99, 1700), None), wait_seconds_max=30.0, late="fail")
    assert (second.finish, second.tokens) == ("error", [])
    assert "the same step" in second.outcome.error.message


def test_a_request_that_is_aborted_while_its_spoiled_step_runs_leaves_no_block_behind(
    fabric: tuple[Any, Any], verses: Verses
) -> None:
    engine, _ = fabric
    prompt = verses(100, 2000)

    def aborted(real: Mapping[str, StepVerdict]) -> dict[str, StepVerdict]:
        from vllm.v1.request import RequestStatus

        (request_id,) = real
        engine.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        engine.llm.llm_engine.output_processor.abort_requests([request_id], internal=True)
        return {request_id: spoiled(real[request_id], 0)}

    with patient(engine), verdicts_changed(engine, aborted):
        engine.llm.llm_engine.add_request("gone", {"prompt_token_ids": prompt}, params(engine))
        while engine.llm.llm_engine.has_unfinished_requests():
            engine.llm.llm_engine.step()
    assert healthy(engine, prompt).cached == 0


def params(engine: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=4, detokenize=False, extra_args={"treadle": {"wait_seconds_max": 30.0}})


def test_a_version_that_is_not_there_and_one_that_cannot_be_opened_now(
    engines: Callable[..., Any], fabric: tuple[Any, Any], verses: Verses
) -> None:
    """Last in this module: the pool is killed."""
    engine, pool = fabric
    prompt = verses(40, 2500)
    (unknown, wrong, fine) = engine.say((prompt, "nosuch"), (prompt, "kjv@" + "0" * 64), (prompt, "none"))
    assert [answer.outcome.error.kind for answer in (unknown, wrong)] == ["NotFound", "NotFound"]
    assert (unknown.tokens, unknown.finish, fine.finish) == ([], "error", "length")
    missing = "kjv@" + "0" * 64
    (early,) = engine.say((verses(40, 2600), missing))
    assert early.finish == "error"
    memories = engine.batch._memories
    with pytest.MonkeyPatch.context() as patch:  # the version has come since: here by another name for the one that is open
        (memory,) = memories._open.values()
        patch.setitem(memories._open, Choice("kjv", "0" * 64), memory)
        patch.setattr(memory, "requests", 1)  # so that neither name is out of use
        assert healthy(engine, verses(40, 2600), engram=missing).cached == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.batch._memories, "_open", {})  # as if this engine had just started
        pool.process.kill()
        pool.process.wait()
        (masked,) = engine.say((prompt, None))
        (failed,) = engine.say((prompt, None), late="fail")
    assert (masked.degraded, masked.outcome.missing_because, masked.outcome.memory, masked.finish) == (
        True,
        "unavailable",
        None,
        "length",
    )
    assert (failed.finish, failed.outcome.error.kind) == ("error", "Unavailable")
    (gone,) = engine.say((prompt, None))  # the memory that was open: its rows came by rpc
    assert gone.degraded
    assert gone.outcome.missing_because in ("late", "unavailable")  # whichever was sooner: the wait's end or the refused connection
    assert gone.cached == 0
