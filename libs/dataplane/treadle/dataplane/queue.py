"""The deadline queue as callers see it: submit lookups and gathers, hold tickets.

Owns limits, checks and the choice of the implementation: `native` (C++ threads, which need no GIL) or `python` (`fallback`).
Does not decide what happens to rows that are late (the caller's `WaitPolicy`), nor where tables come from.
"""

from __future__ import annotations

import os
import weakref
from importlib import import_module
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, InvalidArgument, ResourceExhausted, Unavailable, Windows
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import fallback
from treadle.dataplane.faults import error_of
from treadle.kernels import HashPlan
from treadle.kernels.arguments import check_gather, check_lookup

WORKERS_MAX = 64  # threads of one queue; more than a socket's cores only take turns
TICKETS_MAX = 1 << 16  # queued tickets of one queue, each some hundred bytes beside its arrays
PIECE_ROWS_MAX = 1 << 16  # rows of one piece: some milliseconds, what an earlier deadline or a cancel may have to wait
RETRY_SECONDS_MIN = 0.001  # how soon a refused caller may come again when nothing has been measured yet

Implementation = Literal["native", "python"]


class _Ticket(Protocol):
    @property
    def submitted_ns(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def fault(self) -> int: ...
    def wait(self, seconds: float) -> bool: ...
    def cancel(self) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class _Engine(Protocol):
    def submit_lookup(
        self, plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8], deadline_ns: int, /
    ) -> _Ticket | None: ...
    def submit_gather(
        self, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], deadline_ns: int, /
    ) -> _Ticket | None: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...


def _native() -> Any:
    """The extension module, or None where it was not built. TREADLE_DATAPLANE=python leaves it, native insists on it."""
    asked = os.environ.get("TREADLE_DATAPLANE", "")
    if asked not in ("", "native", "python"):
        raise InvalidArgument(f"TREADLE_DATAPLANE: native or python, got {asked!r}")
    if asked == "python":
        return None
    try:
        return import_module("treadle.dataplane._native")
    except ImportError:
        if asked == "native":
            raise
        return None


_NATIVE = _native()
IMPLEMENTATION: Implementation = "python" if _NATIVE is None else "native"


def native_module() -> Any:
    """The extension module. Raises Unavailable where it was not built, or was left out by TREADLE_DATAPLANE=python."""
    if _NATIVE is None:
        raise Unavailable(
            "dataplane: the native extension is not there; build it with a C++20 compiler, or unset TREADLE_DATAPLANE"
        )
    return _NATIVE


class DeadlineQueue:
    """Runs lookups and gathers on worker threads, earliest deadline first. A context manager; close it in the end.

    A ticket is done in pieces of at most `piece_rows` rows (at least one token); each idle worker takes the next piece of the
    ticket with the earliest deadline, so that a later ticket with an earlier deadline overtakes at the next piece.
    Workers never wait for each other. Equal deadlines run in the order of submission.

    workers:        threads of this queue, 1 to WORKERS_MAX
    tickets_max:    queued tickets (pieces left that no worker has taken), 1 to TICKETS_MAX
    piece_rows:     rows of one piece, 1 to PIECE_ROWS_MAX
    implementation: for comparisons; "native" raises Unavailable where the extension was not built

    Raises InvalidArgument outside these limits, ResourceExhausted when the system grants no more threads. May be used from any
    thread of the process that made it; a forked child gets InvalidArgument: start processes with the spawn method.
    """

    def __init__(
        self, *, workers: int = 1, tickets_max: int = 1024, piece_rows: int = 1024, implementation: Implementation = IMPLEMENTATION
    ) -> None:
        _check_limit("workers", workers, WORKERS_MAX)
        _check_limit("tickets_max", tickets_max, TICKETS_MAX)
        _check_limit("piece_rows", piece_rows, PIECE_ROWS_MAX)
        self._workers, self._tickets_max, self._process_id = workers, tickets_max, os.getpid()
        try:
            self._engine = _make_engine(implementation, workers, tickets_max, piece_rows)
        except (OSError, RuntimeError) as error:
            raise ResourceExhausted(f"workers: the system grants no {workers} threads: {error}") from error
        # Runs when the queue is forgotten and when the interpreter exits, whichever is first: no thread outlives either.
        self._closing = weakref.finalize(self, _close_engine, self._engine, self._process_id)

    def submit_lookup(
        self, plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8], deadline: Deadline
    ) -> Ticket:
        """Hash `windows` and gather their rows; returns at once.

        table:   [N, row_bytes] uint8, C-contiguous; may be shared memory
        windows: T tokens; its arrays must not change until the ticket is done
        out:     [T, C, row_bytes] uint8, C-contiguous, owned by the caller, overwritten until the ticket is done

        Raises the errors of `treadle.kernels.lookup` with `out` untouched; ResourceExhausted when `tickets_max` are queued;
        Unavailable once the queue is closed.
        """
        check_lookup(plan, table, windows, out)
        return self._ticket(self._open_engine().submit_lookup(plan, table, windows, out, _checked_ns(deadline)), deadline, out)

    def submit_gather(
        self, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], deadline: Deadline
    ) -> Ticket:
        """Copy table[rows] into `out`; returns at once.

        table: [N, row_bytes] uint8, C-contiguous; may be shared memory
        rows:  [...] int64, C-contiguous; must not change until the ticket is done
        out:   [..., row_bytes] uint8, C-contiguous, owned by the caller, overwritten until the ticket is done

        Raises the errors of `treadle.kernels.gather_rows` with `out` untouched; ResourceExhausted when `tickets_max` are
        queued; Unavailable once the queue is closed.
        """
        check_gather(table, rows, out)
        return self._ticket(self._open_engine().submit_gather(table, rows, out, _checked_ns(deadline)), deadline, out)

    def stats(self) -> dict[str, float]:
        """Counters: tickets_total, pieces_total, queued (tickets with pieces left), busy_seconds (summed over the workers)."""
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

    def _open_engine(self) -> _Engine:
        self.check_process()
        if not self._closing.alive:
            raise Unavailable("queue: closed")
        return self._engine

    def _ticket(self, ticket: _Ticket | None, deadline: Deadline, out: NDArray[np.uint8]) -> Ticket:
        if ticket is not None:
            return Ticket(self, ticket, deadline, out.size // out.shape[-1])
        stats = self._engine.stats()
        seconds = stats["busy_seconds"] / max(1, stats["tickets_total"]) / self._workers  # until the next place is free
        raise ResourceExhausted(
            f"queue: {self._tickets_max} tickets are queued, the limit tickets_max", max(RETRY_SECONDS_MIN, seconds)
        )


class Ticket:
    """A submitted lookup or gather. It holds the queue, and until it is done all its arrays; made by `DeadlineQueue` only.

    deadline: what it was submitted with
    """

    __slots__ = ("_queue", "_row_count", "_ticket", "deadline")

    def __init__(self, queue: DeadlineQueue, ticket: _Ticket, deadline: Deadline, row_count: int) -> None:
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


def _make_engine(implementation: Implementation, workers: int, tickets_max: int, piece_rows: int) -> _Engine:
    if implementation == "python":
        return fallback.Engine(workers, tickets_max, piece_rows)
    engine: _Engine = native_module().Engine(workers, tickets_max, piece_rows)
    return engine


def _close_engine(engine: _Engine, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child has no threads to join
        engine.close()


def _check_limit(name: str, value: int, limit: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= limit:
        raise InvalidArgument(f"{name}: 1 to {limit}, got {value!r}")


def _checked_ns(deadline: Deadline) -> int:
    if not isinstance(deadline, Deadline) or not 0 <= deadline.at_ns < 1 << 63:
        raise InvalidArgument(f"deadline: a Deadline of 0 to 2^63 - 1 ns expected, got {deadline!r}")
    return deadline.at_ns
