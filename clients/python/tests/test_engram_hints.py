"""Hints: a whole prompt told as soon as it is tokenised, and what becomes of it where rows are far or near."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from treadle.client.engram import EngramHandle, StepPrefetcher
from treadle.client.engram.hints import HINT_TOKENS
from treadle.client.engram.sources import TableSource
from treadle.contract import Deadline, InvalidArgument, Transport, WaitPolicy, Windows
from treadle.dataplane import DeadlineQueue
from treadle.dataplane.warming import Warming
from treadle.kernels import HashPlan, reference

PATIENCE_SECONDS = 20.0
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 500, 3 * HINT_TOKENS + 5)]


def windows(ids: list[int] = PROMPT) -> Windows:
    return Windows.of_sequences([(ids, 0)], depth=2)


def source_of(small: Any, *, cold: bool) -> TableSource:
    warming = Warming([]) if cold else None  # no span that could be entered: as a table on a disk
    return TableSource(Transport.MAPPED, small.model, small.tables, small.token_map, warming=warming)


@pytest.fixture
def cold(small: Any) -> Iterator[EngramHandle]:
    with EngramHandle(small.model, small.model.version, source_of(small, cold=True)) as handle:
        yield handle


@pytest.fixture
def warm(small: Any) -> Iterator[EngramHandle]:
    with EngramHandle(small.model, small.model.version, source_of(small, cold=False)) as handle:
        yield handle


def until_idle(queue: DeadlineQueue, tickets: int) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while queue.stats()["tickets_total"] < tickets or queue.stats()["queued"]:
        assert time.monotonic() < end, "the hints were never worked on"


def test_a_hint_reads_the_rows_of_a_whole_prompt_without_a_deadline(cold: EngramHandle) -> None:
    with DeadlineQueue() as queue:
        assert cold.wants_hints
        assert cold.hint(windows(), queue) == len(PROMPT)
        until_idle(queue, 2 * 4)
        assert not any(queue.tenants.figures(0).slack), "nobody was late, nobody was early"
        assert queue.stats()["tickets_total"] == 2 * 4, "four pieces of the prompt, two layers"


def test_where_rows_are_near_already_a_hint_does_nothing(warm: EngramHandle) -> None:
    with DeadlineQueue() as queue:
        assert not warm.wants_hints
        assert warm.hint(windows(), queue) == 0
        assert queue.stats()["tickets_total"] == 0


def test_a_hint_takes_what_fits_and_says_how_much(cold: EngramHandle) -> None:
    with DeadlineQueue(hints_max=3) as queue:
        blocked = queue.submit_gather(  # keeps the only worker for a while
            np.zeros((10, 64), np.uint8), np.zeros(1 << 21, np.int64), np.zeros((1 << 21, 64), np.uint8), Deadline(0)
        )
        taken = cold.hint(windows(), queue)
        if not blocked.done:
            assert taken == HINT_TOKENS, "the third layer-piece was the last that fitted"
        blocked.cancel()


def test_a_hint_that_cannot_be_is_refused(cold: EngramHandle) -> None:
    with pytest.raises(InvalidArgument, match="lookback"):
        cold.hint(Windows.of_sequences([(PROMPT, 0)], depth=1))


def test_a_handle_closes_while_hints_are_queued(small: Any) -> None:
    with DeadlineQueue() as queue:
        handle = EngramHandle(small.model, small.model.version, source_of(small, cold=True))
        for _ in range(8):
            handle.hint(windows(), queue)
        handle.close()
        assert queue.stats()["queued"] == 0


def test_a_prefetch_without_deadlines_brings_the_rows_of_all_layers(small: Any, warm: EngramHandle) -> None:
    ticket = warm.prefetch(windows())
    rows = ticket.wait(WaitPolicy(PATIENCE_SECONDS))
    for layer in warm.layers:
        plan = HashPlan.from_model(small.model, layer, small.token_map)
        assert (rows[layer].rows == small.tables[layer][reference.row_ids(plan, windows())]).all()
        assert rows[layer].in_time or rows[layer].missing is None


def test_a_prefetcher_hints_into_the_queue_of_its_steps(cold: EngramHandle) -> None:
    prefetcher = StepPrefetcher()
    assert prefetcher.hint(cold, windows()) == len(PROMPT)
    step = prefetcher.begin_groups([(cold, windows(PROMPT[:8]))], 8)
    assert step.refusals == [None]
    step.finish()
