"""Long prefixes in the engine, on the tiny model: a dictionary with an entry for every query answers as the prefix itself does."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

import pytest

from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.errors import MemoryMissing, StepFailed
from inference_worker.domain.lease import Lease
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_catalogue import PrefixCatalogue
from inference_worker.domain.request import MemoryReport, Piece, Request, Sampling
from inference_worker.domain.resident_versions import Choice
from inference_worker.domain.sequence import Sequence
from inference_worker.settings import Settings
from treadle.contract.block_memory import block_memory
from treadle.contract.dictionary import Positions
from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import Late, WaitPolicy
from treadle.nn.prefix_memory import OUTSIDE_SHARE_MAX

MakeEngine = Callable[..., Engine]
MakePrefix = Callable[..., Path]
Ask = Callable[..., list[Piece]]
Prompt = Callable[..., tuple[int, ...]]
GREEDY = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=0)
PREFIX_TOKENS = 60


@pytest.fixture
def rules(prompt: Prompt) -> tuple[int, ...]:
    return prompt(PREFIX_TOKENS, seed=100)


@pytest.fixture
def answered_behind(tiny_engine: MakeEngine, ask: Ask, rules: tuple[int, ...]) -> Callable[..., Piece]:
    """The answer with the prefix's tokens in the prompt."""
    return lambda tokens, sampling=GREEDY: ask(tiny_engine(), Request((*rules, *tokens), sampling))[0]


@pytest.fixture
def opened(
    fake_store: Any, prefix_catalogues: Callable[..., PrefixCatalogue], make_prefix: MakePrefix, rules: tuple[int, ...],
    answered_behind: Callable[..., Piece],
) -> Callable[..., OpenPrefix]:  # fmt: skip
    """Opens a prefix that answers these prompts exactly."""
    catalogue = prefix_catalogues()

    def make(*prompts: Ids[int], **settings: Any) -> OpenPrefix:
        traces = [(*tokens, *answered_behind(tokens).token_ids) for tokens in prompts]
        kept = fake_store.put(make_prefix(rules, traces, **settings))
        catalogue.update(fake_store.resident())
        lease: Lease[OpenPrefix] = catalogue.take(Choice(kept.model.name)).result(30)
        assert lease.memory is not None
        return lease.memory

    return make


def answers(engine: Engine, *asked: tuple[Request, OpenPrefix | None]) -> list[Answer]:
    made = [Answer() for _ in asked]
    for (request, prefix), answer in zip(asked, made, strict=True):
        engine.submit(request, answer, Lease(), Lease(prefix))
    run_until_done(engine, made)
    return made


def answer(engine: Engine, request: Request, prefix: OpenPrefix | None) -> Piece:
    (made,) = answers(engine, (request, prefix))
    assert made.error is None, made.error
    return made.piece


def report_of(piece: Piece) -> MemoryReport:
    assert piece.finish is not None
    (report,) = [each for each in piece.finish.memory if each.kind == "prefix"]
    return report


def assert_same(left: Piece, right: Piece) -> None:
    assert left.token_ids == right.token_ids
    assert left.text == right.text
    assert [entry.logprob for entry in left.logprobs] == pytest.approx([entry.logprob for entry in right.logprobs], abs=1e-4)


def test_an_answer_behind_a_dictionary_is_that_behind_the_prefix(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, answered_behind: Callable[..., Piece]
) -> None:
    tokens, engine = prompt(40), tiny_engine()
    prefix = opened(tokens)
    behind = answer(engine, Request(tokens, GREEDY), prefix)
    assert_same(behind, answered_behind(tokens))
    report = report_of(behind)
    assert (report.name, report.version, report.prefix_tokens) == ("rules", prefix.version, PREFIX_TOKENS)
    assert report.lookups == (40 + 11) * 4 * 2  # a query of each layer and head of a group; the last token is never run
    assert (report.lookups_outside, report.fell_back, report.missing_because, behind.degraded) == (0, False, "", False)
    assert behind.finish is not None
    assert behind.finish.usage.prompt_tokens == 40
    plain = answer(engine, Request(tokens, GREEDY), None)
    assert plain.token_ids != behind.token_ids
    assert plain.finish is not None
    assert plain.finish.memory == ()


def test_one_batch_holds_requests_with_different_prefixes_and_without_in_chunks(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, answered_behind: Callable[..., Piece], ask: Ask
) -> None:
    first, second = prompt(70, 1), prompt(33, 2)
    one, other = opened(first), opened(second, name="guide")
    engine = tiny_engine(step_tokens_max=24, sequences_max=8)
    asked = [(first, one), (second, other), (first, None), (second, None), (first, one)]
    got = answers(engine, *((Request(tokens, GREEDY), prefix) for tokens, prefix in asked))
    plain = ask(tiny_engine(), Request(first, GREEDY), Request(second, GREEDY))
    expected = [answered_behind(first), answered_behind(second), *plain, answered_behind(first)]
    for made, piece in zip(got, expected, strict=True):
        assert_same(made.piece, piece)


def test_the_prefix_cache_shares_within_a_version_and_with_nobody_else(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, answered_behind: Callable[..., Piece]
) -> None:
    tokens, engine = prompt(70), tiny_engine()
    prefix = opened(tokens)
    cold = answer(engine, Request(tokens, GREEDY), prefix)
    without = answer(engine, Request(tokens, GREEDY), None)
    warm = answer(engine, Request(tokens, GREEDY), prefix)
    other = answer(engine, Request(tokens, GREEDY), opened(tokens, cosine_min=0.998))  # the same numbers, another version
    cached = [piece.finish.usage.cached_tokens for piece in (cold, without, warm, other) if piece.finish is not None]
    assert cached == [0, 0, 64, 0]
    for piece in (cold, warm, other):
        assert_same(piece, answered_behind(tokens))
    told = {block.memory for block in engine.block_log._there.values()}
    assert block_memory(prefix=f"rules@{prefix.version}") in told
    assert "" in told


def test_a_prompt_off_the_task_is_answered_from_the_exact_kv(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, answered_behind: Callable[..., Piece]
) -> None:
    prefix, other = opened(prompt(40)), prompt(70, 9)
    engine = tiny_engine(step_tokens_max=24)
    wanted = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=0, prompt_logprobs=True)
    exact = answer(engine, Request(other, wanted), prefix)
    assert_same(exact, answered_behind(other))
    report = report_of(exact)
    assert (report.fell_back, report.missing_because, exact.degraded, prefix.fallbacks) == (True, "", False, 1)
    assert report.lookups == 70 * 4 * 2  # of the prompt alone: the exact KV looks nothing up
    assert report.lookups_outside > OUTSIDE_SHARE_MAX * report.lookups
    assert len(exact.prompt_logprobs) == 69  # each once, although the prompt ran twice
    again = answer(engine, Request(other, GREEDY), prefix)
    assert_same(again, answered_behind(other))
    assert again.finish is not None
    assert again.finish.usage.cached_tokens == 64
    told = {block.memory for block in engine.block_log._there.values()}
    assert told == {block_memory(prefix=f"rules@{prefix.version}", exact=True)}  # what the dictionary made of it is not kept


def test_the_guard_judges_a_prompt_whose_beginning_was_cached_as_one_that_was_not(
    opened: Callable[..., OpenPrefix], tiny: Any, tiny_vocabulary: Any, tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    start = prompt(70)
    mixed = (*start, *prompt(60, 9))
    prefix = opened(start)
    cold = report_of(answer(tiny_engine(), Request(mixed, GREEDY), prefix))
    share = cold.lookups_outside / cold.lookups
    assert 0.1 < share < 0.9
    for share_max, falls_back in ((share + 0.05, False), (share - 0.05, True)):
        engine = Engine(tiny, tiny_vocabulary, tiny_engine().limits, prefix_outside_share_max=share_max)
        in_turn = (mixed, start, mixed, mixed)  # nothing is cached at first, then the beginning, and what was answered before
        reports = [report_of(answer(engine, Request(tokens, GREEDY), prefix)) for tokens in in_turn]
        verdicts = [report.fell_back for report in reports]
        assert verdicts == [falls_back, False, falls_back, falls_back]
        asked = {(report.lookups, report.lookups_outside) for report in (reports[0], *reports[2:])}
        assert len(asked) == 1


def test_a_request_that_begins_anew_forgets_what_its_first_pass_missed(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, engine = opened(prompt(40)), tiny_engine()
    real = Sequence.restart_exact

    def after_a_miss(sequence: Sequence) -> None:
        sequence.degraded, sequence.memory.rows_missing = True, 3
        real(sequence)
        assert (sequence.degraded, sequence.memory.rows_missing) == (False, 0)

    monkeypatch.setattr(Sequence, "restart_exact", after_a_miss)
    piece = answer(engine, Request(prompt(70, 9), GREEDY), prefix)
    assert (report_of(piece).fell_back, piece.degraded) == (True, False)


def test_one_batch_mixes_requests_that_fall_back_with_those_that_do_not(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, answered_behind: Callable[..., Piece]
) -> None:
    tokens, other = prompt(40), prompt(50, 9)
    prefix, engine = opened(tokens), tiny_engine(sequences_max=2)
    got = answers(engine, *((Request(each, GREEDY), prefix) for each in (tokens, other, tokens, other)))
    for made, each in zip(got, (tokens, other, tokens, other), strict=True):
        assert_same(made.piece, answered_behind(each))
    assert [report_of(made.piece).fell_back for made in got] == [False, True, False, True]


def test_a_dictionary_whose_lookups_fail_fails_its_own_requests_alone(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt, answered_behind: Callable[..., Piece], ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tokens = prompt(40)
    sound, broken, engine = opened(tokens), opened(tokens, name="guide"), tiny_engine()
    assert broken.memory is not None
    lookup = broken.memory.lookup

    def fails(layer: int, *queries: Any) -> Any:
        if layer == 2:
            raise InvalidArgument("keys: must be aligned")
        return lookup(layer, *queries)

    monkeypatch.setattr(broken.memory, "lookup", fails)
    asked = [Request(tokens, GREEDY)] * 4
    got = answers(engine, *zip(asked, (sound, broken, None, broken), strict=True))
    assert_same(got[0].piece, answered_behind(tokens))
    assert_same(got[2].piece, ask(tiny_engine(), Request(tokens, GREEDY))[0])
    assert [isinstance(made.error, StepFailed) for made in got] == [False, True, False, True]
    assert len({block.memory for block in engine.block_log._there.values()}) == 2  # nothing of the broken one is kept


def test_off_the_task_without_an_exact_kv_an_answer_is_degraded_and_never_shared(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    prefix, engine = opened(prompt(40), keep_kv=False), tiny_engine()
    piece = answer(engine, Request(prompt(70, 9), GREEDY), prefix)
    report = report_of(piece)
    assert (piece.degraded, report.missing_because, report.fell_back) == (True, "off_task", False)
    assert len(engine.block_log) == 0
    (failed,) = answers(engine, (Request(prompt(70, 9), GREEDY, policy=WaitPolicy(1.0, Late.FAIL)), prefix))
    assert isinstance(failed.error, MemoryMissing)
    assert "no exact KV is kept" in str(failed.error)


def test_without_room_for_the_exact_kv_an_answer_off_the_task_is_degraded(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    prefix = opened(prompt(40))
    engine = tiny_engine(context_tokens_max=100, kv_tokens_max=100)
    piece = answer(engine, Request(prompt(70, 9), GREEDY), prefix)
    assert (piece.degraded, report_of(piece).missing_because) == (True, "off_task")


def test_a_guard_that_allows_every_share_sends_nobody_back(
    opened: Callable[..., OpenPrefix], tiny: Any, tiny_vocabulary: Any, tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    prefix = opened(prompt(40))
    engine = Engine(tiny, tiny_vocabulary, tiny_engine().limits, prefix_outside_share_max=1.0)
    report = report_of(answer(engine, Request(prompt(70, 9), GREEDY), prefix))
    assert (report.fell_back, report.missing_because) == (False, "")
    assert report.lookups_outside > 0


def test_the_settings_guard_as_the_engine_does_by_itself() -> None:
    assert Settings().prefix_outside_share_max == OUTSIDE_SHARE_MAX


def test_a_prefix_takes_positions_but_no_room_of_the_context(
    opened: Callable[..., OpenPrefix], tiny: Any, tiny_vocabulary: Any, tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    prefix, limits = (
        opened(prompt(40)),
        tiny_engine(context_tokens_max=256).limits,
    )  # the model has 256 positions, the prefix takes 60
    engine = Engine(tiny, tiny_vocabulary, limits, prefix_outside_share_max=0.5)
    with pytest.raises(InvalidArgument, match="leave no room for an answer, the limit is 196"):
        engine.submit(Request(prompt(196), GREEDY), Answer(), Lease(), Lease(prefix))
    piece = answer(engine, Request(prompt(190), Sampling(ignore_eos=True)), prefix)
    assert piece.finish is not None
    assert piece.finish.usage.completion_tokens == 6
    assert report_of(piece).fell_back


def test_positions_from_zero_are_as_without_a_prefix(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    prefix = opened(prompt(40), keep_kv=False, positions=Positions.FROM_ZERO)
    assert prefix.positions_before == 0
    piece = answer(tiny_engine(context_tokens_max=256), Request(prompt(250), GREEDY), prefix)
    assert piece.finish is not None
    assert piece.finish.usage.completion_tokens == 6


def test_a_dictionary_of_some_layers_leaves_the_others_alone(
    opened: Callable[..., OpenPrefix], tiny_engine: MakeEngine, prompt: Prompt
) -> None:
    prefix = opened(prompt(40), layers=(1, 3))
    report = report_of(answer(tiny_engine(), Request(prompt(40), GREEDY), prefix))
    assert report.lookups % 4 == 0
    assert report.lookups == (40 + 11) * 2 * 2 or report.fell_back


def test_an_engram_memory_and_a_prefix_work_in_one_request(
    opened: Callable[..., OpenPrefix], catalogues: Callable[..., Any], fake_pool: Any, engines: MakeEngine, prompt: Prompt
) -> None:
    fake_pool.grow("kjv")
    tokens, prefix, engine = prompt(40), opened(prompt(40)), engines()
    memory = catalogues().take(Choice("kjv")).result(30).memory

    def ask(engram: Any, behind: OpenPrefix | None, ids: tuple[int, ...] = tokens) -> Piece:
        made = Answer()
        engine.submit(Request(ids, GREEDY), made, Lease(engram), Lease(behind))
        run_until_done(engine, [made])
        assert made.error is None, made.error
        return made.piece

    both = ask(memory, prefix)
    assert both.finish is not None
    assert [report.kind for report in both.finish.memory] == ["engram", "prefix"]
    exact = ask(memory, prefix, prompt(50, 9))
    assert report_of(exact).fell_back
    assert exact.finish is not None
    assert exact.finish.memory[0].rows_missing == 0
    alone = [ask(memory, None), ask(None, prefix)]
    assert len({tuple(piece.token_ids) for piece in (both, *alone)}) == 3
