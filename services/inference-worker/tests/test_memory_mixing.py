"""Requests with different memories, and with none, in one batch: each gets the answer that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.engram_step import by_memory, groups_of
from inference_worker.domain.errors import MemoryMissing
from inference_worker.domain.lease import Lease
from inference_worker.domain.request import Piece, Request, Sampling
from inference_worker.domain.scheduler import Slot
from inference_worker.domain.sequence import Sequence
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.contract import Late, WaitPolicy

Prompt = Callable[..., tuple[int, ...]]
MakeEngine = Callable[..., Engine]
Make = Callable[..., Catalogue]
Take = Callable[..., Lease[EngramMemory]]
Soon = Callable[[Callable[[], bool]], None]
Pool = Any  # conftest's FakePool
GREEDY = Sampling(max_tokens=8, ignore_eos=True, top_logprobs=0)
PATIENT = WaitPolicy(20.0)
FORMS = {"kjv": "v4.1", "law": "v4.1", "tales": "demo", "old-tales": "demo"}


@pytest.fixture
def catalogue(fake_pool: Pool, catalogues: Make) -> Catalogue:
    """Two memories of each form."""
    for seed, (name, form) in enumerate(FORMS.items()):
        fake_pool.grow(name, seed, form)
    return catalogues()


@pytest.fixture
def answer(catalogue: Catalogue, take: Take) -> Callable[..., list[Piece]]:
    """The answers to (memory, prompt) pairs, run together."""

    def run(engine: Engine, asked: list[tuple[str, tuple[int, ...]]], sampling: Sampling = GREEDY) -> list[Piece]:
        answers = [Answer() for _ in asked]
        for (name, prompt), each in zip(asked, answers, strict=True):
            engine.submit(Request(prompt, sampling, policy=PATIENT), each, take(catalogue, name) if name else Lease())
        run_until_done(engine, answers)
        assert [each.error for each in answers] == [None] * len(asked)
        return [each.piece for each in answers]

    return run


def logprobs_of(piece: Piece) -> list[float]:
    return [entry.logprob for entry in piece.logprobs]


@pytest.mark.parametrize("prefetch", [True, False])
def test_each_request_of_a_mixed_batch_gets_what_it_gets_alone(
    prefetch: bool, engines: MakeEngine, answer: Callable[..., list[Piece]], catalogue: Catalogue, prompt: Prompt
) -> None:
    names = ["kjv", "", "law", "tales", "kjv", "", "old-tales", "law"]
    asked = [(name, prompt(12 + 9 * place, place)) for place, name in enumerate(names)]
    alone = [answer(engines(prefetch=prefetch), [each])[0] for each in asked]
    together = answer(engines(prefetch=prefetch), asked)
    chunked = answer(engines(prefetch=prefetch, step_tokens_max=16), asked)
    for other, near in ((together, 1e-5), (chunked, 1e-4)):  # chunks sum attention in another order, with or without memories
        assert [piece.token_ids for piece in other] == [piece.token_ids for piece in alone]
        for one, two in zip(other, alone, strict=True):
            assert logprobs_of(one) == pytest.approx(logprobs_of(two), abs=near)
    for (name, _), piece in zip(asked, together, strict=True):
        assert piece.finish is not None
        assert [report.name for report in piece.finish.memory] == ([name] if name else [])
        assert all((report.rows_missing, report.shadowed) == (0, False) for report in piece.finish.memory)
    assert all(memory.requests == 0 for memory in catalogue.memories())


def test_memories_differ_from_each_other_and_from_none(
    engines: MakeEngine, answer: Callable[..., list[Piece]], prompt: Prompt
) -> None:
    same = prompt(40)
    pieces = answer(engines(), [(name, same) for name in ("", *FORMS)])
    seen = [tuple(logprobs_of(piece)) for piece in pieces]
    assert len(set(seen)) == len(seen)


def test_tokens_without_a_memory_are_never_looked_up(
    engines: MakeEngine, answer: Callable[..., list[Piece]], catalogue: Catalogue, prompt: Prompt
) -> None:
    answer(engines(), [("kjv", prompt(20)), ("", prompt(90, 1))])
    tokens = {memory.model: memory.tokens for memory in catalogue.memories()}
    assert tokens == {"kjv": 20 + 7, "law": 0, "tales": 0, "old-tales": 0}


def test_a_step_without_any_memory_has_no_ticket(engines: MakeEngine, prompt: Prompt) -> None:
    engine, whole = engines(), Answer()
    engine.submit(Request(prompt(5), GREEDY), whole, Lease())
    assert all(report.layers == () for report in run_until_done(engine, [whole]))


def test_a_request_keeps_its_version_to_its_end_and_the_next_gets_the_new_one(
    fake_pool: Pool, catalogue: Catalogue, engines: MakeEngine, answer: Callable[..., list[Piece]], take: Take, soon: Soon,
    prompt: Prompt,
) -> None:  # fmt: skip
    asked = ("kjv", prompt(40))
    (before,) = answer(engines(prefix_cache_bytes_max=0), [asked])
    engine, running = engines(), Answer()
    old = take(catalogue, "kjv")
    assert old.memory is not None
    engine.submit(Request(asked[1], GREEDY, policy=PATIENT), running, old)
    engine.step()
    engine.step()
    new = fake_pool.grow("kjv", seed=99)
    catalogue.update(fake_pool.resident())
    soon(lambda: ("kjv", new.version) in fake_pool.opened)
    catalogue.update([new])  # the old version is not even in the pool any more
    later = Answer()
    engine.submit(Request(asked[1], GREEDY, policy=PATIENT), later, take(catalogue, "kjv"))
    run_until_done(engine, [running, later])
    assert logprobs_of(running.piece) == pytest.approx(logprobs_of(before), abs=1e-5)
    assert logprobs_of(later.piece) != pytest.approx(logprobs_of(before), abs=1e-3)
    versions = [each.piece.finish.memory[0].version for each in (running, later) if each.piece.finish is not None]
    assert versions == [old.memory.version, new.version]
    soon(lambda: fake_pool.closed == [("kjv", versions[0])])


def test_a_request_that_still_waits_for_its_place_keeps_the_version_it_was_taken_in_with(
    fake_pool: Pool, catalogue: Catalogue, engines: MakeEngine, take: Take, soon: Soon, prompt: Prompt
) -> None:
    engine, first, waiting = engines(sequences_max=1), Answer(), Answer()
    engine.submit(Request(prompt(5), GREEDY), first, Lease())
    old = take(catalogue, "kjv")
    assert old.memory is not None
    version = old.memory.version
    engine.submit(Request(prompt(40), GREEDY, policy=PATIENT), waiting, old)
    engine.step()
    fake_pool.remove("kjv")
    catalogue.update([fake_pool.grow("kjv", seed=99)])
    engine.step()
    assert fake_pool.closed == []
    run_until_done(engine, [first, waiting])
    assert waiting.piece.finish is not None
    assert [report.version for report in waiting.piece.finish.memory] == [version]
    assert not waiting.piece.degraded
    soon(lambda: fake_pool.closed == [("kjv", version)])


def test_the_prefix_cache_never_crosses_memories_or_versions(
    fake_pool: Pool, catalogue: Catalogue, engines: MakeEngine, answer: Callable[..., list[Piece]], prompt: Prompt
) -> None:
    engine, shared = engines(), prompt(70)
    cold = {name: answer(engines(), [(name, shared)])[0] for name in ("", *FORMS)}
    for name in ("", *FORMS):
        (first,) = answer(engine, [(name, shared)])
        (second,) = answer(engine, [(name, shared)])
        for piece, cached in ((first, 0), (second, 64)):
            assert piece.finish is not None
            assert piece.finish.usage.cached_tokens == cached
            assert logprobs_of(piece) == pytest.approx(logprobs_of(cold[name]), abs=1e-4)
    fake_pool.grow("kjv", seed=99)
    catalogue.update(fake_pool.resident())
    (renewed,) = answer(engine, [("kjv", shared)])
    assert renewed.finish is not None
    assert renewed.finish.usage.cached_tokens == 0


def test_rows_of_one_memory_that_do_not_come_degrade_its_requests_alone(
    fake_pool: Pool, catalogue: Catalogue, engines: MakeEngine, take: Take, prompt: Prompt
) -> None:
    here = take(catalogue, "kjv")
    fake_pool.delay_seconds = 60.0
    gone = take(catalogue, "law")
    engine, answers = engines(), [Answer() for _ in range(4)]
    brief = WaitPolicy(0.01, Late.MASK)
    for lease, policy, each in (
        (here, PATIENT, answers[0]), (gone, brief, answers[1]), (gone, WaitPolicy(0.01, Late.FAIL), answers[2]), (Lease(), brief, answers[3]),
    ):  # fmt: skip
        engine.submit(Request(prompt(20), Sampling(max_tokens=2, ignore_eos=True), policy=policy), each, lease)
    reports = run_until_done(engine, answers)
    assert [each.piece.degraded for each in answers] == [False, True, False, False]
    assert isinstance(answers[2].error, MemoryMissing)
    assert sum(ticket.stall_seconds for report in reports for ticket in report.layers) < 5.0  # the patient one's rows had come


def test_a_memory_is_let_go_however_its_request_ends(catalogue: Catalogue, engines: MakeEngine, take: Take, prompt: Prompt) -> None:
    engine = engines(sequences_max=1)
    first = engine.submit(Request(prompt(5), GREEDY), Answer(), take(catalogue, "kjv"))
    engine.submit(Request(prompt(5), GREEDY), Answer(), take(catalogue, "law"))
    engine.step()
    engine.cancel(first)
    engine.step()
    requests = {memory.model: memory.requests for memory in catalogue.memories()}
    assert (requests["kjv"], requests["law"]) == (0, 1)
    engine.abandon(RuntimeError("over"))
    assert all(memory.requests == 0 for memory in catalogue.memories())


def test_the_slots_of_a_memory_lie_side_by_side_behind_those_without(catalogue: Catalogue, take: Take) -> None:
    class NoSink:
        def deliver(self, piece: Piece) -> None: ...
        def fail(self, error: Exception) -> None: ...

    leases = {name: take(catalogue, name) if name else Lease() for name in ("kjv", "", "law")}
    slots = []
    for count, name in ((1, "kjv"), (3, ""), (2, "law"), (4, "kjv")):
        tokens = list(range(count))
        sequence = Sequence(Request(tuple(tokens)), NoSink(), TextStream(Vocabulary(())), tokens, 100, lease=leases[name])
        slots.append(Slot(sequence, 0, count))
    ordered = by_memory(slots)
    assert [slot.count for slot in ordered] == [3, 1, 4, 2]
    groups = groups_of(ordered)
    assert [(group.memory.model.name, group.first, group.starts) for group in groups] == [("kjv", 3, [0, 1, 5]), ("law", 8, [0, 2])]
    assert groups[0].windows.tokens.tolist() == [0, 0, 1, 2, 3]
