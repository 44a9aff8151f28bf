"""Who is admitted to a queue, what a refusal says, hints and the order of first come, first served; native and Python threads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, ResourceExhausted
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, Tenants, Ticket, Tier
from treadle.dataplane.admission import NO_DEADLINE, RESERVES_MAX, Bandwidth, Costs, Reason, Verdict, Work, judge
from treadle.dataplane.extension import native_module
from treadle.dataplane.fallback_admission import PROBE_NS, WAKE_NS, Admission, QueueOptions, Size

if TYPE_CHECKING:
    from tests.waiting import wait_for
else:
    from waiting import wait_for

SECONDS = 20.0  # no wait here comes near it unless something is broken
TRIES = 50  # for what must be caught while a long ticket runs
TABLE = np.random.default_rng(3).integers(0, 256, (20_000, 320), dtype=np.uint8)
LONG_ROWS = np.random.default_rng(5).integers(0, len(TABLE), 1 << 17)
LONG_OUT, OTHER_OUT = (np.full((LONG_ROWS.size, TABLE.shape[1]), 1, np.uint8) for _ in range(2))  # no page is entered by a gather

MakeQueue = Callable[..., DeadlineQueue]
needs_native = pytest.mark.skipif(
    IMPLEMENTATION != "native", reason="the native extension was not built: pip install needs a C++20 compiler"
)


def submit(queue: DeadlineQueue, deadline: Deadline, count: int = 100) -> Ticket:
    rows = np.arange(count, dtype=np.int64)
    return queue.submit_gather(TABLE, rows, np.zeros((count, TABLE.shape[1]), np.uint8), deadline)


def start_long(queue: DeadlineQueue, deadline: Deadline) -> Ticket:
    ticket = queue.submit_gather(TABLE, LONG_ROWS, LONG_OUT, deadline)
    wait_for(lambda: ticket.started_ns > 0)
    return ticket


def test_what_cannot_be_done_in_time_is_refused_at_once_with_the_predicted_finish(make_queue: MakeQueue) -> None:
    queue = make_queue(admission=True)  # at the costs it begins with: one piece that lost its core would make all rows dear
    out = np.full((LONG_ROWS.size, TABLE.shape[1]), 0xA5, np.uint8)
    with pytest.raises(DeadlineExceeded, match="refused at once") as refused:
        queue.submit_gather(TABLE, LONG_ROWS, out, Deadline.after(0.000_05))
    assert refused.value.predicted_finish_seconds is not None
    assert 0.000_05 < refused.value.predicted_finish_seconds < SECONDS
    assert (out == 0xA5).all()
    assert queue.tenants.figures(0).refused["late"] == 1


def test_a_ticket_that_fits_is_admitted_and_says_when_it_should_be_done(make_queue: MakeQueue) -> None:
    queue = make_queue(admission=True)
    ticket = submit(queue, Deadline.after(1.0))
    assert ticket.wait(SECONDS)
    assert ticket.submitted_ns < ticket.predicted_ns < ticket.submitted_ns + 1_000_000_000
    assert 0 < ticket.busy_ns <= ticket.finished_ns - ticket.started_ns


def test_nobody_is_admitted_who_would_make_an_admitted_ticket_late(make_queue: MakeQueue) -> None:
    queue = make_queue(admission=True)
    total = queue.reserve("kv", 0, 1.0).left_bytes_per_second
    left = queue.reserve("kv", int(total * 0.89), SECONDS).left_bytes_per_second  # so slow that a busy machine is in time
    whole_seconds = LONG_OUT.nbytes / left
    finish: float | None = None
    for _ in range(TRIES):
        long = start_long(queue, Deadline.after(1.6 * whole_seconds))
        try:  # before the long one it would be done in time, but the long one, which was admitted, would not
            another = queue.submit_gather(TABLE, LONG_ROWS, OTHER_OUT, Deadline.after(1.5 * whole_seconds))
        except DeadlineExceeded as error:
            finish = error.predicted_finish_seconds
            break
        another.cancel()
        long.cancel()
    assert finish is not None
    assert finish > 1.5 * whole_seconds, "behind the one that it would have made late"
    assert long.wait(SECONDS)


def test_a_queue_without_admission_takes_what_will_be_late(make_queue: MakeQueue) -> None:
    queue = make_queue()
    ticket = submit(queue, Deadline(1))
    assert ticket.wait(SECONDS)
    assert ticket.predicted_ns == 0
    figures = queue.tenants.figures(0)
    assert (figures.admitted, figures.late, figures.rows["memory"], figures.row_bytes["memory"]) == (1, 1, 100, 32_000)
    assert sum(figures.slack) == 1


def test_a_hint_runs_only_while_nothing_with_a_deadline_waits(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=64)
    total = queue.reserve("kv", 0, 1.0).left_bytes_per_second
    queue.reserve("kv", int(total * 0.89), SECONDS)  # so slow that a busy machine is in time
    hints = []
    for _ in range(TRIES):
        long = start_long(queue, Deadline(0))
        hint, timed = submit(queue, Deadline.never()), submit(queue, Deadline.after(1.0))
        hints.append(hint)
        if not long.done:
            break
        assert hint.wait(SECONDS)
        assert timed.wait(SECONDS)
    else:
        raise AssertionError("the long ticket was always over")
    assert hint.wait(SECONDS)
    assert long.done
    assert timed.done
    assert hint.started_ns >= timed.started_ns
    assert sum(queue.tenants.figures(0).slack) == queue.stats()["tickets_total"] - len(hints), "a hint has no slack"


def test_hints_are_bounded_in_number(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=64, hints_max=2)
    for _ in range(TRIES):
        long = start_long(queue, Deadline(0))
        hints = [submit(queue, Deadline.never()) for _ in range(2)]
        try:
            hints.append(submit(queue, Deadline.never()))
        except ResourceExhausted as error:
            refused = error
            break
        assert all(hint.wait(SECONDS) for hint in hints)
        assert long.wait(SECONDS)
    else:
        raise AssertionError("never refused")
    assert "hints_max" in str(refused)
    assert refused.retry_after_seconds
    assert submit(queue, Deadline.after(1.0)).wait(SECONDS)
    assert all(hint.wait(SECONDS) for hint in hints)
    assert queue.tenants.figures(0).refused["hints"] == 1


def test_first_come_first_served_minds_no_deadline(make_queue: MakeQueue) -> None:
    queue = make_queue(order="fifo", piece_rows=64)
    for _ in range(TRIES):
        long = start_long(queue, Deadline.after(5.0))
        later, earlier = submit(queue, Deadline.after(2.0)), submit(queue, Deadline.after(1.0))
        if not long.done:
            break
    else:
        raise AssertionError("the long ticket was always over")
    assert earlier.wait(SECONDS)
    assert later.started_ns <= earlier.started_ns
    assert long.finished_ns <= earlier.started_ns
    with pytest.raises(InvalidArgument, match="fifo"):
        make_queue(order="fifo", admission=True)


def test_pieces_are_bounded_in_time_too(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1 << 16, piece_seconds=20e-6)
    first = queue.submit_gather(TABLE, LONG_ROWS, LONG_OUT, Deadline(0))
    assert first.wait(SECONDS)
    before = queue.stats()["pieces_total"]
    assert queue.submit_gather(TABLE, LONG_ROWS, LONG_OUT, Deadline(0)).wait(SECONDS)
    assert queue.stats()["pieces_total"] - before > 2 * (LONG_ROWS.size >> 16)


def test_predictions_are_held_against_what_happened(make_queue: MakeQueue) -> None:
    queue = make_queue(admission=True)
    for _ in range(20):
        assert submit(queue, Deadline.after(SECONDS), 1000).wait(SECONDS)
    stats = queue.stats()
    assert sum(stats["prediction_errors"]) == 20
    assert stats["prediction_error_sum"] > 0


def test_a_reserve_slows_rows_to_what_is_left_and_ends_by_itself(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=256)
    with pytest.raises(ResourceExhausted, match="leaves rows too little"):
        queue.reserve("kv", 1 << 60, 1.0)
    nothing = queue.reserve("kv", 0, 1.0)
    assert nothing.reserved_bytes_per_second == 0
    total = nothing.left_bytes_per_second
    reserved = queue.reserve("kv", int(total * 0.89), SECONDS)
    assert reserved.left_bytes_per_second == total - int(total * 0.89)
    ticket = queue.submit_gather(TABLE, LONG_ROWS, LONG_OUT, Deadline(0))
    assert ticket.wait(SECONDS)
    seconds = (ticket.finished_ns - ticket.started_ns) / 1e9
    assert LONG_OUT.nbytes / seconds <= 1.1 * reserved.left_bytes_per_second
    queue.reserve("kv", int(total * 0.5), 0.01)
    wait_for(lambda: queue.reserved().reserved_bytes_per_second == 0)


def test_memory_is_measured_anew_while_nothing_is_reserved_and_the_best_of_the_last_few_counts(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, speeds = make_queue(), iter([3_000, 8_000, 4_000, 4_000, 4_000, 4_000])
    monkeypatch.setattr("treadle.dataplane.queue.MEASURE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr("treadle.dataplane.queue.rule.measure_copy_bandwidth", lambda: next(speeds))
    monkeypatch.setattr(
        "treadle.dataplane.queue.native_module", lambda: SimpleNamespace(measure_copy_bandwidth=lambda _: next(speeds))
    )
    assert queue.reserve("kv", 1000, SECONDS).left_bytes_per_second == 2000
    assert queue.reserve("kv", 2000, SECONDS).left_bytes_per_second == 1000, "one stands: it keeps the figure it was granted of"
    queue.reserve("kv", 0, SECONDS)
    left = [queue.reserve("kv", 0, SECONDS).left_bytes_per_second for _ in range(5)]
    assert left == [8_000, 8_000, 8_000, 8_000, 4_000]


def test_a_reserve_is_not_measured_for_again_and_again(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue()
    total = queue.reserve("kv", 0, 1.0).left_bytes_per_second
    monkeypatch.setattr("treadle.dataplane.queue.MEASURE_EVERY_SECONDS", 3600.0)
    assert {queue.reserve("kv", 0, 1.0).left_bytes_per_second for _ in range(20)} == {total}


def test_too_many_names_are_refused_in_words_of_their_own(make_queue: MakeQueue) -> None:
    queue = make_queue()
    for number in range(RESERVES_MAX):
        queue.reserve(f"kv{number}", 1, SECONDS)
    with pytest.raises(ResourceExhausted, match=f"{RESERVES_MAX} names reserve already") as refused:
        queue.reserve("one more", 1, SECONDS)
    assert "too little" not in str(refused.value)
    with pytest.raises(ResourceExhausted, match="leaves rows too little") as refused:
        queue.reserve("one more", 1 << 60, SECONDS)
    assert "names" not in str(refused.value)


def test_who_gathers_beside_the_queue_is_told_how_long_to_wait(make_queue: MakeQueue) -> None:
    queue = make_queue()
    assert queue.pace_seconds(1 << 30) == 0, "nothing is reserved"
    total = queue.reserve("kv", 0, 1.0).left_bytes_per_second
    left = queue.reserve("kv", total // 2, SECONDS).left_bytes_per_second
    queue.pace_seconds(left)
    assert queue.pace_seconds(1) == pytest.approx(1.0, abs=0.3)


def test_admission_reckons_with_a_reserve(make_queue: MakeQueue) -> None:
    queue = make_queue(admission=True)
    total = queue.reserve("kv", 0, 1.0).left_bytes_per_second
    left = queue.reserve("kv", int(total * 0.89), SECONDS).left_bytes_per_second
    least_seconds = LONG_OUT.nbytes / left
    with pytest.raises(DeadlineExceeded):
        queue.submit_gather(TABLE, LONG_ROWS, LONG_OUT, Deadline.after(0.5 * least_seconds))


@pytest.mark.parametrize(
    ("name", "rate", "seconds"), [("", 1, 1.0), ("n" * 129, 1, 1.0), ("kv", -1, 1.0), ("kv", 1, 0.0), ("kv", 1, 3601.0)]
)
def test_a_reserve_outside_its_limits_is_refused(make_queue: MakeQueue, name: str, rate: int, seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="reserve"):
        make_queue().reserve(name, rate, seconds)


works = st.builds(
    Work,
    deadline_ns=st.one_of(st.integers(0, 3_000), st.just(NO_DEADLINE)),
    work_ns=st.integers(0, 500),
    span_ns=st.integers(1, 500),
)


@needs_native
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 500), st.integers(1, 4), works, st.lists(works, max_size=12))
def test_native_and_python_judge_alike(now_ns: int, running_ns: int, workers: int, asked: Work, queued: list[Work]) -> None:
    admitted = sorted(queued, key=lambda work: work.deadline_ns)
    native = native_module().judge(now_ns, running_ns, workers, tuple(asked), [tuple(work) for work in admitted])
    python = judge(now_ns, running_ns, workers, asked, admitted)
    assert (native.fault, native.reason, native.predicted_finish_ns) == (python.fault, python.reason, python.predicted_finish_ns)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1000), works, st.lists(works, max_size=8))
def test_with_one_worker_an_admitted_set_meets_every_deadline(now_ns: int, asked: Work, queued: list[Work]) -> None:
    admitted: list[Work] = []
    for work in [*queued, asked]:
        alone = work._replace(span_ns=work.work_ns)
        if not judge(now_ns, 0, 1, alone, admitted).fault:
            admitted = sorted([*admitted, alone], key=lambda work: work.deadline_ns)
    finish_ns = now_ns
    for work in admitted:
        finish_ns += work.work_ns
        assert finish_ns <= work.deadline_ns


def test_an_idle_queue_tries_again_what_a_bad_moment_made_look_dear() -> None:
    admission = Admission(
        QueueOptions(1, 8, 1024, 100_000, fifo=False, admits=True, hints_max=8), Tenants(implementation="python").ledger
    )
    size, now_ns = Size(1024, 1024, 1, 320), 10**9
    cheap_ns = int(admission.costs.seed_ns(Tier.MEMORY, 320) * 1024)
    admission.costs.learn(Tier.MEMORY, 320, 1024, 1000 * cheap_ns)

    def ask(at_ns: int, window_ns: int) -> Verdict:
        work = admission.reckon(size, at_ns + window_ns, at_ns)
        return admission.ask(size, work, [], 0, idle=True, now_ns=at_ns)

    window_ns = 3 * cheap_ns + WAKE_NS
    first = ask(now_ns, window_ns)
    assert not first.fault
    assert first.predicted_finish_ns > now_ns + window_ns, "it says so, all the same"
    assert ask(now_ns + 1, window_ns).reason == Reason.LATE, "one at a time"
    assert not ask(now_ns + PROBE_NS, window_ns).fault
    assert ask(now_ns + 2 * PROBE_NS, cheap_ns // 2).reason == Reason.LATE, "not even at the costs that it began with"
    work = admission.reckon(size, now_ns + 3 * PROBE_NS + window_ns, now_ns + 3 * PROBE_NS)
    busy = admission.ask(size, work, [], 0, idle=False, now_ns=now_ns + 3 * PROBE_NS)
    assert busy.reason == Reason.LATE, "others would pay for it"


def test_a_cost_is_learnt_from_pieces_and_one_odd_piece_does_not_spoil_it() -> None:
    costs = Costs()
    for _ in range(50):
        costs.learn(Tier.MEMORY, 320, 1024, 100_000)
    assert costs.row_ns(Tier.MEMORY, 320, 1024) == pytest.approx(97.7, rel=0.01)
    assert costs.row_ns(Tier.MEMORY, 320, 700) == costs.row_ns(Tier.MEMORY, 320, 1024), "the nearest size that is known"
    costs.learn(Tier.MEMORY, 320, 1024, 100_000_000)
    assert costs.row_ns(Tier.MEMORY, 320, 1024) < 150
    assert costs.row_ns(Tier.DISK, 320, 1024) == 4000 * 5, "another tier knows nothing of it"


def test_reserves_replace_each_other_by_name_and_are_bounded() -> None:
    bandwidth = Bandwidth()
    bandwidth.total = 1000
    assert bandwidth.reserve("a", 400, 100, 0)
    assert bandwidth.reserve("a", 500, 100, 0)
    assert bandwidth.reserved(0) == 500
    assert not bandwidth.reserve("b", 500, 100, 0)
    assert bandwidth.reserve("b", 400, 50, 0)
    assert bandwidth.least_ns(100, 0) == 1_000_000_000
    assert bandwidth.reserved(60) == 500
    assert bandwidth.reserved(100) == 0
