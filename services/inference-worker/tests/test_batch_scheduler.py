"""Who runs in a step: limits, order, chunks. No model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_worker.domain.limits import Limits
from inference_worker.domain.request import PRIORITY_MAX, PRIORITY_STEP_SECONDS, Piece, Request, Sampling
from inference_worker.domain.scheduler import Scheduler, Slot
from inference_worker.domain.sequence import Sequence
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.contract.errors import InvalidArgument, ResourceExhausted

LIMITS = Limits(sequences_max=3, step_tokens_max=8, requests_waiting_max=4, context_tokens_max=32, kv_tokens_max=64)


class NoSink:
    def deliver(self, piece: Piece) -> None:
        raise AssertionError("nothing to deliver here")

    def fail(self, error: Exception) -> None:
        raise AssertionError("nothing to fail here")


def sequence(prompt: int, answer: int = 4, priority: int = 0, came_seconds: float = 0.0) -> Sequence:
    request = Request(tuple(range(prompt)), Sampling(max_tokens=answer), priority=priority)
    return Sequence(
        request, NoSink(), TextStream(Vocabulary(())), list(request.prompt), request.tokens_max(LIMITS.context_tokens_max),
        started_ns=int(came_seconds * 1e9),
    )  # fmt: skip


def run(scheduler: Scheduler) -> list[Slot]:
    """Plan a step and act as if it had been computed."""
    scheduler.join()
    slots = scheduler.plan()
    for slot in slots:
        slot.sequence.computed += slot.count
        assert slot.completes == (slot.sequence.to_run == 0)
        if slot.completes:
            slot.sequence.tokens.append(7)
    return slots


def test_a_long_prompt_runs_in_chunks_of_the_token_budget() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.enqueue(sequence(20), 1.0)
    steps = [run(scheduler) for _ in range(4)]
    assert [[slot.count for slot in step] for step in steps] == [[8], [8], [4], [1]]
    assert [step[0].prompt_tokens for step in steps] == [8, 8, 4, 0]


def test_decoding_sequences_keep_their_token_while_a_prompt_is_computed() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.enqueue(sequence(2), 1.0)
    run(scheduler)
    scheduler.enqueue(sequence(20), 1.0)
    assert [slot.count for slot in run(scheduler)] == [1, 7]
    assert [slot.count for slot in run(scheduler)] == [1, 7]


def test_a_step_never_has_more_tokens_or_sequences_than_the_limits() -> None:
    scheduler = Scheduler(LIMITS)
    for prompt in (5, 9, 3, 2):
        scheduler.enqueue(sequence(prompt), 1.0)
    for _ in range(6):
        slots = run(scheduler)
        assert sum(slot.count for slot in slots) <= LIMITS.step_tokens_max
        assert len(scheduler.running) <= LIMITS.sequences_max
    assert len(scheduler.waiting) == 1


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    scheduler = Scheduler(LIMITS)
    for _ in range(LIMITS.requests_waiting_max):
        scheduler.enqueue(sequence(2), 1.0)
    with pytest.raises(ResourceExhausted, match="requests_waiting_max") as refused:
        scheduler.enqueue(sequence(2), 2.5)
    assert refused.value.retry_after_seconds == 2.5


def test_kv_room_is_reserved_to_the_last_token_and_freed_at_the_end() -> None:
    scheduler = Scheduler(LIMITS)
    for _ in range(3):
        scheduler.enqueue(sequence(2, answer=28), 1.0)
    run(scheduler)
    assert len(scheduler.running) == 2  # 30 + 30 of 64 tokens
    first = scheduler.running[0]
    assert scheduler.take_out(lambda each: each is first) == [first]
    run(scheduler)
    assert len(scheduler.running) == 2
    assert not scheduler.waiting


def test_unwanted_sequences_leave_queue_and_batch() -> None:
    scheduler = Scheduler(LIMITS)
    sequences = [sequence(2) for _ in range(4)]
    for each in sequences:
        scheduler.enqueue(each, 1.0)
    run(scheduler)
    sequences[0].cancelled = sequences[3].cancelled = True
    assert scheduler.take_out(lambda each: each.cancelled) == [sequences[0], sequences[3]]
    assert scheduler.running == sequences[1:3]
    assert not scheduler.waiting


def test_a_prefix_that_is_cached_is_not_planned_again() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.enqueue(sequence(20), 1.0)
    scheduler.join()[0].computed = 16  # the engine found that much
    assert [(slot.first, slot.count) for slot in scheduler.plan()] == [(16, 4)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("sequences_max", 0), ("step_tokens_max", 2), ("context_tokens_max", 1), ("kv_tokens_max", 8), ("prefix_cache_bytes_max", -1)],
)
def test_limits_that_do_not_fit_together_are_refused_by_name(field: str, value: int) -> None:
    good = {name: getattr(LIMITS, name) for name in Limits.__dataclass_fields__}
    with pytest.raises(InvalidArgument, match=field):
        Limits(**good | {field: value})


def test_of_those_that_wait_the_highest_priority_begins_first_and_among_equals_who_came_first() -> None:
    scheduler = Scheduler(replace(LIMITS, sequences_max=1, requests_waiting_max=8))
    names: dict[Sequence, str] = {}
    for name, priority in (("n1", 0), ("l1", -50), ("h1", 50), ("n2", 0), ("h2", 50), ("l2", -50)):
        entered = sequence(1, priority=priority)
        names[entered] = name
        scheduler.enqueue(entered, 1.0)
    order = []
    while joined := scheduler.join():
        order += [names[each] for each in joined]
        scheduler.take_out(lambda each, done=joined: each in done)  # type: ignore[misc]
    assert order == ["h1", "h2", "n1", "n2", "l1", "l2"]


def test_nobody_is_overtaken_for_ever_by_higher_priorities_that_keep_coming() -> None:
    scheduler = Scheduler(replace(LIMITS, sequences_max=1))
    low = sequence(1, priority=-PRIORITY_MAX)
    scheduler.enqueue(low, 1.0)
    for second in range(60):  # one highest comes for each place that is free
        scheduler.enqueue(sequence(1, priority=PRIORITY_MAX, came_seconds=float(second)), 1.0)
        joined = scheduler.join()
        scheduler.take_out(lambda each, done=joined: each in done)  # type: ignore[misc]
        if low in joined:
            break
    assert second == 2 * PRIORITY_MAX * PRIORITY_STEP_SECONDS


def test_a_request_that_runs_gives_its_place_to_no_priority() -> None:
    scheduler = Scheduler(replace(LIMITS, sequences_max=1))
    running, urgent = sequence(1), sequence(1, priority=100)
    scheduler.enqueue(running, 1.0)
    assert scheduler.join() == [running]
    scheduler.enqueue(urgent, 1.0)
    assert scheduler.join() == []
