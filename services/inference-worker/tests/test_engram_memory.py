"""Engram memory in the engine: the same answer however rows come, and an honest one where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.engram_step import EngramStep, groups_of, windows_of
from inference_worker.domain.errors import MemoryMissing, StepFailed
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.ports import LayerFigures, Prefetcher, RowHandle, StepRows
from inference_worker.domain.request import Piece, Request, Sampling
from inference_worker.domain.scheduler import Slot
from inference_worker.domain.sequence import Sequence
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.client.engram import EngramHandle, GroupRows, StepPrefetcher, fake_handle
from treadle.client.engram.sources import FakeSource
from treadle.client.engram.ticket import LayerTicket
from treadle.contract import (
    Deadline,
    EngramModel,
    Family,
    FingerprintMismatch,
    Fusion,
    InvalidArgument,
    Late,
    RowLayout,
    RowOutOfRange,
    TreadleError,
    Unavailable,
    WaitPolicy,
    Windows,
)
from treadle.contract.families import demo_model, qwen_ple_model
from treadle.contract.fusion_mode import FusionMode
from treadle.dataplane import DeadlineQueue
from treadle.nn.kv import SequenceKV
from treadle.nn.memory_fit import check_fits, fusion_of, is_fused
from treadle.nn.model import CausalLM
from treadle.nn.token_map import token_map_digest

Ask = Callable[..., list[Piece]]
Prompt = Callable[..., tuple[int, ...]]
MakeEngine = Callable[..., Engine]
TinyEngram = tuple[EngramModel, NDArray[np.int32], dict[int, NDArray[np.uint8]]]
GREEDY = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=0)
BRIEF = WaitPolicy(0.0, Late.MASK)
DEMO_FORM = Fusion("demo")


@pytest.fixture
def memories(tiny: CausalLM, tiny_engram: TinyEngram) -> Iterator[Callable[..., EngramMemory]]:
    """Makes memories of the tiny Engram model on a fake handle."""
    with ExitStack() as stack:

        def make(*, fused: bool = True, delay_seconds: float = 0.0) -> EngramMemory:
            model, token_map, tables = tiny_engram
            handle = stack.enter_context(fake_handle(model, token_map, tables, delay_seconds))
            return EngramMemory(handle, fusion_of(model, tiny.config.hidden, None), fused=fused)

        yield make


def logprobs_of(pieces: list[Piece]) -> list[float]:
    return [entry.logprob for piece in pieces for entry in piece.logprobs]


def test_fusion_changes_the_answer_and_shadowing_does_not(
    engines: MakeEngine, memories: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    request = Request(prompt(50), GREEDY)
    plain, shadowed, fused = (ask(engines(memory), request) for memory in (None, memories(fused=False), memories(fused=True)))
    assert logprobs_of(plain) == logprobs_of(shadowed)
    assert logprobs_of(plain) != logprobs_of(fused)
    for (piece,), is_shadow in ((shadowed, True), (fused, False)):
        assert piece.finish is not None
        (report,) = piece.finish.memory
        assert (report.kind, report.name, report.transport, report.shadowed) == ("engram", "tiny", "fake", is_shadow)
        assert (report.tickets, report.rows_missing) == (2 * 12, 0)  # two layers, one prefill and eleven decodes
        assert not piece.degraded


def test_prefetching_changes_no_bit(engines: MakeEngine, memories: Callable[..., EngramMemory], ask: Ask, prompt: Prompt) -> None:
    requests = [Request(prompt(length, length), GREEDY) for length in (3, 40, 90)]
    with_, without = (ask(engines(memories(), prefetch=prefetch), *requests) for prefetch in (True, False))
    assert logprobs_of(with_) == logprobs_of(without)
    assert [piece.token_ids for piece in with_] == [piece.token_ids for piece in without]


def test_batching_chunking_and_cache_hits_change_no_token(
    engines: MakeEngine, memories: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    shared = prompt(70)
    requests = [Request((*shared, *prompt(length, length)), GREEDY) for length in (1, 20, 60)]
    alone = [piece for request in requests for piece in ask(engines(memories()), request)]
    together = ask(engines(memories()), *requests)
    chunked = ask(engines(memories(), step_tokens_max=16), *requests)
    warmed = engines(memories())
    ask(warmed, Request(shared, GREEDY))
    warm = ask(warmed, *requests)
    assert all(piece.finish is not None and piece.finish.usage.cached_tokens == 64 for piece in warm)
    for other in (together, chunked, warm):
        assert [piece.token_ids for piece in other] == [piece.token_ids for piece in alone]
        assert logprobs_of(other) == pytest.approx(logprobs_of(alone), abs=1e-4)


def test_a_look_back_holds_the_real_ids_of_chunks_and_cached_tokens() -> None:
    class NoSink:
        def deliver(self, piece: Piece) -> None: ...
        def fail(self, error: Exception) -> None: ...

    def running(tokens: list[int]) -> Sequence:
        return Sequence(Request(tuple(tokens)), NoSink(), TextStream(Vocabulary(())), tokens, 100)

    slots = [Slot(running([11, 12, 13, 14, 15]), 3, 2), Slot(running([21, 22, 23]), 0, 2), Slot(running([31, 32]), 1, 1)]
    windows = windows_of(slots, 2)
    assert windows.tokens.tolist() == [14, 15, 21, 22, 32]
    assert windows.starts.tolist() == [0, 2, 4, 5]
    assert windows.lookback.tolist() == [[13, 12], [-1, -1], [31, -1]]


def test_late_rows_make_a_degraded_answer_that_says_so_and_is_shared_with_nobody(
    engines: MakeEngine, memories: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    engine = engines(memories(delay_seconds=5.0))
    request = Request(prompt(70), Sampling(max_tokens=2, ignore_eos=True), policy=BRIEF)
    (piece,) = ask(engine, request)
    assert piece.degraded
    assert piece.finish is not None
    (report,) = piece.finish.memory
    assert report.missing_because == "late"
    assert report.rows_missing == 2 * 4 * 71  # two layers, four rows a token, 70 tokens of prompt and the first of the answer
    assert report.tickets_in_time == 0
    assert engine.load.prefix_cache_bytes == 0
    ask(engine, request)
    assert engine.totals.cached_tokens == 0


def test_a_request_that_would_rather_fail_fails_and_its_neighbour_goes_on(
    engines: MakeEngine, memories: Callable[..., EngramMemory], prompt: Prompt
) -> None:
    engine = engines(memories(delay_seconds=5.0))
    proud, humble = Answer(), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=2), policy=WaitPolicy(0.0, Late.FAIL)), proud)
    engine.submit(Request(prompt(20, 1), Sampling(max_tokens=2, ignore_eos=True), policy=BRIEF), humble)
    run_until_done(engine, [proud, humble])
    assert isinstance(proud.error, MemoryMissing)
    assert humble.piece.degraded
    assert len(humble.piece.token_ids) == 2


def test_a_step_waits_as_long_as_its_most_patient_request_within_the_ceiling(
    engines: MakeEngine, memories: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    engine = engines(memories(delay_seconds=0.03))
    patient = Request(prompt(20), Sampling(max_tokens=1), policy=WaitPolicy(5.0, Late.FAIL))
    pieces = ask(engine, patient, Request(prompt(20, 1), Sampling(max_tokens=1), policy=BRIEF))
    assert not any(piece.degraded for piece in pieces)


def test_the_most_patient_request_holds_the_others_no_longer_than_the_ceiling(
    engines: MakeEngine, memories: Callable[..., EngramMemory], prompt: Prompt
) -> None:
    engine = engines(memories(delay_seconds=20.0), wait_seconds_max=0.05)
    patient, brief = Answer(), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=1), policy=WaitPolicy(30.0, Late.FAIL)), patient)
    engine.submit(Request(prompt(20, 1), Sampling(max_tokens=1), policy=BRIEF), brief)
    (report,) = run_until_done(engine, [patient, brief])
    assert all(0.05 <= ticket.stall_seconds < 5.0 for ticket in report.layers)
    assert brief.piece.degraded
    waited = f"{report.layers[0].stall_seconds:.3g}"
    assert str(patient.error) == (
        f"engram layer 1: 80 rows missing after a wait of {waited} s; try again, or ask for late = mask to go on without them"
    )


def test_no_layer_waits_past_the_deadlines_of_all_its_requests(
    engines: MakeEngine, memories: Callable[..., EngramMemory], prompt: Prompt
) -> None:
    engine = engines(memories(delay_seconds=60.0), wait_seconds_max=30.0)
    answers = [Answer(), Answer()]
    for number, answer in enumerate(answers):
        deadline = Deadline.after(0.5 + number / 2)
        engine.submit(Request(prompt(20, number), Sampling(max_tokens=1), policy=WaitPolicy(30.0), deadline=deadline), answer)
    report = engine.step()
    assert report is not None
    assert sum(ticket.stall_seconds for ticket in report.layers) < 5.0


def test_a_request_about_to_expire_does_not_end_the_wait_of_the_others(
    engines: MakeEngine, memories: Callable[..., EngramMemory], prompt: Prompt
) -> None:
    engine = engines(memories(delay_seconds=0.5), wait_seconds_max=30.0)
    hasty, patient = Answer(), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=1), policy=WaitPolicy(30.0), deadline=Deadline.after(0.1)), hasty)
    engine.submit(Request(prompt(20, 1), Sampling(max_tokens=1), policy=WaitPolicy(30.0)), patient)
    engine.step()
    assert patient.done
    assert not patient.piece.degraded


def test_a_cancelled_request_makes_nobody_wait(
    engines: MakeEngine, memories: Callable[..., EngramMemory], tiny: CausalLM, prompt: Prompt
) -> None:
    memory = memories(delay_seconds=60.0)
    engine = engines(memory)
    left = engine.submit(Request(prompt(4), policy=WaitPolicy(30.0)), Answer())
    here = engine.submit(Request(prompt(4), policy=BRIEF), Answer())
    step = EngramStep(StepPrefetcher(), groups_of([Slot(left, 0, 4), Slot(here, 0, 4)]), 8, 30.0)
    left.cancelled = True
    left.kv, here.kv = (SequenceKV(tiny.config, history=memory.history_widths) for _ in range(2))
    step.before_layer(1, torch.zeros(8, tiny.config.hidden))
    step.finish()
    assert step.reports[0].stall_seconds < 5.0


@pytest.mark.parametrize("wrong", [-1.0, 31.0])
def test_a_ceiling_that_is_no_wait_is_refused(wrong: float, engines: MakeEngine) -> None:
    with pytest.raises(InvalidArgument, match="wait_seconds_max"):
        engines(wait_seconds_max=wrong)


def test_an_engine_that_cannot_look_up_takes_no_memory(
    tiny: CausalLM, tiny_vocabulary: Vocabulary, memories: Callable[..., EngramMemory], prompt: Prompt
) -> None:
    with pytest.raises(InvalidArgument, match="prefetcher"):
        Engine(tiny, tiny_vocabulary, Limits(context_tokens_max=200), memories())
    engine = Engine(tiny, tiny_vocabulary, Limits(context_tokens_max=200))
    with pytest.raises(InvalidArgument, match="prefetcher"):
        engine.submit(Request(prompt(4)), Answer(), Lease(memories()))


class DeadPool:
    """A prefetcher whose pool is gone."""

    def begin_groups(self, groups: SequenceOf[tuple[Any, Windows]], token_count: int) -> StepRows:
        return self

    def group_rows(self, layer: int, policies: SequenceOf[WaitPolicy]) -> list[GroupRows]:
        return [GroupRows(group, None, Unavailable("no pool")) for group in range(len(policies))]

    def finish(self) -> None:
        """Nothing was started."""

    def hint(self, handle: Any, windows: Windows) -> int:
        return 0

    def figures(self, handle: Any) -> Mapping[int, LayerFigures]:
        return {}

    def layer_figures(self) -> Mapping[int, LayerFigures]:
        return {}


def test_a_pool_that_is_gone_degrades_and_does_not_fail_the_step(
    engines: MakeEngine, memories: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    memory = memories()
    (piece,) = ask(engines(memory, prefetcher=DeadPool()), Request(prompt(20), Sampling(max_tokens=3, ignore_eos=True)))
    assert piece.degraded
    assert len(piece.token_ids) == 3
    engine, proud = engines(memory, prefetcher=DeadPool()), Answer()
    engine.submit(Request(prompt(20), policy=WaitPolicy(0.1, Late.FAIL)), proud)
    (report,) = run_until_done(engine, [proud])
    assert [(ticket.transport, ticket.gather_outcome, ticket.rows) for ticket in report.layers] == [("fake", "failed", 0)] * 2
    assert isinstance(proud.error, MemoryMissing)
    assert "layer 1: 80 rows missing (no pool)" in str(proud.error)


class EndingSource(FakeSource):
    """A source whose lookups begin, and end with an error."""

    def __init__(self, tiny_engram: TinyEngram, error: TreadleError) -> None:
        model, token_map, tables = tiny_engram
        super().__init__(model, tables, token_map, 0.0)
        self._error = error

    def submit(
        self, windows: Windows, outs: Mapping[int, Any], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        return {
            layer: EndingTicket(ticket, self._error) for layer, ticket in super().submit(windows, outs, deadlines, queue).items()
        }


class EndingTicket:
    """A ticket of which nothing came."""

    def __init__(self, ticket: LayerTicket, error: TreadleError) -> None:
        self._ticket, self._error, self.deadline, self.submitted_ns = ticket, error, ticket.deadline, ticket.submitted_ns
        self.started_ns, self.finished_ns, self.done = ticket.submitted_ns, 0, False

    def wait(self, seconds: float) -> bool:
        raise self._error

    def cancel(self) -> NDArray[np.bool_]:
        return np.zeros_like(self._ticket.cancel())

    def fileno(self) -> int:
        return self._ticket.fileno()

    def close(self) -> None:
        self._ticket.close()


@pytest.fixture
def ending(tiny: CausalLM, tiny_engram: TinyEngram) -> Callable[[TreadleError], EngramMemory]:
    """Makes memories whose lookups begin, and end with an error."""

    def make(error: TreadleError) -> EngramMemory:
        model = tiny_engram[0]
        handle = EngramHandle(model, model.version, EndingSource(tiny_engram, error))
        return EngramMemory(handle, fusion_of(model, tiny.config.hidden, None), fused=True)

    return make


def test_a_lookup_that_ends_with_an_error_is_told_as_such_and_not_as_slow(
    engines: MakeEngine, ending: Callable[[TreadleError], EngramMemory], prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    memory = ending(Unavailable("the pool is gone"))
    engine, proud, humble = engines(memory), Answer(), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=4), policy=WaitPolicy(0.1, Late.FAIL)), proud)
    engine.submit(Request(prompt(20, 1), Sampling(max_tokens=4, ignore_eos=True), policy=WaitPolicy(0.1)), humble)
    reports = run_until_done(engine, [proud, humble])
    assert isinstance(proud.error, MemoryMissing)
    assert "80 rows missing (the pool is gone)" in str(proud.error)
    assert humble.piece.degraded
    assert {ticket.gather_outcome for report in reports for ticket in report.layers} == {"failed"}
    told = [record for record in caplog.records if "engram rows" in record.message]
    assert [(record.__dict__["model"], record.__dict__["reason"]) for record in told] == [
        ("tiny", "the pool is gone")
    ]  # of 8 tickets


def test_a_lookup_that_began_and_met_a_bug_fails_its_step_and_is_not_masked(
    engines: MakeEngine, ending: Callable[[TreadleError], EngramMemory], prompt: Prompt
) -> None:
    engine, answer = engines(ending(RowOutOfRange("row 999"))), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=2, ignore_eos=True)), answer)
    run_until_done(engine, [answer])
    assert isinstance(answer.error, StepFailed)


def test_reports_and_figures_tell_each_layers_tickets(
    engines: MakeEngine, memories: Callable[..., EngramMemory], prompt: Prompt
) -> None:
    memory = memories()
    engine, answer = engines(memory), Answer()
    engine.submit(Request(prompt(20), Sampling(max_tokens=3, ignore_eos=True)), answer)
    reports = run_until_done(engine, [answer])
    assert [[ticket.layer for ticket in report.layers] for report in reports] == [[1, 2]] * 3
    assert engine.prefetcher is not None
    figures = engine.prefetcher.figures(memory.handle)
    assert memory.tokens == 22
    assert [figures[layer].tickets for layer in (1, 2)] == [3, 3]
    assert figures[1].row_bytes == 22 * 4 * 32  # 22 tokens ran, four rows of 32 bytes each


def test_an_engram_model_for_another_language_model_is_refused_by_field(tiny: CausalLM, tiny_engram: TinyEngram) -> None:
    model, token_map, _ = tiny_engram
    own = token_map_digest(token_map)
    check_fits(model, tiny.config.layers, tiny.config.vocab, lambda: own)

    def other(layers: tuple[int, ...] = (1,), digest: str = own, form: Fusion | None = DEMO_FORM) -> EngramModel:
        return demo_model(
            "other", layers=layers, token_map=digest, compressed_vocab_size=300, pad_id=2, prime_base=101, fusion=form,
            row=RowLayout(32, 16, "bf16"),
        )  # fmt: skip

    ple = replace(qwen_ple_model("ple", layers=(1,), row=RowLayout(32, 16, "bf16")), fusion=Fusion("demo"))
    assert ple.family is Family.QWEN_PLE
    wrong = {"token_map": other(digest="0" * 64), "layers": other(layers=(1, 9)), "fusion": other(form=None), "eos_id": ple}
    for field, refused in wrong.items():
        with pytest.raises(FingerprintMismatch) as error:
            check_fits(refused, tiny.config.layers, tiny.config.vocab, lambda: own)
        assert error.value.field == field


def test_fusion_weights_come_from_the_file_that_the_manifest_names(tiny: CausalLM, tiny_engram: TinyEngram, tmp_path: Path) -> None:
    model, _, _ = tiny_engram
    path = tmp_path / "fusion.safetensors"
    named = replace(model, fusion=Fusion("demo", fusion_of(model, tiny.config.hidden, None).save(path)))
    for weights in (path, path.read_bytes()):
        assert fusion_of(named, tiny.config.hidden, weights).history_widths == {1: 32, 2: 32}
    with pytest.raises(InvalidArgument, match="engram_fusion_weights"):
        fusion_of(named, tiny.config.hidden, None)
    with pytest.raises(FingerprintMismatch):
        fusion_of(replace(named, fusion=Fusion("demo", "0" * 64)), tiny.config.hidden, path)
    with pytest.raises(InvalidArgument):
        fusion_of(replace(model, fusion=None), tiny.config.hidden, None)


def test_the_sdks_prefetcher_fits_the_engines_port(tiny_engram: TinyEngram) -> None:
    model, token_map, tables = tiny_engram
    with fake_handle(model, token_map, tables) as handle:
        fits: Prefetcher = StepPrefetcher()  # what mypy checks here is the test
        opened: RowHandle = handle
        assert set(fits.figures(opened)) == {1, 2}


@pytest.mark.parametrize(
    ("mode", "with_weights", "with_none"), [("auto", True, False), ("on", True, True), ("shadow", False, False)]
)
def test_rows_are_added_where_their_fusion_was_trained_unless_told_otherwise(
    mode: str, with_weights: bool, with_none: bool, tiny_engram: TinyEngram
) -> None:
    model = tiny_engram[0]
    assert is_fused(replace(model, fusion=Fusion("demo", "0" * 64)), FusionMode(mode)) is with_weights
    assert is_fused(model, FusionMode(mode)) is with_none
