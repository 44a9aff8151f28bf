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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, Windows
from treadle.dataplane.admission import NO_DEADLINE, Reason, Verdict, Work
from treadle.dataplane.fallback_admission import Admission, QueueOptions, Size
from treadle.dataplane.faults import Fault
from treadle.dataplane.slicing import slice_windows
from treadle.dataplane.tenants import Ledger
from treadle.kernels import HashPlan, gather_rows, lookup

log = logging.getLogger("treadle.dataplane")


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[int, int], object]  # does units [first, last); holds the arrays
    size: Size


class Ticket:
    """One job and how far it has come. All state is guarded by the engine's condition; `next_unit` only ever rises."""

    def __init__(self, engine: Engine, job: _Job, deadline_ns: int, tenant: int) -> None:
        self._engine, self.deadline_ns, self.tenant = engine, deadline_ns, tenant
        self.job: _Job | None = job  # None once it has ended: the arrays are let go of
        self.size, self.units = job.size, job.size.units
        self.work, self.predicted_ns, self.expected_ns = Work(deadline_ns, 0, 0), 0, 0  # expected: later tickets included
        self.submitted_ns = self.started_ns = self.finished_ns = self.busy_ns = 0
        self.next_unit = self.pieces_in_flight = 0
        self.lost_from = job.size.units  # first unit of the earliest piece that raised; all units: none did
        self.cancelled = False
        self.fault = Fault.NONE
        self.queued = False
        self._ended = threading.Event()
        self._event_fd = -1

    @property
    def done_units(self) -> int:
        """Units, from the first on, that are done once no piece is in flight."""
        return min(self.next_unit, self.lost_from)

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
        return self.done_units * self.size.rows_per_unit

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

    def end(self, *, cancelled: bool, at_ns: int) -> None:
        """Called once, with the condition held."""
        self.cancelled = cancelled
        self.finished_ns = at_ns
        self.job = None
        self._ended.set()
        if self._event_fd >= 0:
            os.eventfd_write(self._event_fd, 1)

    def __del__(self) -> None:
        if self._event_fd >= 0:
            os.close(self._event_fd)


class Engine:
    """Earliest deadline first over bounded pieces, by Python threads."""

    def __init__(self, options: QueueOptions, ledger: Ledger) -> None:
        self._tickets_max, self._piece_rows, self._hints_max = options.tickets_max, options.piece_rows, options.hints_max
        self._fifo, self._admission = options.fifo, Admission(options, ledger)
        self._sleeping = 0
        self.condition = threading.Condition()
        self._order: list[tuple[int, int, Ticket]] = []  # heap by deadline, then order of submission
        self._closed = False
        self._tickets_total = self._pieces_total = self._busy_ns = 0
        # Daemons: the interpreter waits for other threads before it calls the exit hook that closes the queue.
        self._threads: list[threading.Thread] = []
        try:
            for number in range(options.workers):
                thread = threading.Thread(target=self._work, name=f"treadle-edf-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close()
            raise

    def submit_lookup(
        self, plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8], deadline_ns: int, tenant: int
    ) -> Ticket | Verdict:
        """Queue a lookup that has been checked; the verdict that refuses it."""
        columns = int(out.shape[1])

        def run(first: int, last: int) -> None:
            lookup(plan, table, slice_windows(windows, first, last), out[first:last])

        size = Size(windows.token_count, max(1, self._piece_rows // columns), columns, table.shape[1])
        return self._submit(_Job(run, size), deadline_ns, tenant)

    def submit_gather(
        self, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], deadline_ns: int, tenant: int
    ) -> Ticket | Verdict:
        """Queue a gather that has been checked; the verdict that refuses it."""
        flat, flat_out = rows.reshape(-1), out.reshape(-1, table.shape[1])

        def run(first: int, last: int) -> None:
            gather_rows(table, flat[first:last], flat_out[first:last])

        return self._submit(_Job(run, Size(flat.shape[0], self._piece_rows, 1, table.shape[1])), deadline_ns, tenant)

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

    def reserve(self, name: str, total: int, bytes_per_second: int, until_ns: int) -> bool:
        """Keep bandwidth free; False: it leaves rows too little."""
        with self.condition:
            self._admission.bandwidth.total = total
            reserved = self._admission.bandwidth.reserve(name, bytes_per_second, until_ns, time.monotonic_ns())
            self.condition.notify_all()
            return reserved

    def pace_ns(self, byte_count: int) -> int:
        """How long whoever gathers so much beside this queue should wait first."""
        with self.condition:
            now_ns = time.monotonic_ns()
            free_at_ns = self._admission.bandwidth.free_at_ns(now_ns)
            self._admission.bandwidth.starts(byte_count, now_ns)
            return free_at_ns - now_ns

    def row_ns(self, tier: int, row_bytes: int, rows: int) -> float:
        """What a row costs."""
        with self.condition:
            return self._admission.costs.row_ns(tier, row_bytes, rows)

    def stats(self) -> dict[str, Any]:
        """The counters so far."""
        with self.condition:
            return {
                "tickets_total": self._tickets_total,
                "pieces_total": self._pieces_total,
                "queued": len(self._order),
                "busy_seconds": self._busy_ns / 1e9,
                "reserved_bytes_per_second": self._admission.bandwidth.reserved(time.monotonic_ns()),
                "prediction_error_sum": self._admission.error_parts,
                "prediction_errors": list(self._admission.error_counts),
            }

    def _submit(self, job: _Job, deadline_ns: int, tenant: int) -> Ticket | Verdict:
        with self.condition:
            ticket, now_ns, empty = Ticket(self, job, deadline_ns, tenant), time.monotonic_ns(), not job.size.units
            if not empty and not self._closed:
                verdict = self._join(ticket, now_ns)
                if verdict.fault:
                    self._admission.ledger.count_refused(tenant, verdict.reason)
                    return verdict
            ticket.submitted_ns = now_ns
            sequence, self._tickets_total = self._tickets_total, self._tickets_total + 1
            if empty:
                ticket.started_ns = now_ns
            if self._closed or empty:
                ticket.end(cancelled=not empty, at_ns=time.monotonic_ns())
                return ticket
            ticket.queued = True
            heapq.heappush(self._order, (0 if self._fifo and deadline_ns != NO_DEADLINE else deadline_ns, sequence, ticket))
            self.condition.notify()
            return ticket

    def _join(self, ticket: Ticket, now_ns: int) -> Verdict:
        admission, hint = self._admission, ticket.deadline_ns == NO_DEADLINE
        full = len(self._order) >= self._tickets_max
        if full or (hint and sum(entry[2].deadline_ns == NO_DEADLINE for entry in self._order) >= self._hints_max):
            if not hint:
                admission.ledger.overloaded(now_ns)
            retry_ns = admission.retry_after_ns(self._order[0][2].work, now_ns)
            return Verdict(Fault.REFUSED, 0, retry_ns, Reason.ROOM if full else Reason.HINTS)
        ticket.work = admission.reckon(ticket.size, ticket.deadline_ns, now_ns)
        admitted = [entry[2] for entry in sorted(self._order)] if admission.admits else []
        idle = not self._order and self._sleeping > 0
        works = [queued.work for queued in admitted]
        verdict = admission.ask(ticket.size, ticket.work, works, ticket.tenant, idle=idle, now_ns=now_ns)
        if admission.admits and not verdict.fault:
            ticket.predicted_ns = ticket.expected_ns = verdict.predicted_finish_ns
            for queued in admitted:
                if queued.deadline_ns > ticket.deadline_ns:
                    queued.expected_ns += admission.delay_ns(ticket.work)
        return verdict

    def _end_stopped(self, ticket: Ticket) -> None:
        ticket.queued = False
        if ticket.pieces_in_flight == 0:
            self._end(ticket, time.monotonic_ns())

    def _end(self, ticket: Ticket, now_ns: int) -> None:
        wholly = ticket.done_units == ticket.units
        self._admission.ends(
            ticket.size, ticket.done_units, ticket.tenant, ticket.deadline_ns, ticket.expected_ns, ticket.submitted_ns, now_ns,
            wholly=wholly,
        )  # fmt: skip
        ticket.end(cancelled=not wholly, at_ns=now_ns)
        self._admission.ended_in(time.monotonic_ns() - now_ns)

    def _work(self) -> None:
        while (claimed := self._claim()) is not None:
            ticket, first, last, ends_ns = claimed
            start = time.monotonic_ns()
            try:
                ticket.run(first, last)
            except Exception as error:  # numpy ran out of memory, say: this ticket ends short, the thread lives on for the others
                log.exception("a piece of a ticket failed")
                self._lose(ticket, first, Fault.DATA_LOSS if isinstance(error, DataLoss) else Fault.INTERNAL)
            self._finish(ticket, last - first, start, ends_ns)
            del claimed, ticket  # an idle worker keeps nothing alive

    def _claim(self) -> tuple[Ticket, int, int, int] | None:
        with self.condition:
            self._sleeping += 1
            self._wait_for_work()
            self._sleeping -= 1
            if not self._order:
                return None
            ticket, now_ns = self._order[0][2], time.monotonic_ns()
            if ticket.next_unit == 0:
                ticket.started_ns = now_ns
            first = ticket.next_unit
            ticket.next_unit = min(first + self._admission.piece_units(ticket.size), ticket.units)
            ticket.pieces_in_flight += 1
            wholly = ticket.next_unit == ticket.units
            ticket.work, ends_ns = self._admission.starts(ticket.size, ticket.work, ticket.next_unit - first, now_ns, wholly=wholly)
            if wholly:
                heapq.heappop(self._order)
                ticket.queued = False
            if self._order:
                self.condition.notify()
            return ticket, first, ticket.next_unit, ends_ns

    def _wait_for_work(self) -> None:
        """Until there is a piece that may start, or the queue is closed."""
        while not self._closed:
            now_ns = time.monotonic_ns()
            free_at_ns = self._admission.bandwidth.free_at_ns(now_ns)
            if self._order and free_at_ns <= now_ns:
                return
            self.condition.wait((free_at_ns - now_ns) / 1e9 if self._order else None)

    def _lose(self, ticket: Ticket, first: int, fault: Fault) -> None:
        with self.condition:
            ticket.fault = ticket.fault or fault
            ticket.lost_from = min(ticket.lost_from, first)
            if ticket.queued:
                ticket.queued = False
                self._order = [entry for entry in self._order if entry[2] is not ticket]
                heapq.heapify(self._order)

    def _finish(self, ticket: Ticket, units: int, start_ns: int, ends_ns: int) -> None:
        with self.condition:
            now_ns = time.monotonic_ns()
            self._pieces_total += 1
            self._busy_ns += now_ns - start_ns
            ticket.busy_ns += now_ns - start_ns
            self._admission.finishes(ticket.size, units, start_ns, ends_ns, now_ns, faulty=bool(ticket.fault))
            ticket.pieces_in_flight -= 1
            if ticket.pieces_in_flight == 0 and not ticket.queued:
                self._end(ticket, now_ns)
