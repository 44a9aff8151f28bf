"""Requests sent to a queue in this process at the moments they were drawn for, and what came of each.

The queue's threads keep to one core and whoever sends to another, so that neither waits for the other.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, DeadlineExceeded
from treadle.dataplane import DeadlineQueue, Ticket
from treadle_loadtests.arrivals import Alone, Arrival, Kind
from treadle_loadtests.oracle import Job

IDS_KEPT = 4_000_000  # ids drawn beforehand for each kind: rows of 1.3 GB, so that a set comes again only when no cache holds it
END_SECONDS = 20.0  # how long the last requests may take
ALONE_TIMES = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it went. Times: CLOCK_MONOTONIC ns; finished_ns 0: refused."""

    arrival: Arrival
    submitted_ns: int
    deadline_ns: int
    finished_ns: int = 0
    busy_ns: int = 0
    predicted_ns: int = 0

    @property
    def in_time(self) -> bool:
        """Done by its deadline."""
        return 0 < self.finished_ns <= self.deadline_ns


class Driver:
    """Sends gathers of some kinds from one table. The buffers are shared by requests of a kind: nobody reads them."""

    def __init__(self, table: NDArray[np.uint8], kinds: tuple[Kind, ...], seed: int) -> None:
        random = np.random.default_rng(seed)
        self._table, self._kinds = table, kinds
        self._ids = [random.integers(0, len(table), (max(1, IDS_KEPT // kind.rows), kind.rows)) for kind in kinds]
        self._outs = [np.full((kind.rows, table.shape[1]), 1, dtype=np.uint8) for kind in kinds]
        self._sent = 0

    def submit(self, queue: DeadlineQueue, kind: int, deadline: Deadline) -> Ticket:
        """Send one request. Raises what the queue refuses it with."""
        self._sent += 1
        ids = self._ids[kind]
        return queue.submit_gather(self._table, ids[self._sent % len(ids)], self._outs[kind], deadline)

    def arguments(self, kind: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
        """Table, ids and buffer of a request, for callers that time the native call alone."""
        return self._table, self._ids[kind][0], self._outs[kind]

    def alone(self, queue: DeadlineQueue) -> tuple[Alone, ...]:
        """What each kind takes on an idle queue: the median, and of its pieces the mean, which is what arrivals must leave room for."""
        found = []
        for kind in range(len(self._kinds)):
            tickets = []
            for _ in range(ALONE_TIMES):
                ticket = self.submit(queue, kind, Deadline.after(END_SECONDS))
                while not ticket.done:  # as idle as a sender that waits: a sleep would let the core's clock down
                    pass
                tickets.append(ticket)
            took = [ticket.finished_ns - ticket.submitted_ns for ticket in tickets[ALONE_TIMES // 4 :]]
            busy = [ticket.busy_ns for ticket in tickets[ALONE_TIMES // 4 :]]
            found.append(Alone(float(np.median(took)) / 1e9, float(np.mean(busy)) / 1e9))
        return tuple(found)

    def drive(self, queue: DeadlineQueue, arrivals: Sequence[Arrival], alone: Sequence[Alone]) -> list[Seen]:
        """Send all of them and wait for the last one. Raises AssertionError if one never ends."""
        sent: list[tuple[Arrival, int, int, Ticket | None]] = []
        gc.collect()
        gc.disable()
        try:
            begin_ns = time.monotonic_ns() + 1_000_000
            for arrival in arrivals:
                at_ns = begin_ns + arrival.at_ns
                while (now_ns := time.monotonic_ns()) < at_ns:
                    pass
                deadline_ns = now_ns + round(arrival.window * alone[arrival.kind].seconds * 1e9)
                try:
                    sent.append((arrival, now_ns, deadline_ns, self.submit(queue, arrival.kind, Deadline(deadline_ns))))
                except DeadlineExceeded:
                    sent.append((arrival, now_ns, deadline_ns, None))
        finally:
            gc.enable()
        return [_seen(*each) for each in sent]


def _seen(arrival: Arrival, now_ns: int, deadline_ns: int, ticket: Ticket | None) -> Seen:
    if ticket is None:
        return Seen(arrival, now_ns, deadline_ns)
    assert ticket.wait(END_SECONDS), "a request never ended"
    return Seen(arrival, ticket.submitted_ns, deadline_ns, ticket.finished_ns, ticket.busy_ns, ticket.predicted_ns)


def jobs_of(seen: Sequence[Seen], kinds: Sequence[Kind], piece_rows: int, *, usual: bool = False) -> list[Job]:
    """What the oracle is asked about. A refused request never ran: it counts with the mean service time of its kind; `usual`: all do."""
    means = [
        int(np.mean([each.busy_ns for each in seen if each.arrival.kind == number and each.finished_ns] or [1]))
        for number in range(len(kinds))
    ]
    jobs = []
    for each in seen:
        service_ns = max(1, means[each.arrival.kind] if usual or not each.busy_ns else each.busy_ns)
        pieces = -(-kinds[each.arrival.kind].rows // piece_rows)
        jobs.append(Job(each.submitted_ns, service_ns, each.deadline_ns, max(1, service_ns // pieces)))
    return jobs


@contextmanager
def apart() -> Iterator[Callable[[], bool]]:
    """Threads that start inside keep to the second core, until what is yielded is called: it moves the caller to the first one.

    It returns False where there is one core only. Outside, the caller is where it was.
    """
    cores = sorted(os.sched_getaffinity(0))

    def part() -> bool:
        os.sched_setaffinity(0, {cores[0]})
        return len(cores) > 1

    os.sched_setaffinity(0, {cores[-1]})
    try:
        yield part
    finally:
        os.sched_setaffinity(0, cores)
