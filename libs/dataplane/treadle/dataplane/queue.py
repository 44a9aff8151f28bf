"""The deadline queue as callers see it: submit lookups and gathers, hold tickets.

Owns limits, checks and the choice of the implementation: `native` (C++ threads, which need no GIL) or `python` (`fallback`).
Does not decide what happens to rows that are late (the caller's `WaitPolicy`), nor where tables come from.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, InvalidArgument, ResourceExhausted, RowOutOfRange, Unavailable, Windows
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import admission as rule
from treadle.dataplane import fallback
from treadle.dataplane.engine import Engine, EngineTicket, make_engine
from treadle.dataplane.extension import IMPLEMENTATION, Implementation, native_module
from treadle.dataplane.fallback_admission import QueueOptions
from treadle.dataplane.faults import error_of
from treadle.dataplane.tenants import NOBODY, PythonLedger, Tenants
from treadle.kernels import HashPlan
from treadle.kernels.arguments import check_gather, check_lookup

WORKERS_MAX = 64  # threads of one queue; more than a socket's cores only take turns
TICKETS_MAX = 1 << 16  # queued tickets of one queue, each some hundred bytes beside its arrays
PIECE_ROWS_MAX = 1 << 16  # rows of one piece: some milliseconds, what an earlier deadline or a cancel may have to wait
HINTS_MAX = 1 << 12  # queued tickets without a deadline
PIECE_SECONDS_MAX = 1.0
RESERVE_SECONDS_MAX = 3600.0  # a reserve that is not renewed ends
RESERVE_NAME_MAX = 128
MEASURE_EVERY_SECONDS, MEASURED_KEPT = 10.0, 4  # of the bandwidth of memory, by reserves


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bandwidth of this host's memory, bytes copied a second: kept for others by all reserves together, and left to rows."""

    reserved_bytes_per_second: int
    left_bytes_per_second: int


class DeadlineQueue:
    """Runs lookups and gathers on worker threads, earliest deadline first. A context manager; close it in the end.

    A ticket is done in pieces; each idle worker takes the next piece of the ticket with the earliest deadline, so that a later
    ticket with an earlier deadline overtakes at the next piece. Workers never wait for each other. Equal deadlines run in the order
    of submission. A ticket with the deadline `Deadline.never()` is a hint: it runs while nothing with a deadline waits.

    workers:        threads of this queue, 1 to WORKERS_MAX
    tickets_max:    queued tickets (pieces left that no worker has taken), 1 to TICKETS_MAX
    piece_rows:     rows of one piece at most, 1 to PIECE_ROWS_MAX (at least one token)
    piece_seconds:  time of one piece at most, by the costs measured; pieces of 64 rows are never cut further
    hints_max:      queued hints, 1 to HINTS_MAX
    admission:      refuse a ticket at once when it would be late, or would make one late that was admitted
    order:          "edf", or "fifo" (first come, first served) to compare with; fifo goes without admission
    tenants:        whose quotas and shares tickets are taken off; None: one tenant without limits
    implementation: for comparisons; "native" raises Unavailable where the extension was not built

    Raises InvalidArgument outside these limits, ResourceExhausted when the system grants no more threads. May be used from any
    thread of the process that made it; a forked child gets InvalidArgument: start processes with the spawn method.
    """

    def __init__(
        self, *, workers: int = 1, tickets_max: int = 1024, piece_rows: int = 1024, piece_seconds: float = 100e-6, hints_max: int = 64,
        admission: bool = False, order: Literal["edf", "fifo"] = "edf", tenants: Tenants | None = None,
        implementation: Implementation = IMPLEMENTATION,
    ) -> None:  # fmt: skip
        _check_limit("workers", workers, WORKERS_MAX)
        _check_limit("tickets_max", tickets_max, TICKETS_MAX)
        _check_limit("piece_rows", piece_rows, PIECE_ROWS_MAX)
        _check_limit("hints_max", hints_max, HINTS_MAX)
        if not 1e-6 <= piece_seconds <= PIECE_SECONDS_MAX:
            raise InvalidArgument(f"piece_seconds: 1e-6 to {PIECE_SECONDS_MAX}, got {piece_seconds!r}")
        if order not in ("edf", "fifo") or (order == "fifo" and admission):
            raise InvalidArgument(f"order: edf, or fifo without admission, got {order!r}")
        self.tenants = tenants or Tenants(implementation=implementation)
        if isinstance(self.tenants.ledger, PythonLedger) != (implementation == "python"):
            raise InvalidArgument(f"tenants: made for another implementation than this queue's, {implementation}")
        self._workers, self._process_id = workers, os.getpid()
        self._measured: deque[int] = deque(maxlen=MEASURED_KEPT)  # bytes copied a second
        self._measured_at, self._measuring = 0.0, threading.Lock()
        options = QueueOptions(workers, tickets_max, piece_rows, round(piece_seconds * 1e9), order == "fifo", admission, hints_max)
        try:
            self._engine = make_engine(implementation, options, self.tenants)
        except (OSError, RuntimeError) as error:
            raise ResourceExhausted(f"workers: the system grants no {workers} threads: {error}") from error
        # Runs when the queue is forgotten and when the interpreter exits, whichever is first: no thread outlives either.
        self._closing = weakref.finalize(self, _close_engine, self._engine, self._process_id)

    def submit_lookup(
        self,
        plan: HashPlan,
        table: NDArray[np.uint8],
        windows: Windows,
        out: NDArray[np.uint8],
        deadline: Deadline,
        tenant: int = NOBODY,
    ) -> Ticket:
        """Hash `windows` and gather their rows; returns at once.

        table:   [N, row_bytes] uint8, C-contiguous; may be shared memory
        windows: T tokens; its arrays must not change until the ticket is done
        out:     [T, C, row_bytes] uint8, C-contiguous, owned by the caller, overwritten until the ticket is done

        Raises the errors of `treadle.kernels.lookup` with `out` untouched; ResourceExhausted, saying when to try again, for want of
        room, quota or share; DeadlineExceeded with the predicted finish when it would be late; Unavailable once the queue is closed.
        """
        check_lookup(plan, table, windows, out)
        deadline_ns, engine = _checked_ns(deadline), self._open_engine()
        return self._ticket(engine.submit_lookup(plan, table, windows, out, deadline_ns, self._index(tenant)), deadline, out)

    def submit_gather(
        self, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], deadline: Deadline, tenant: int = NOBODY
    ) -> Ticket:
        """Copy table[rows] into `out`; returns at once.

        table: [N, row_bytes] uint8, C-contiguous; may be shared memory
        rows:  [...] int64, C-contiguous; must not change until the ticket is done
        out:   [..., row_bytes] uint8, C-contiguous, owned by the caller, overwritten until the ticket is done

        Raises the errors of `treadle.kernels.gather_rows` with `out` untouched, and what `submit_lookup` raises beside its own.
        """
        check_gather(table, rows, out)
        return self._submit_gather(table, rows, out, deadline, tenant)

    def submit_hint(self, store: Any, rows: NDArray[np.int64]) -> Ticket:
        """Bring rows of a native store (RowStore) near while nothing with a deadline waits; returns at once.

        rows: [n] int64, held by the store; they are read into memory of the ticket's own, which nobody looks at. Off nobody's quota.
        Raises RowOutOfRange, ResourceExhausted where as many hints as fit are queued, Unavailable for a `python` queue or a closed one.
        """
        self.native_engine()
        if rows.size and rows.view(np.uint64).max() >= store.row_count:
            raise RowOutOfRange(f"rows: 0 to {store.row_count - 1} expected, got {int(rows.min())} to {int(rows.max())}")
        out = np.empty((rows.size, store.row_bytes), dtype=np.uint8)
        return self._submit_gather(store, rows, out, Deadline.never(), NOBODY)

    def _submit_gather(
        self, table: NDArray[np.uint8] | Any, rows: NDArray[np.int64], out: NDArray[np.uint8], deadline: Deadline, tenant: int
    ) -> Ticket:
        deadline_ns, engine = _checked_ns(deadline), self._open_engine()
        return self._ticket(engine.submit_gather(table, rows, out, deadline_ns, self._index(tenant)), deadline, out)

    def reserve(self, name: str, bytes_per_second: int, seconds: float) -> Reserved:
        """Keep bandwidth of this host's memory free for other traffic; rows are admitted and paced to what is left.

        name:             who asks, up to RESERVE_NAME_MAX characters; a second reserve of the same name replaces the first
        bytes_per_second: bytes copied a second; 0 gives it back
        seconds:          above 0, up to RESERVE_SECONDS_MAX; the reserve ends by itself
        While nothing is reserved a call measures the bandwidth, some 30 ms, at most once in MEASURE_EVERY_SECONDS; the best of the last
        MEASURED_KEPT counts, for a moment of load makes memory look slow. Raises InvalidArgument, and ResourceExhausted where less than
        a tenth would be left to rows, or RESERVES_MAX names reserve already.
        """
        if not 0 < len(name) <= RESERVE_NAME_MAX or bytes_per_second < 0 or not 0 < seconds <= RESERVE_SECONDS_MAX:
            raise InvalidArgument(
                f"reserve: a name of 1 to {RESERVE_NAME_MAX} characters, a rate of at least 0 and up to {RESERVE_SECONDS_MAX:g} s expected"
            )
        engine, total = self._open_engine(), self._measured_bandwidth()
        until_ns = time.monotonic_ns() + round(seconds * 1e9)
        if not engine.reserve(name, total, min(bytes_per_second, (1 << 63) - 1), until_ns):
            reserved = engine.stats()["reserved_bytes_per_second"]
            if reserved + bytes_per_second > total * rule.RESERVED_PART_MAX:
                raise ResourceExhausted(
                    f"reserve: {bytes_per_second} B/s more than the {reserved} reserved leaves rows too little of the {total} that this "
                    f"memory copies; all reserves together may have {rule.RESERVED_PART_MAX:.0%} of it"
                )
            raise ResourceExhausted(f"reserve: {rule.RESERVES_MAX} names reserve already; give one back, or wait until one ends")
        return self.reserved()

    def pace_seconds(self, byte_count: int) -> float:
        """How long whoever gathers `byte_count` bytes beside this queue should wait first, so that a reserve is kept; they are taken
        off its pace."""
        return self._engine.pace_ns(byte_count) / 1e9

    def reserved(self) -> Reserved:
        """What all reserves keep now, and what is left; 0 left: not measured, as nothing was ever reserved."""
        reserved = int(self._engine.stats()["reserved_bytes_per_second"])
        return Reserved(reserved, max(0, max(self._measured, default=0) - reserved))

    def stats(self) -> dict[str, Any]:
        """Counters: tickets_total, pieces_total, queued (tickets with pieces left), busy_seconds (summed over the workers),
        reserved_bytes_per_second, prediction_error_sum (parts of the time that a ticket took) and prediction_errors (a count for each of
        `PREDICTION_ERROR_PARTS` and one beyond)."""
        self.check_process()
        return self._engine.stats()

    def native_engine(self) -> Any:
        """The native queue, for doors that submit to it from threads of their own. Raises Unavailable for a `python` queue."""
        engine = self._open_engine()
        if isinstance(engine, fallback.Engine):
            raise Unavailable("queue: a native one is needed here; build the extension, or unset TREADLE_DATAPLANE")
        return engine

    def close(self) -> None:
        """Cancel what is queued, wait for the pieces in flight, join the threads. A second call does nothing."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check_process(self) -> None:
        """Raise InvalidArgument in a forked child: it has the queue's memory, but not its threads."""
        if os.getpid() != self._process_id:
            raise InvalidArgument(
                f"queue: made in process {self._process_id}, used in its fork {os.getpid()}; start processes with the spawn method"
            )

    def _open_engine(self) -> Engine:
        self.check_process()
        if not self._closing.alive:
            raise Unavailable("queue: closed")
        return self._engine

    def _index(self, tenant: int) -> int:
        if not 0 <= tenant < len(self.tenants.limits):
            raise InvalidArgument(f"tenant: 0 to {len(self.tenants.limits) - 1}, got {tenant!r}")
        return tenant

    def _measured_bandwidth(self) -> int:
        with self._measuring:
            now = time.monotonic()
            stands = self._engine.stats()["reserved_bytes_per_second"] > 0  # what was granted was granted of the figure before
            if not self._measured or (not stands and now - self._measured_at >= MEASURE_EVERY_SECONDS):
                native = not isinstance(self._engine, fallback.Engine)
                threads = min(WORKERS_MAX, os.cpu_count() or 1)
                self._measured.append(native_module().measure_copy_bandwidth(threads) if native else rule.measure_copy_bandwidth())
                self._measured_at = now
            return max(self._measured)

    def _ticket(self, answer: EngineTicket | rule.Verdict, deadline: Deadline, out: NDArray[np.uint8]) -> Ticket:
        reason = getattr(answer, "reason", None)
        if reason is None:
            return Ticket(self, cast("EngineTicket", answer), deadline, out.size // out.shape[-1])
        raise rule.refusal(cast("rule.Verdict", answer), "queue", time.monotonic_ns(), deadline.at_ns)


class Ticket:
    """A submitted lookup or gather. It holds the queue, and until it is done all its arrays; made by `DeadlineQueue` only.

    deadline: what it was submitted with
    """

    __slots__ = ("_queue", "_row_count", "_ticket", "deadline")

    def __init__(self, queue: DeadlineQueue, ticket: EngineTicket, deadline: Deadline, row_count: int) -> None:
        self._queue, self._ticket, self._row_count, self.deadline = queue, ticket, row_count, deadline

    @property
    def submitted_ns(self) -> int:
        """When it was queued (CLOCK_MONOTONIC, as time.monotonic_ns())."""
        return self._ticket.submitted_ns

    @property
    def started_ns(self) -> int:
        """When a worker took its first piece; 0: not yet."""
        return self._ticket.started_ns

    @property
    def finished_ns(self) -> int:
        """When its last piece was done, or it was cancelled; 0: not yet."""
        return self._ticket.finished_ns

    @property
    def predicted_ns(self) -> int:
        """When admission expected it to finish as it was submitted; 0: a queue without admission."""
        return self._ticket.predicted_ns

    @property
    def busy_ns(self) -> int:
        """What its pieces have taken so far, all workers together: its service time, without the waits between them."""
        return self._ticket.busy_ns

    @property
    def done(self) -> bool:
        """Nothing more will be written to `out`: all rows are there, unless `cancelled`."""
        return self._ticket.ended

    @property
    def cancelled(self) -> bool:
        """It ended by `cancel()`, by the queue's `close()` or by a fault before all rows were there."""
        return self._ticket.cancelled

    def wait(self, seconds: float) -> bool:
        """True once all rows are there; False when it was cancelled, or after `seconds`. Other Python threads run meanwhile.

        Raises InvalidArgument for more than WAIT_SECONDS_MAX (a missing row never hangs a token), and the error of the tier
        that ended it: DataLoss for a truncated or damaged table, Unavailable for one that is gone.
        """
        if not 0 <= seconds <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"seconds: 0 to {WAIT_SECONDS_MAX}, got {seconds}")
        self._queue.check_process()
        came = self._ticket.wait(seconds)
        if not came and self._ticket.fault:
            raise error_of(self._ticket.fault, "gather")
        return came

    def cancel(self) -> NDArray[np.bool_]:
        """Start no further piece, wait for those in flight, say which rows are there: [rows, flat] bool.

        `out` holds the rows where it is True and is untouched where it is False. After the end: what was there then.
        """
        self._queue.check_process()
        there = np.zeros(self._row_count, np.bool_)
        there[: self._ticket.cancel()] = True
        return there

    def fileno(self) -> int:
        """An eventfd of this ticket, readable once it is done: `loop.add_reader(ticket, …)`. Made on first use, closed by `close()`.

        Raises ResourceExhausted when the process has no descriptor left.
        """
        self._queue.check_process()
        try:
            return self._ticket.fileno()
        except OSError as error:
            raise ResourceExhausted(f"fileno: the system grants no eventfd: {error}") from error

    def close(self) -> None:
        """Give the eventfd back (remove its reader first). The work goes on: see `cancel`."""
        self._queue.check_process()
        self._ticket.close()


def _close_engine(engine: Engine, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child has no threads to join
        engine.close()


def _check_limit(name: str, value: int, limit: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= limit:
        raise InvalidArgument(f"{name}: 1 to {limit}, got {value!r}")


def _checked_ns(deadline: Deadline) -> int:
    if not isinstance(deadline, Deadline) or not 0 <= deadline.at_ns < 1 << 63:
        raise InvalidArgument(f"deadline: a Deadline of 0 to 2^63 - 1 ns expected, got {deadline!r}")
    return deadline.at_ns
