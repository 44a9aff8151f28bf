"""The queue in Python threads, for machines without a compiler: the same order, pieces and answers as the native one.

Owns its threads and tickets. Does not check what is submitted (`treadle.kernels.arguments`) nor face the caller (`queue`). Its threads need
the GIL, so that a ticket beside a busy Python thread starts milliseconds later than a native one.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, Windows
from treadle.dataplane.faults import Fault
from treadle.kernels import HashPlan, gather_rows, lookup

log = logging.getLogger("treadle.dataplane")
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[int, int], object]  # does units [first, last); holds the arrays
    units: int
    units_per_piece: int
    rows_per_unit: int


class Ticket:
    """One job and how far it has come. All state is guarded by the engine's condition; `next_unit` only ever rises."""

    def __init__(self, engine: Engine, job: _Job) -> None:
        self._engine = engine
        self.job: _Job | None = job  # None once it has ended: the arrays are let go of
        self.units, self.units_per_piece, self.rows_per_unit = job.units, job.units_per_piece, job.rows_per_unit
        self.submitted_ns = self.started_ns = self.finished_ns = 0
        self.next_unit = self.pieces_in_flight = 0
        self.lost_from = job.units  # first unit of the earliest piece that raised; all units: none did
        self.cancelled = False
        self.fault = Fault.NONE
        self.queued = False
        self._ended = threading.Event()
        self._event_fd = -1

    @property
    def ended(self) -> bool:
        """True once no more pieces will run."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """True once all rows are there; False when it was cancelled, or `seconds` are over."""
        return self._ended.wait(seconds) and not self.cancelled

    def cancel(self) -> int:
        """Stop it, wait for the pieces in flight, return how many rows, from the first on, are there."""
        self._engine.stop(self)
        self._ended.wait()
        return min(self.next_unit, self.lost_from) * self.rows_per_unit

    def fileno(self) -> int:
        """An eventfd, readable from the end on."""
        with self._engine.condition:
            if self._event_fd < 0:
                self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                if self.ended:
                    os.eventfd_write(self._event_fd, 1)
            return self._event_fd

    def close(self) -> None:
        """Give the eventfd back."""
        with self._engine.condition:
            if self._event_fd >= 0:
                os.close(self._event_fd)
            self._event_fd = -1

    def run(self, first: int, last: int) -> None:
        """Do units [first, last) of a claimed piece."""
        assert self.job is not None, "a ticket with a piece in flight has not ended"
        self.job.run(first, last)

    def end(self, *, cancelled: bool) -> None:
        """Called once, with the condition held."""
        self.cancelled = cancelled
        self.finished_ns = time.monotonic_ns()
        self.job = None
        self._ended.set()
        if self._event_fd >= 0:
            os.eventfd_write(self._event_fd, 1)

    def __del__(self) -> None:
        if self._event_fd >= 0:
            os.close(self._event_fd)


class Engine:
    """Earliest deadline first over bounded pieces, by `workers` Python threads."""

    def __init__(self, workers: int, tickets_max: int, piece_rows: int) -> None:
        self._tickets_max, self._piece_rows = tickets_max, piece_rows
        self.condition = threading.Condition()
        self._order: list[tuple[int, int, Ticket]] = []  # heap by deadline, then order of submission
        self._closed = False
        self._tickets_total = self._pieces_total = self._busy_ns = 0
        # Daemons: the interpreter waits for other threads before it calls the exit hook that closes the queue.
        self._threads: list[threading.Thread] = []
        try:
            for number in range(workers):
                thread = threading.Thread(target=self._work, name=f"treadle-edf-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
            raise

    def submit_lookup(
        self, plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8], deadline_ns: int
    ) -> Ticket | None:
        """Queue a lookup that has been checked; None when the queue is full."""
        columns = int(out.shape[1])

        def run(first: int, last: int) -> None:
            lookup(plan, table, slice_windows(windows, first, last), out[first:last])

        return self._submit(_Job(run, windows.token_count, max(1, self._piece_rows // columns), columns), deadline_ns)

    def submit_gather(
        self, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], deadline_ns: int
    ) -> Ticket | None:
        """Queue a gather that has been checked; None when the queue is full."""
        flat, flat_out = rows.reshape(-1), out.reshape(-1, table.shape[1])

        def run(first: int, last: int) -> None:
            gather_rows(table, flat[first:last], flat_out[first:last])

        return self._submit(_Job(run, flat.shape[0], self._piece_rows, 1), deadline_ns)

    def stop(self, ticket: Ticket) -> None:
        """Start no further piece of `ticket`. Without effect on one that has no more."""
        with self.condition:
            if not ticket.queued:
                return
            self._order = [entry for entry in self._order if entry[2] is not ticket]
            heapq.heapify(self._order)
            self._end_stopped(ticket)

    def close(self) -> None:
        """Stop every ticket, join the threads."""
        with self.condition:
            self._closed = True
            while self._order:
                self._end_stopped(heapq.heappop(self._order)[2])
            self.condition.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may close a forgotten queue from a worker
                thread.join()

    def stats(self) -> dict[str, float]:
        """The counters so far."""
        with self.condition:
            return {
                "tickets_total": self._tickets_total,
                "pieces_total": self._pieces_total,
                "queued": len(self._order),
                "busy_seconds": self._busy_ns / 1e9,
            }

    def _submit(self, job: _Job, deadline_ns: int) -> Ticket | None:
        with self.condition:
            if job.units and not self._closed and len(self._order) >= self._tickets_max:
                return None
            ticket = Ticket(self, job)
            ticket.submitted_ns = time.monotonic_ns()
            sequence, self._tickets_total = self._tickets_total, self._tickets_total + 1
            if not job.units:
                ticket.started_ns = ticket.submitted_ns
            if self._closed or not job.units:
                ticket.end(cancelled=bool(job.units))
                return ticket
            ticket.queued = True
            heapq.heappush(self._order, (deadline_ns, sequence, ticket))
            self.condition.notify()
            return ticket

    def _end_stopped(self, ticket: Ticket) -> None:
        ticket.queued = False
        if ticket.pieces_in_flight == 0:
            ticket.end(cancelled=True)

    def _work(self) -> None:
        while (claimed := self._claim()) is not None:
            ticket, first, last = claimed
            start = time.monotonic_ns()
            try:
                ticket.run(first, last)
            except Exception as error:  # numpy ran out of memory, say: this ticket ends short, the thread lives on for the others
                log.exception("a piece of a ticket failed")
                self._lose(ticket, first, Fault.DATA_LOSS if isinstance(error, DataLoss) else Fault.INTERNAL)
            self._finish(ticket, time.monotonic_ns() - start)
            del claimed, ticket  # an idle worker keeps nothing alive

    def _claim(self) -> tuple[Ticket, int, int] | None:
        with self.condition:
            self.condition.wait_for(lambda: self._closed or self._order)
            if not self._order:
                return None
            ticket = self._order[0][2]
            if ticket.next_unit == 0:
                ticket.started_ns = time.monotonic_ns()
            first, ticket.next_unit = ticket.next_unit, min(ticket.next_unit + ticket.units_per_piece, ticket.units)
            ticket.pieces_in_flight += 1
            if ticket.next_unit == ticket.units:
                heapq.heappop(self._order)
                ticket.queued = False
            if self._order:
                self.condition.notify()
            return ticket, first, ticket.next_unit

    def _lose(self, ticket: Ticket, first: int, fault: Fault) -> None:
        with self.condition:
            ticket.fault = ticket.fault or fault
            ticket.lost_from = min(ticket.lost_from, first)
            if ticket.queued:
                ticket.queued = False
                self._order = [entry for entry in self._order if entry[2] is not ticket]
                heapq.heapify(self._order)

    def _finish(self, ticket: Ticket, busy_ns: int) -> None:
        with self.condition:
            self._pieces_total += 1
            self._busy_ns += busy_ns
            ticket.pieces_in_flight -= 1
            if ticket.pieces_in_flight == 0 and not ticket.queued:
                ticket.end(cancelled=min(ticket.next_unit, ticket.lost_from) < ticket.units)


def slice_windows(windows: Windows, first: int, last: int) -> Windows:
    """Windows of tokens [first, last) alone: what came before `first` in its request moves into the look-back."""
    starts = windows.starts.astype(np.int64)
    begin = int(np.searchsorted(starts[1:], first, side="right"))  # the request that owns token `first`
    end = max(begin + 1, int(np.searchsorted(starts[:-1], last, side="left")))
    lookback = windows.lookback[begin:end].copy()
    before = np.arange(first - 1, starts[begin] - 1, -1)[: lookback.shape[1]]  # nearest first
    lookback[0] = _shifted(windows.tokens[before], windows.lookback[begin])
    dead, lookback_dead = windows.dead, windows.lookback_dead
    if dead is not None or lookback_dead is not None:
        whole = np.zeros(windows.lookback.shape, np.bool_) if lookback_dead is None else lookback_dead
        near = np.zeros(len(before), np.bool_) if dead is None else dead[before]
        lookback_dead = whole[begin:end].copy()
        lookback_dead[0] = _shifted(near, whole[begin])
    return Windows(
        tokens=windows.tokens[first:last],
        starts=(np.clip(starts[begin : end + 1], first, last) - first).astype(np.int32),
        lookback=lookback,
        dead=None if dead is None else dead[first:last],
        lookback_dead=lookback_dead,
    )


def _shifted(near: NDArray[_T], far: NDArray[_T]) -> NDArray[_T]:
    shifted: NDArray[_T] = np.concatenate([near, far])[: far.shape[0]]
    return shifted
