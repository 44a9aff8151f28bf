import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from treadle.client.engram import EngramHandle, StepPrefetcher, fake_handle
from treadle.client.engram.sources import TableSource
from treadle.contract import (
    Deadline,
    DeadlineExceeded,
    InvalidArgument,
    Late,
    ResourceExhausted,
    RowOutOfRange,
    Transport,
    Unavailable,
    WaitPolicy,
    Windows,
)
from treadle.dataplane import DeadlineQueue, Ticket
from treadle.kernels import HashPlan, reference

IDS = [5, 9, 2, 499, 17, 17, 3, 250]
PATIENT = WaitPolicy(20.0)


@pytest.fixture
def handle(small: Any) -> Iterator[EngramHandle]:
    with fake_handle(small.model, small.token_map, small.tables) as opened:
        yield opened


def windows(ids: list[int] = IDS, first: int = 0) -> Windows:
    return Windows.of_sequences([(ids, first)], depth=2)


def expected(small: Any, layer: int, of: Windows) -> np.ndarray[Any, Any]:
    plan = HashPlan.from_model(small.model, layer, small.token_map)
    return np.asarray(small.tables[layer][reference.row_ids(plan, of)])


def soon(*layers: int) -> dict[int, Deadline]:
    return {layer: Deadline.after(0.001) for layer in layers}


def test_lookup_gather_and_prefetch_give_the_same_bytes(small: Any, handle: EngramHandle) -> None:
    of = windows()
    looked_up = handle.lookup(of)
    prefetched = handle.prefetch(of, soon(1, 4)).wait(PATIENT)
    for layer in (1, 4):
        ids = reference.row_ids(HashPlan.from_model(small.model, layer, small.token_map), of)
        assert np.array_equal(looked_up[layer], expected(small, layer, of))
        assert np.array_equal(prefetched[layer].rows, looked_up[layer])
        assert np.array_equal(handle.gather(layer, ids), looked_up[layer])
        assert prefetched[layer].missing is None
    assert handle.transport is Transport.FAKE


def test_bad_arguments_are_refused_before_anything_starts(small: Any, handle: EngramHandle) -> None:
    out = np.full((1, 16, 64), 7, dtype=np.uint8)
    with pytest.raises(RowOutOfRange):
        handle.gather(1, np.full((1, 16), 10**9, dtype=np.int64), out)
    assert (out == 7).all()
    with pytest.raises(InvalidArgument, match="layer 2"):
        handle.prefetch(windows(), soon(2))
    with pytest.raises(InvalidArgument, match="out"):
        handle.lookup(windows(), out={1: out, 4: out})
    with pytest.raises(InvalidArgument, match="rows"):
        handle.gather(1, np.zeros((1, 16), dtype=np.int32))
    with pytest.raises(InvalidArgument, match="lookback"):
        handle.lookup(Windows.of_sequences([(IDS, 0)], depth=1))


def test_tables_are_handed_out_where_they_lie_in_this_process_only(small: Any, handle: EngramHandle) -> None:
    source = TableSource(Transport.LOCAL, small.model, small.tables, small.token_map)
    with EngramHandle(small.model, small.model.version, source) as local:
        for layer, (plan, rows) in local.tables().items():
            assert rows is small.tables[layer]
            assert plan.rows_hashed == small.model.rows_hashed(layer)
    with pytest.raises(Unavailable, match="by mapped or local"):
        handle.tables()


def test_rows_that_do_not_come_are_zero_and_named(small: Any) -> None:
    with fake_handle(small.model, small.token_map, small.tables, delay_seconds=5.0) as slow:
        rows = slow.prefetch(windows(), soon(1)).wait_layer(1, WaitPolicy(0.01, Late.MASK))
        assert rows.missing is not None
        assert rows.missing.shape == (len(IDS), 16)
        assert rows.missing.all()
        assert not rows.rows.any()
        assert not rows.in_time
        assert rows.slack_seconds < 0


def test_the_policy_fail_raises_instead(small: Any) -> None:
    with fake_handle(small.model, small.token_map, small.tables, delay_seconds=5.0) as slow:
        ticket = slow.prefetch(windows(), soon(1, 4))
        with pytest.raises(DeadlineExceeded, match="layer 4: 128 of 128 rows missing"):
            ticket.wait_layer(4, WaitPolicy(0.0, Late.FAIL))
        ticket.cancel()
        assert ticket.layers == ()


def test_a_late_row_is_waited_for_within_the_policy(small: Any) -> None:
    with fake_handle(small.model, small.token_map, small.tables, delay_seconds=0.5) as slow:
        rows = slow.prefetch(windows(), soon(1)).wait_layer(1, PATIENT)
        assert rows.missing is None
        assert not rows.in_time
        assert 0 < rows.stall_seconds < 20
        assert np.array_equal(rows.rows, expected(small, 1, windows()))


async def test_asyncio_is_told_when_rows_arrive(handle: EngramHandle) -> None:
    ticket = handle.prefetch(windows(), soon(1, 4))
    await asyncio.wait_for(asyncio.gather(ticket.arrived(1), ticket.arrived(4)), 5)
    assert all(rows.missing is None for rows in ticket.wait(WaitPolicy(0.0)).values())


def test_steps_give_the_rows_of_one_long_pass_whatever_the_chunks(small: Any, handle: EngramHandle) -> None:
    prefetcher, whole = StepPrefetcher(handle, policy=PATIENT), expected(small, 4, windows())
    for first, end in ((0, 3), (3, 4), (4, 8)):
        step = prefetcher.begin(windows(IDS[:end], first))
        assert np.array_equal(step.rows(1).rows, expected(small, 1, windows())[first:end])
        assert np.array_equal(step.rows(4).rows, whole[first:end])
        step.finish()
    figures = prefetcher.figures()[4]
    assert figures.tickets == 3
    assert figures.row_bytes == 8 * 16 * 64
    assert figures.rows_missing == 0


def test_prefetching_changes_no_bit(handle: EngramHandle) -> None:
    with_it, without = StepPrefetcher(handle, policy=PATIENT), StepPrefetcher(handle, prefetch=False)
    for layer in (1, 4):
        early, late = with_it.begin(windows()).rows(layer), without.begin(windows()).rows(layer)
        assert np.array_equal(early.rows, late.rows)
        assert not late.in_time


class LateClock:
    """The clock of this process, and how far the step has gone on since."""

    late_ns = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.late_ns


def test_deadlines_are_learned_from_when_layers_start(handle: EngramHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher, clock = StepPrefetcher(handle, policy=PATIENT), LateClock()
    monkeypatch.setattr("treadle.client.engram.step_prefetcher.time", clock)
    for _ in range(4):
        clock.late_ns = 0
        step = prefetcher.begin(windows())
        clock.late_ns = 1_000 * 10**9  # the layers before it have taken their time
        rows = step.rows(4)
    assert rows.in_time
    assert 900 < rows.slack_seconds < 1_100  # the deadline is where the layer has started before, not where we guessed


def test_a_step_that_nobody_finished_is_stopped_by_the_next(small: Any) -> None:
    with fake_handle(small.model, small.token_map, small.tables, delay_seconds=0.2) as slow:
        prefetcher = StepPrefetcher(slow, policy=PATIENT)
        prefetcher.begin(windows([1, 2, 3]))
        rows = prefetcher.begin(windows()).rows(1)
        assert np.array_equal(rows.rows, expected(small, 1, windows()))
        with pytest.raises(InvalidArgument, match="no table"):
            prefetcher.begin(windows()).rows(3)


def test_a_missed_ticket_is_counted_under_the_policy_fail_too(small: Any) -> None:
    with fake_handle(small.model, small.token_map, small.tables, delay_seconds=5.0) as slow:
        prefetcher = StepPrefetcher(slow, policy=WaitPolicy(0.0, Late.FAIL))
        step = prefetcher.begin(windows())
        with pytest.raises(DeadlineExceeded):
            step.rows(1)
        figures = prefetcher.figures()[1]
        assert (figures.tickets, figures.tickets_in_time, figures.rows_missing) == (1, 0, 128)
        with pytest.raises(InvalidArgument, match="taken already"):
            step.rows(1)


class FullAtTheSecond(DeadlineQueue):
    """A queue with room for one ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[Ticket] = []

    def submit_lookup(self, *arguments: Any) -> Ticket:
        if self.tickets:
            raise ResourceExhausted("queue: full")
        self.tickets.append(super().submit_lookup(*arguments))
        return self.tickets[0]


def test_a_prefetch_that_is_refused_half_way_leaves_no_ticket_behind(handle: EngramHandle) -> None:
    with FullAtTheSecond() as queue:
        with pytest.raises(ResourceExhausted):
            handle.prefetch(windows(), soon(1, 4), queue=queue)
        assert queue.tickets[0].done


def test_a_source_that_cannot_be_made_keeps_nothing_open(small: Any) -> None:
    with pytest.raises(InvalidArgument, match="workers"):
        TableSource(Transport.FAKE, small.model, small.tables, small.token_map, workers=0)
