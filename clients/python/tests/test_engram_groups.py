"""A step of several memories: one queue, each group's own rows, and an error that stays with its group."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treadle.client.engram import EngramHandle, StepPrefetcher, fake_handle
from treadle.client.engram.sources import TableSource
from treadle.client.engram.step_prefetcher import BUFFERS_MAX
from treadle.contract import InvalidArgument, Late, ResourceExhausted, Transport, Unavailable, WaitPolicy, Windows
from treadle.dataplane import DeadlineQueue
from treadle.kernels import HashPlan, reference

PATIENT = WaitPolicy(20.0)
IDS = [5, 9, 2, 499, 17, 17, 3, 250]


def windows(ids: list[int] = IDS, first: int = 0) -> Windows:
    return Windows.of_sequences([(ids, first)], depth=2)


def expected(small: Any, layer: int, of: Windows, tables: Any = None) -> np.ndarray[Any, Any]:
    plan = HashPlan.from_model(small.model, layer, small.token_map)
    return np.asarray((tables or small.tables)[layer][reference.row_ids(plan, of)])


@pytest.fixture
def other_tables(small: Any) -> Any:
    return {layer: 255 - rows for layer, rows in small.tables.items()}


@pytest.fixture
def handles(small: Any) -> Iterator[Callable[..., EngramHandle]]:
    """Opens handles on the small model."""
    with ExitStack() as stack:

        def make(tables: Any = None, delay_seconds: float = 0.0) -> EngramHandle:
            return stack.enter_context(fake_handle(small.model, small.token_map, tables or small.tables, delay_seconds))

        yield make


@pytest.mark.parametrize("prefetch", [True, False])
def test_each_group_gets_the_rows_of_its_own_memory(
    small: Any, other_tables: Any, handles: Callable[..., EngramHandle], prefetch: bool
) -> None:
    prefetcher = StepPrefetcher(prefetch=prefetch)
    one, two = handles(), handles(other_tables)
    first, second = windows(IDS, 6), windows(IDS[:5])
    for _ in range(2):  # the second step uses the buffers of the first
        step = prefetcher.begin_groups([(one, first), (two, second)], 20)
        for layer in (1, 4):
            got = step.group_rows(layer, [PATIENT, PATIENT])
            assert [(each.group, each.error) for each in got] == [(0, None), (1, None)]
            assert got[0].rows is not None
            assert got[1].rows is not None
            assert np.array_equal(got[0].rows.rows, expected(small, layer, first))
            assert np.array_equal(got[1].rows.rows, expected(small, layer, second, other_tables))
        assert step.group_rows(2, [PATIENT, PATIENT]) == []
        step.finish()
    assert prefetcher.figures(one)[4].row_bytes == 2 * 2 * 16 * 64
    assert prefetcher.figures(two)[1].tickets == 2
    both = prefetcher.layer_figures()
    assert {layer: (each.tickets, each.row_bytes) for layer, each in both.items()} == dict.fromkeys(
        (1, 4), (4, 2 * (2 + 5) * 16 * 64)
    )


def test_many_memories_share_the_threads_of_one_queue(handles: Callable[..., EngramHandle]) -> None:
    opened = [handles() for _ in range(16)]
    before = threading.active_count()
    native = _threads_of_this_process()
    prefetcher = StepPrefetcher()
    step = prefetcher.begin_groups([(handle, windows(IDS, 7)) for handle in opened], 16)
    assert all(got.rows is not None and got.rows.missing is None for got in step.group_rows(1, [PATIENT] * 16))
    assert threading.active_count() - before <= 1
    assert _threads_of_this_process() - native <= 1


def _threads_of_this_process() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_all_groups_wait_together_and_no_longer_than_the_longest_of_them(handles: Callable[..., EngramHandle]) -> None:
    prefetcher = StepPrefetcher()
    step = prefetcher.begin_groups([(handles(delay_seconds=30.0), windows()) for _ in range(8)], 64)
    asked = time.monotonic()
    got = step.group_rows(1, [WaitPolicy(0.5)] * 8)
    assert time.monotonic() - asked < 3.5  # one after the other: 4 s
    assert all(each.rows is not None and each.rows.missing is not None for each in got)


def test_in_time_means_when_the_layer_needed_them_not_when_the_turn_came(handles: Callable[..., EngramHandle]) -> None:
    slow, slower = handles(delay_seconds=1.0), handles(delay_seconds=0.5)
    step = StepPrefetcher().begin_groups([(slow, windows()), (slower, windows())], 16)
    first, second = step.group_rows(1, [PATIENT, PATIENT])
    assert first.rows is not None
    assert second.rows is not None
    assert not first.rows.in_time
    assert not second.rows.in_time  # they were there when their turn came, and late for the layer


class RefusingQueue(DeadlineQueue):
    """Takes a number of tickets, then no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def submit_lookup(self, *arguments: Any) -> Any:
        self.room -= 1
        if self.room < 0:
            raise ResourceExhausted("queue: full")
        return super().submit_lookup(*arguments)


def test_a_group_that_cannot_start_keeps_its_error_and_the_others_go_on(handles: Callable[..., EngramHandle]) -> None:
    prefetcher = StepPrefetcher()
    prefetcher._queue = RefusingQueue(room=3)
    step = prefetcher.begin_groups([(handles(), windows()), (handles(), windows())], 16)
    first, second = step.group_rows(4, [PATIENT, PATIENT])
    assert first.rows is not None
    assert first.rows.missing is None
    assert second.rows is None
    assert isinstance(second.error, ResourceExhausted)


class GoneSource(TableSource):
    """A source whose pool is gone once somebody asks."""

    def lookup(self, *_: Any) -> None:
        raise Unavailable("no pool")


def test_a_lookup_without_prefetch_that_fails_is_its_groups_alone(small: Any, handles: Callable[..., EngramHandle]) -> None:
    source = GoneSource(Transport.FAKE, small.model, small.tables, small.token_map)
    with EngramHandle(small.model, small.model.version, source) as gone:
        step = StepPrefetcher(prefetch=False).begin_groups([(gone, windows()), (handles(), windows())], 16)
        first, second = step.group_rows(1, [PATIENT, PATIENT])
    assert isinstance(first.error, Unavailable)
    assert second.rows is not None


def test_the_policy_fail_leaves_the_error_beside_what_came(handles: Callable[..., EngramHandle]) -> None:
    step = StepPrefetcher().begin_groups([(handles(delay_seconds=30.0), windows())], 8)
    (got,) = step.group_rows(1, [WaitPolicy(0.0, Late.FAIL)])
    assert got.error is not None
    assert got.rows is not None
    assert got.rows.missing is not None


def test_a_step_of_several_memories_is_not_taken_as_one(handles: Callable[..., EngramHandle]) -> None:
    prefetcher, one = StepPrefetcher(), handles()
    step = prefetcher.begin_groups([(one, windows()), (handles(), windows())], 16)
    with pytest.raises(InvalidArgument, match="group_rows"):
        step.rows(1)
    with pytest.raises(InvalidArgument, match="policies"):
        step.group_rows(1, [PATIENT])
    with pytest.raises(InvalidArgument, match="begin_groups"):
        prefetcher.begin(windows())


def test_a_handle_that_is_gone_leaves_no_records_behind(small: Any) -> None:
    prefetcher = StepPrefetcher()
    handle = fake_handle(small.model, small.token_map, small.tables)
    step = prefetcher.begin_groups([(handle, windows())], 8)
    step.group_rows(1, [PATIENT])
    step.finish()
    prefetcher.begin_groups([], 1)
    gone = weakref.ref(handle)
    handle.close()
    del handle, step
    gc.collect()
    assert gone() is None
    assert len(prefetcher._records) == 0
    assert prefetcher.layer_figures()[1].tickets == 1  # what all have done together is kept


def test_buffers_of_shapes_no_longer_in_use_are_let_go(small: Any, handles: Callable[..., EngramHandle]) -> None:
    prefetcher = StepPrefetcher()
    prefetcher._buffers = {(layer, 1, 16): np.empty((1, 1, 16), dtype=np.uint8) for layer in range(BUFFERS_MAX)}
    prefetcher.begin_groups([(handles(), windows())], 8)
    assert set(prefetcher._buffers) == {(1, 16, 64), (4, 16, 64)}


def test_a_source_that_closes_ends_what_it_has_in_the_callers_queue(small: Any) -> None:
    model = replace(small.model, name="other")
    handle = fake_handle(model, small.token_map, small.tables)
    step = StepPrefetcher().begin_groups([(handle, windows())], 8)
    handle.close()
    (got,) = step.group_rows(1, [WaitPolicy(0.0)])
    assert got.rows is not None  # all or part of it, and the rest is masked; nothing reads a table that is gone
