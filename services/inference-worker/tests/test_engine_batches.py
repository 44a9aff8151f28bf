"""The engine on the tiny model: the same answer in any batch, chunk and cache state; limits, ends, failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.errors import Draining, StepFailed
from inference_worker.domain.limits import Limits
from inference_worker.domain.request import FinishReason, Piece, Request, Sampling
from inference_worker.domain.text import Vocabulary
from treadle.contract.deadline import Deadline
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM

MakeEngine = Callable[..., Engine]
Ask = Callable[..., list[Piece]]
Prompt = Callable[..., tuple[int, ...]]
GREEDY = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=3)


def assert_same(left: Sequence[Piece], right: Sequence[Piece]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.token_ids == b.token_ids
        assert a.text == b.text
        assert [entry.logprob for entry in a.logprobs] == pytest.approx([entry.logprob for entry in b.logprobs], abs=1e-4)


def test_a_batch_answers_as_each_request_alone(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    requests = [Request(prompt(length, seed), GREEDY) for seed, length in enumerate((1, 3, 31, 32, 33, 90))]
    alone = [ask(tiny_engine(), request)[0] for request in requests]
    assert_same(ask(tiny_engine(), *requests), alone)


def test_chunked_prefill_answers_as_one_pass(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    requests = [Request(prompt(150, 1), GREEDY), Request(prompt(70, 2), GREEDY)]
    whole = ask(tiny_engine(step_tokens_max=256), *requests)
    assert_same(ask(tiny_engine(step_tokens_max=16), *requests), whole)


def test_a_prefix_cache_hit_answers_as_a_computed_prompt(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine, shared = tiny_engine(), prompt(100)
    first = Request((*shared, 1, 2, 3), GREEDY)
    other = Request((*shared, 9, 8, 7, 6), GREEDY)
    cold = ask(engine, first)
    warm = ask(engine, first)
    branched = ask(engine, other)
    assert_same(warm, cold)
    assert_same(branched, ask(tiny_engine(), other))
    assert [piece.finish.usage.cached_tokens for piece in cold + warm + branched if piece.finish] == [0, 96, 96]
    assert engine.totals.cached_tokens == 192


def test_a_whole_cached_prompt_still_computes_its_last_token(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine, request = tiny_engine(), Request(prompt(64), GREEDY)
    cold = ask(engine, request)
    assert_same(ask(engine, request), cold)
    assert engine.totals.cached_tokens == 32


def test_an_answer_is_the_beginning_of_the_next_prompt(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine, first = tiny_engine(), Request(prompt(60), Sampling(max_tokens=40, ignore_eos=True))
    (answer,) = ask(engine, first)
    following = Request(first.prompt + tuple(answer.token_ids) + (5,), GREEDY)
    (warm,) = ask(engine, following)
    assert warm.finish is not None
    assert warm.finish.usage.cached_tokens == 96
    assert_same([warm], ask(tiny_engine(), following))


def test_another_salt_shares_nothing(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine = tiny_engine()
    ask(engine, Request(prompt(64), GREEDY, cache_salt="one"))
    ask(engine, Request(prompt(64), GREEDY, cache_salt="two"))
    assert engine.totals.cached_tokens == 0


def test_without_room_for_it_there_is_no_prefix_cache(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine = tiny_engine(prefix_cache_bytes_max=0)
    ask(engine, Request(prompt(64), GREEDY))
    ask(engine, Request(prompt(64), GREEDY))
    assert (engine.totals.cached_tokens, engine.load.prefix_cache_bytes) == (0, 0)


def test_the_prefix_cache_stays_within_its_bytes(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine = tiny_engine(prefix_cache_bytes_max=100_000)
    for seed in range(12):
        ask(engine, Request(prompt(130, seed), Sampling(max_tokens=1)))
    assert 0 < engine.load.prefix_cache_bytes <= 100_000


def test_prompt_logprobs_are_those_of_one_forward(tiny_engine: MakeEngine, tiny: CausalLM, ask: Ask, prompt: Prompt) -> None:
    tokens = prompt(150)
    wanted = Sampling(max_tokens=1, prompt_logprobs=True, top_logprobs=2)
    engine = tiny_engine(step_tokens_max=40, sequences_max=2)
    ask(engine, Request(tokens, GREEDY))  # what is cached must not hide the prompt's own log-probabilities
    (piece,) = ask(engine, Request(tokens, wanted))
    kv = tiny.new_kv()
    hidden = tiny.forward(torch.tensor(tokens), torch.arange(150), [0, 150], [kv])
    table = torch.log_softmax(tiny.logits(hidden), dim=-1)
    expected = [float(table[place, token]) for place, token in enumerate(tokens[1:])]
    assert [entry.token_id for entry in piece.prompt_logprobs] == list(tokens[1:])
    assert [entry.logprob for entry in piece.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
    assert all(len(entry.top) == 2 for entry in piece.prompt_logprobs)


def test_a_seed_means_the_same_text_in_any_batch(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    seeded = [
        Request(prompt(20, seed), Sampling(max_tokens=20, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True))
        for seed in range(4)
    ]
    alone = [ask(tiny_engine(), request)[0].token_ids for request in seeded]
    assert [piece.token_ids for piece in ask(tiny_engine(), *seeded)] == alone
    other = Request(seeded[0].prompt, Sampling(max_tokens=20, temperature=1.0, top_p=0.95, seed=99, ignore_eos=True))
    assert ask(tiny_engine(), other)[0].token_ids != alone[0]


def test_a_stop_string_across_token_borders_ends_the_text_before_it(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    free = ask(tiny_engine(), Request(prompt(20, 3), Sampling(max_tokens=30, ignore_eos=True)))[0]
    assert len(free.text) > 12
    stop = free.text[8:11]  # every token is one byte: any stop string of several characters crosses borders
    stopped = ask(tiny_engine(), Request(prompt(20, 3), Sampling(max_tokens=30, ignore_eos=True, stop=(stop,))))[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish is not None
    assert stopped.finish.reason is FinishReason.STOP
    assert len(stopped.token_ids) < len(free.token_ids)


def test_stop_tokens_and_end_of_sequence_end_the_answer_without_their_text(
    tiny_engine: MakeEngine, ask: Ask, prompt: Prompt
) -> None:
    free = ask(tiny_engine(), Request(prompt(20, 3), Sampling(max_tokens=10, ignore_eos=True)))[0]
    token = free.token_ids[4]
    until = free.token_ids.index(token)
    stopped = ask(tiny_engine(), Request(prompt(20, 3), Sampling(max_tokens=10, stop_token_ids=frozenset({token}))))[0]
    engine = tiny_engine()
    engine.chooser.eos_token_ids = frozenset({token})
    ended = ask(engine, Request(prompt(20, 3), Sampling(max_tokens=10)))[0]
    ignored = ask(engine, Request(prompt(20, 3), Sampling(max_tokens=10, ignore_eos=True)))[0]
    for piece in (stopped, ended):
        assert piece.token_ids == free.token_ids[: until + 1]
        assert piece.finish is not None
        assert piece.finish.reason is FinishReason.STOP
        assert free.text.startswith(piece.text)
    assert ignored.token_ids == free.token_ids


def test_an_answer_ends_at_max_tokens_and_at_the_context_limit(tiny_engine: MakeEngine, ask: Ask, prompt: Prompt) -> None:
    engine = tiny_engine(context_tokens_max=40)
    short, full = ask(
        engine, Request(prompt(20), Sampling(max_tokens=5, ignore_eos=True)), Request(prompt(20, 1), Sampling(ignore_eos=True))
    )
    assert [len(short.token_ids), len(full.token_ids)] == [5, 20]
    assert all(piece.finish is not None and piece.finish.reason is FinishReason.LENGTH for piece in (short, full))
    with pytest.raises(InvalidArgument, match="40"):
        engine.submit(Request(prompt(40)), Answer())


def test_the_models_positions_bound_the_context(tiny_engine: MakeEngine) -> None:
    assert tiny_engine(context_tokens_max=5000).context_tokens_max == 256


def test_cancelling_frees_the_place_before_the_next_step(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    engine = tiny_engine(sequences_max=1)
    left, right = Answer(), Answer()
    first = engine.submit(Request(prompt(5), Sampling(max_tokens=100, ignore_eos=True)), left)
    engine.submit(Request(prompt(6), Sampling(max_tokens=2, ignore_eos=True)), right)
    engine.step()
    assert (engine.load.requests_running, engine.load.requests_waiting) == (1, 1)
    engine.cancel(first)
    run_until_done(engine, [right])
    assert not left.done
    assert len(left.piece.token_ids) == 1
    assert len(right.piece.token_ids) == 2
    assert engine.load.requests_running == 0


def test_a_waiting_request_can_be_cancelled(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    engine = tiny_engine(sequences_max=1)
    sequences = [engine.submit(Request(prompt(5), Sampling(max_tokens=100, ignore_eos=True)), Answer()) for _ in range(3)]
    engine.step()
    engine.cancel(sequences[1])
    engine.step()
    assert engine.load.requests_waiting == 1


def test_a_passed_deadline_fails_the_request_before_its_next_step(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    engine, answer = tiny_engine(), Answer()
    deadline = Deadline.after(0.5)  # time enough to be taken in, also on a busy machine
    engine.submit(Request(prompt(5), Sampling(ignore_eos=True), deadline=deadline), answer)
    engine.step()
    time.sleep(max(deadline.remaining_seconds(), 0.0))
    engine.step()
    assert isinstance(answer.error, DeadlineExceeded)
    assert engine.load.requests_running == 0
    with pytest.raises(DeadlineExceeded):
        engine.submit(Request(prompt(5), deadline=Deadline(time.monotonic_ns())), Answer())


def test_a_full_queue_refuses_with_a_time_to_come_back(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    engine = tiny_engine(requests_waiting_max=2)
    for _ in range(2):
        engine.submit(Request(prompt(5)), Answer())
    with pytest.raises(ResourceExhausted) as refused:
        engine.submit(Request(prompt(5)), Answer())
    assert refused.value.retry_after_seconds == 0.5  # three of them, one second each, sixteen at once: the least there is


@pytest.mark.parametrize(("waiting", "seconds"), [(1, 2.0), (9, 10.0), (80, 60.0)])
def test_the_time_to_come_back_grows_with_the_queue(tiny_engine: MakeEngine, prompt: Prompt, waiting: int, seconds: float) -> None:
    engine = tiny_engine(sequences_max=1, requests_waiting_max=waiting)
    for _ in range(waiting):
        engine.submit(Request(prompt(5)), Answer())
    with pytest.raises(ResourceExhausted, match=f"try again in {seconds} s") as refused:
        engine.submit(Request(prompt(5)), Answer())
    assert refused.value.retry_after_seconds == seconds


def test_a_closed_door_refuses_and_lets_the_rest_finish(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    engine, answer = tiny_engine(), Answer()
    engine.submit(Request(prompt(5), Sampling(max_tokens=3, ignore_eos=True)), answer)
    engine.close_door()
    with pytest.raises(Draining):
        engine.submit(Request(prompt(5)), Answer())
    run_until_done(engine, [answer])
    assert len(answer.piece.token_ids) == 3


class Stumbling(CausalLM):
    """A model that raises while `stumbles` is set."""

    stumbles = False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.stumbles:
            raise RuntimeError("out of luck")
        return super().logits(hidden)


def test_an_error_in_a_step_fails_its_requests_and_the_engine_goes_on(
    tiny: CausalLM, tiny_vocabulary: Vocabulary, ask: Ask, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stumbling(tiny.config, tiny.weights)
    engine = Engine(model, tiny_vocabulary, Limits(context_tokens_max=200))
    answers = [Answer(), Answer()]
    for answer in answers:
        engine.submit(Request(prompt(5), GREEDY), answer)
    model.stumbles = True
    report = engine.step()
    assert report is not None
    assert report.failed
    assert all(isinstance(answer.error, StepFailed) for answer in answers)
    assert "out of luck" in caplog.text
    assert engine.load.requests_running == 0
    model.stumbles = False
    assert len(ask(engine, Request(prompt(5), GREEDY))[0].token_ids) == 12


class Cramped(CausalLM):
    """A model without memory for one more KV while `full` is set."""

    full = False

    def new_kv(self, history: Mapping[int, int] | None = None) -> SequenceKV:
        if self.full:
            raise MemoryError("no room")
        return super().new_kv(history)


def test_a_request_that_cannot_begin_fails_alone(tiny: CausalLM, tiny_vocabulary: Vocabulary, prompt: Prompt) -> None:
    model = Cramped(tiny.config, tiny.weights)
    engine = Engine(model, tiny_vocabulary, Limits(context_tokens_max=200))
    lucky, unlucky = Answer(), Answer()
    engine.submit(Request(prompt(5), GREEDY), lucky)
    engine.step()
    model.full = True
    engine.submit(Request(prompt(5), GREEDY), unlucky)
    run_until_done(engine, [lucky, unlucky])
    assert isinstance(unlucky.error, StepFailed)
    assert len(lucky.piece.token_ids) == 12
    assert engine.load.requests_running == 0


def test_reports_count_the_tokens_of_each_step(tiny_engine: MakeEngine, prompt: Prompt) -> None:
    engine, answer = tiny_engine(step_tokens_max=16), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=3, ignore_eos=True)), answer)
    reports = run_until_done(engine, [answer])
    assert [(r.prefill_tokens, r.decode_tokens, r.completion_tokens) for r in reports] == [
        (16, 0, 0),
        (4, 0, 1),
        (0, 1, 1),
        (0, 1, 1),
    ]
    assert engine.totals.steps == 4
    assert engine.totals.step_seconds == pytest.approx(sum(r.seconds for r in reports))
    assert engine.step() is None
