"""Order, limits and tickets of the deadline queue, on gathers; the same for native and Python threads."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from treadle.contract import Deadline, InvalidArgument, ResourceExhausted, RowOutOfRange
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import PIECE_ROWS_MAX, TICKETS_MAX, WORKERS_MAX, DeadlineQueue, Ticket

if TYPE_CHECKING:
    from tests.waiting import wait_for
else:
    from waiting import wait_for

SECONDS = 20.0  # no wait here comes near it unless something is broken
TRIES = 200  # for what must be caught while a long ticket runs
UNTOUCHED = 0xA5
TABLE = np.random.default_rng(3).integers(0, 256, (1000, 64), dtype=np.uint8)
NOW, LATER, LATEST = Deadline(0), Deadline(2_000), Deadline(3_000)

LONG_ROWS = np.random.default_rng(5).integers(0, len(TABLE), 1 << 17)
LONG_OUT = np.zeros(
    (LONG_ROWS.size, TABLE.shape[1]), np.uint8
)  # in pieces of one row: tens of milliseconds, against one submission

MakeQueue = Callable[..., DeadlineQueue]


class Gather:
    """A random gather from TABLE with its ticket."""

    def __init__(self, queue: DeadlineQueue, deadline: Deadline, count: int = 100) -> None:
        self.rows = np.random.default_rng(count).integers(0, len(TABLE), count)
        self.out = np.full((count, TABLE.shape[1]), UNTOUCHED, np.uint8)
        self.ticket = queue.submit_gather(TABLE, self.rows, self.out, deadline)

    def is_right(self) -> bool:
        return bool((self.out == TABLE[self.rows]).all())

    def is_untouched(self) -> bool:
        return bool((self.out == UNTOUCHED).all())


def start_long(queue: DeadlineQueue, deadline: Deadline) -> Ticket:
    """A ticket of many pieces, the first of them running."""
    ticket = queue.submit_gather(TABLE, LONG_ROWS, LONG_OUT, deadline)
    wait_for(lambda: ticket.started_ns > 0)
    return ticket


def submit_behind_long(queue: DeadlineQueue, deadlines: list[Deadline]) -> tuple[Ticket, list[Gather]]:
    """Gathers submitted while a long and earlier ticket certainly kept the only worker, and that ticket."""
    for _ in range(TRIES):
        long = start_long(queue, NOW)
        gathers = [Gather(queue, deadline) for deadline in deadlines]
        if not long.done:
            return long, gathers
        for gather in gathers:
            gather.ticket.cancel()
    raise AssertionError("the long ticket was always over before the short ones were submitted")


def test_tickets_run_earliest_deadline_first(make_queue: MakeQueue) -> None:
    long, gathers = submit_behind_long(make_queue(piece_rows=1), [Deadline(3), Deadline(1), Deadline(2)])
    long.cancel()
    assert all(gather.ticket.wait(SECONDS) for gather in gathers)
    by_finish = sorted([long, *(gather.ticket for gather in gathers)], key=lambda ticket: ticket.finished_ns)
    assert [ticket.deadline.at_ns for ticket in by_finish] == [0, 1, 2, 3]
    assert all(gather.is_right() for gather in gathers)


def test_equal_deadlines_run_in_the_order_of_submission(make_queue: MakeQueue) -> None:
    long, gathers = submit_behind_long(make_queue(piece_rows=1), [LATER] * 20)
    long.cancel()
    assert all(gather.ticket.wait(SECONDS) for gather in gathers)
    starts = [gather.ticket.started_ns for gather in gathers]
    assert starts == sorted(starts)


def test_a_later_ticket_with_an_earlier_deadline_overtakes_at_the_next_piece(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    for _ in range(TRIES):
        long = start_long(queue, LATEST)
        gather = Gather(queue, LATER)
        assert gather.ticket.wait(SECONDS)
        if not long.cancel().all():  # it had begun earlier and was still waiting for its next piece
            break
    else:
        raise AssertionError("never overtaken")
    assert gather.is_right()
    assert gather.ticket.started_ns > long.started_ns
    assert gather.ticket.finished_ns < long.finished_ns


def test_a_ticket_that_was_overtaken_goes_on_where_it_was(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=64)
    LONG_OUT[:] = UNTOUCHED
    long = start_long(queue, LATEST)
    gathers = [Gather(queue, LATER) for _ in range(10)]
    assert all(gather.ticket.wait(SECONDS) for gather in gathers)
    assert long.wait(SECONDS)
    assert (TABLE[LONG_ROWS] == LONG_OUT).all()


def test_several_workers_share_the_pieces_of_one_ticket(make_queue: MakeQueue) -> None:
    queue = make_queue(workers=4, piece_rows=7)
    gathers = [Gather(queue, Deadline(at), count=1 + 97 * at) for at in range(40)]
    assert all(gather.ticket.wait(SECONDS) for gather in gathers)
    assert all(gather.is_right() for gather in gathers)
    stats = queue.stats()
    assert stats["tickets_total"] == 40
    assert stats["pieces_total"] == sum(math.ceil(len(gather.rows) / 7) for gather in gathers)
    assert stats["queued"] == 0
    assert stats["busy_seconds"] > 0


def test_a_full_queue_refuses_and_says_when_to_come_again(make_queue: MakeQueue) -> None:
    queue = make_queue(tickets_max=3, piece_rows=1)
    for _ in range(TRIES):
        long = start_long(queue, NOW)
        gathers = [Gather(queue, LATER), Gather(queue, LATER)]
        out = np.full((1, 64), UNTOUCHED, np.uint8)
        try:
            late = queue.submit_gather(TABLE, np.zeros(1, np.int64), out, NOW)
        except ResourceExhausted as error:
            refused = error
            break
        assert all(ticket.wait(SECONDS) for ticket in (long, late, *(gather.ticket for gather in gathers)))
    else:
        raise AssertionError("never full")
    long.cancel()
    assert refused.retry_after_seconds is not None
    assert 0 < refused.retry_after_seconds < SECONDS
    assert "tickets_max" in str(refused)
    assert (out == UNTOUCHED).all()
    assert all(gather.ticket.wait(SECONDS) for gather in gathers)
    assert Gather(queue, NOW).ticket.wait(SECONDS)


def test_a_ticket_tells_when_it_was_submitted_started_and_finished(make_queue: MakeQueue) -> None:
    before = time.monotonic_ns()
    ticket = Gather(make_queue(), LATER).ticket
    assert ticket.wait(SECONDS)
    assert before <= ticket.submitted_ns <= ticket.started_ns <= ticket.finished_ns <= time.monotonic_ns()
    assert ticket.done
    assert not ticket.cancelled
    assert ticket.deadline == LATER


def test_a_wait_ends_with_its_time(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    for _ in range(TRIES):
        long, (gather,) = submit_behind_long(queue, [LATER])
        waited = gather.ticket.wait(0.0001)
        if not long.done:  # nothing else could have run
            break
    else:
        raise AssertionError("the long ticket was always over")
    assert not waited
    long.cancel()
    assert gather.ticket.wait(SECONDS)


@pytest.mark.parametrize("seconds", [-0.1, WAIT_SECONDS_MAX + 0.1, math.inf, math.nan])
def test_a_wait_without_a_sane_limit_is_refused(make_queue: MakeQueue, seconds: float) -> None:
    ticket = Gather(make_queue(), LATER).ticket
    with pytest.raises(InvalidArgument, match="seconds"):
        ticket.wait(seconds)


def test_other_python_threads_run_while_one_waits(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    for _ in range(TRIES):
        long, (gather,) = submit_behind_long(queue, [LATER])
        waiting = threading.Thread(target=gather.ticket.wait, args=(WAIT_SECONDS_MAX,))
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(SECONDS)  # the waiting thread keeps the GIL from its start on, until it drops it by itself
        waiting.start()
        waited_for = not gather.ticket.done
        sys.setswitchinterval(switch_seconds)
        long.cancel()
        waiting.join(SECONDS)
        if waited_for:
            break
    else:
        raise AssertionError("no other thread ran before the wait was over")


def test_a_cancelled_ticket_says_which_rows_are_there(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    for _ in range(TRIES):
        LONG_OUT[:] = UNTOUCHED
        there = start_long(queue, LATER).cancel()
        if not there.all():
            break
    else:
        raise AssertionError("never cancelled midway")
    assert there.shape == LONG_ROWS.shape
    assert there.any()
    assert not there.all()
    assert (LONG_OUT[there] == TABLE[LONG_ROWS[there]]).all()
    assert (LONG_OUT[~there] == UNTOUCHED).all()


def test_a_ticket_cancelled_before_its_start_leaves_out_untouched(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    for _ in range(TRIES):
        long, (gather,) = submit_behind_long(queue, [LATER])
        there = gather.ticket.cancel()
        if not long.done:
            break
    else:
        raise AssertionError("the long ticket was always over")
    assert not there.any()
    assert gather.is_untouched()
    assert gather.ticket.cancelled
    assert gather.ticket.done
    assert gather.ticket.started_ns == 0
    assert not gather.ticket.wait(SECONDS)
    assert not gather.ticket.cancel().any()
    assert long.cancel().any()
    assert queue.stats()["queued"] == 0


def test_cancelling_a_finished_ticket_changes_nothing(make_queue: MakeQueue) -> None:
    gather = Gather(make_queue(), LATER)
    assert gather.ticket.wait(SECONDS)
    assert gather.ticket.cancel().all()
    assert not gather.ticket.cancelled
    assert gather.ticket.wait(0)


async def until_readable(ticket: Ticket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(ticket, readable.set)
    await asyncio.wait_for(readable.wait(), SECONDS)
    loop.remove_reader(ticket)
    ticket.close()


async def test_asyncio_is_told_of_the_end(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    long, (gather, cancelled) = submit_behind_long(queue, [LATER, LATEST])
    cancelled_readable = asyncio.create_task(until_readable(cancelled.ticket))
    await asyncio.sleep(0)
    cancelled.ticket.cancel()
    await cancelled_readable
    long.cancel()
    await asyncio.gather(until_readable(gather.ticket), until_readable(long))
    assert gather.ticket.done
    assert gather.is_right()
    await until_readable(gather.ticket)  # closed and made again: readable at once, since the ticket is done


def test_the_arrays_of_a_finished_ticket_are_let_go_of(make_queue: MakeQueue) -> None:
    gather = Gather(make_queue(), LATER)
    rows, out = weakref.ref(gather.rows), weakref.ref(gather.out)
    ticket = gather.ticket
    assert ticket.wait(SECONDS)
    del gather
    wait_for(lambda: rows() is None and out() is None)
    assert ticket.done


def test_the_arrays_of_a_forgotten_ticket_live_until_it_is_done(make_queue: MakeQueue) -> None:
    queue = make_queue(piece_rows=1)
    long, (gather,) = submit_behind_long(queue, [LATER])
    out = weakref.ref(gather.out)
    del gather
    alive = out() is not None
    assert alive or long.done
    long.cancel()
    wait_for(lambda: queue.stats()["queued"] == 0 and out() is None)


def test_an_empty_gather_is_done_at_once(make_queue: MakeQueue) -> None:
    gather = Gather(make_queue(), LATER, count=0)
    assert gather.ticket.done
    assert gather.ticket.wait(0)
    assert gather.ticket.cancel().shape == (0,)
    assert gather.ticket.submitted_ns <= gather.ticket.started_ns <= gather.ticket.finished_ns


def test_a_gather_that_cannot_be_done_is_refused_before_it_is_queued(make_queue: MakeQueue) -> None:
    queue = make_queue()
    rows, out = np.zeros((5, 2), np.int64), np.full((5, 2, 64), UNTOUCHED, np.uint8)
    read_only = out.copy()
    read_only.setflags(write=False)
    beyond, negative = rows.copy(), rows.copy()
    beyond[3, 1], negative[0, 0] = len(TABLE), -1
    for bad in (beyond, negative):
        with pytest.raises(RowOutOfRange):
            queue.submit_gather(TABLE, bad, out, LATER)
    wrong: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [
        (TABLE.astype(np.int8), rows, out), (TABLE[:, ::2], rows, out), (TABLE[0], rows, out), (TABLE[:, :8].copy(), rows, out),
        (TABLE, rows.astype(np.int32), out), (TABLE, rows.T, out), (TABLE, rows, out[:4]), (TABLE, rows, out[::-1]),
        (TABLE, rows, out.view(np.int8)), (TABLE, rows, read_only),
    ]  # fmt: skip
    for table, ids, target in wrong:
        with pytest.raises(InvalidArgument):
            queue.submit_gather(table, ids, target, LATER)
    for deadline in (Deadline(-1), Deadline(1 << 63), 5):
        with pytest.raises(InvalidArgument, match="deadline"):
            queue.submit_gather(TABLE, rows, out, deadline)  # type: ignore[arg-type]
    assert (out == UNTOUCHED).all()
    assert queue.stats()["tickets_total"] == 0


@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"workers": WORKERS_MAX + 1}, {"tickets_max": 0}, {"tickets_max": TICKETS_MAX + 1}, {"piece_rows": 0}, {"piece_rows": PIECE_ROWS_MAX + 1}],
)  # fmt: skip
def test_a_queue_outside_its_limits_is_refused(make_queue: MakeQueue, options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        make_queue(**options)
