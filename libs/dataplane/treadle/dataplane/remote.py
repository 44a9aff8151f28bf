"""Lookups over owners on other hosts: one native thread a process, tickets as everywhere.

Owns checks, errors and the process's one hub. Does not know who the owners are, nor how a table is spread (its callers).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import (
    Deadline,
    InvalidArgument,
    ResourceExhausted,
    RowOutOfRange,
    TreadleError,
    Unavailable,
    Windows,
)
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane.admission import Reason, Verdict, refusal
from treadle.dataplane.extension import native_module
from treadle.dataplane.faults import Fault, error_of
from treadle.dataplane.socket import numeric_address, token_digest
from treadle.kernels import HashPlan
from treadle.kernels.arguments import check_tokens, check_windows

OWNERS_MAX = 64  # of one version at once
REPLICAS_MAX = 16
_COUNTERS = tuple(
    f"{name}_total"
    for name in ("requests", "hedges", "hedges_won", "hedges_unpaid", "failovers", "late", "bytes", "connects", "losses")
)
_RETRY_SECONDS = 0.01  # when a place among the requests in flight is likely to be free


@dataclass(frozen=True, slots=True, eq=False)
class RemoteLayer:
    """A table that others hold. columns: rows of a token; plan: to hash here, which a spread table needs; None: owners hash."""

    number: int
    row_count: int
    row_bytes: int
    columns: int
    plan: HashPlan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Who holds which rows of one table.

    bounds: int64 [S + 1], rising from 0 to the number of rows: stretch s is rows [bounds[s], bounds[s + 1])
    owners: int32 [S, R], indices given by `add_owner`, the first choice first; -1: none
    """

    bounds: NDArray[np.int64]
    owners: NDArray[np.int32]


class RemoteTicket:
    """A started lookup of one layer; see `treadle.client.engram.ticket.LayerTicket`. Made by `RemoteRows` only."""

    __slots__ = ("_native", "_process_id", "deadline")

    def __init__(self, native: Any, deadline: Deadline) -> None:
        self._native, self._process_id, self.deadline = native, os.getpid(), deadline

    @property
    def submitted_ns(self) -> int:
        """When it was started (time.monotonic_ns())."""
        value: int = self._native.submitted_ns
        return value

    @property
    def started_ns(self) -> int:
        """The same: owners are asked at once."""
        value: int = self._native.started_ns
        return value

    @property
    def finished_ns(self) -> int:
        """When the last row was there, or it ended otherwise; 0: not yet."""
        value: int = self._native.finished_ns
        return value

    @property
    def done(self) -> bool:
        """Nothing more will be written to `out`."""
        ended: bool = self._native.ended
        return ended

    def wait(self, seconds: float) -> bool:
        """True once all rows are there, False after `seconds` or when it was cancelled. Other Python threads run meanwhile.

        Raises Unavailable, DeadlineExceeded, ResourceExhausted, DataLoss: what the last owner said, when none was left to ask.
        """
        if not 0 <= seconds <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"seconds: 0 to {WAIT_SECONDS_MAX}, got {seconds}")
        if os.getpid() != self._process_id:
            raise InvalidArgument("ticket: of the process that was forked; start processes with the spawn method")
        came: bool = self._native.wait(seconds)
        if not came and self._native.fault:
            raise self._error()
        return came

    def cancel(self) -> NDArray[np.bool_]:
        """End it; [rows, flat] bool: True where the row is in `out`, which is the caller's again."""
        there: NDArray[np.bool_] = self._native.cancel()
        return there

    def fileno(self) -> int:
        """An eventfd, readable once it is done; made on first use, closed by `close()`. Raises ResourceExhausted."""
        try:
            descriptor: int = self._native.fileno()
        except OSError as error:
            raise ResourceExhausted(f"fileno: the system grants no eventfd: {error}") from error
        return descriptor

    def close(self) -> None:
        """Give the eventfd back."""
        self._native.close()

    def _error(self) -> TreadleError:
        native = self._native
        if native.fault == Fault.NOT_FOUND:
            return Unavailable("lookup: no owner has this version any more; open the model again")
        if native.fault in (Fault.REFUSED, Fault.LATE) and native.reason:
            verdict = Verdict(native.fault, native.predicted_finish_ns, native.retry_after_ns, Reason(native.reason))
            return refusal(verdict, "lookup at its owner", self.submitted_ns, self.deadline.at_ns)
        said = native.said.decode(errors="replace")
        if native.fault == Fault.REFUSED and said:
            return ResourceExhausted(f"lookup: {said}", native.retry_after_ns / 1e9 or None)
        return error_of(native.fault, "lookup", said)


class RemoteRows:
    """Rows of one version that owners hold. Thread-safe but for `close`, which ends what is in flight.

    version:     hexadecimal digest of the manifest
    fingerprint: `Fingerprint.digest`
    token:       shown to owners; None: none
    layers:      all tables of the version

    Raises Unavailable where the native extension was not built.
    """

    def __init__(self, version: str, fingerprint: bytes, layers: Sequence[RemoteLayer], *, token: str | None = None) -> None:
        self._layers = {layer.number: layer for layer in layers}
        described = [(layer.number, layer.row_count, layer.row_bytes, layer.plan) for layer in layers]
        self._native: Any = native_module().RemoteClient(
            _hub(), bytes.fromhex(version), fingerprint, token_digest(token), described
        )
        self._process_id, self._owners = os.getpid(), 0
        self._closing = weakref.finalize(self, _close, self._native, self._process_id)

    def add_owner(self, address: str) -> int:
        """Know another owner, host:port or unix:PATH; its index. Asked at once where no routes are set. Raises ResourceExhausted."""
        index: int = self._native.add_owner(numeric_address(address))
        if index < 0:
            raise ResourceExhausted(f"owners: {OWNERS_MAX} are known, the limit; remove one first")
        self._owners = max(self._owners, index + 1)
        return index

    def remove_owner(self, index: int) -> None:
        """Ask this owner for nothing more; what it is asked for now is still taken. Set routes without it first."""
        self._native.remove_owner(index)

    def set_routes(self, routes: Mapping[int, Route]) -> None:
        """Change who holds the rows of these layers, all at once; lookups in flight keep what they began with.

        Without routes every owner holds everything, and the first one that answers is asked.
        Raises InvalidArgument for bounds that do not cover a table, unknown owners, or a layer without a plan.
        """
        self._native.set_routes([self._checked(number, route) for number, route in routes.items()])

    def submit_lookup(
        self, windows: Windows, outs: Mapping[int, NDArray[np.uint8]], deadlines: Mapping[int, Deadline], give_up: Deadline,
        *, patience_seconds: float = 0.0,
    ) -> dict[int, RemoteTicket]:  # fmt: skip
        """Start a lookup of the layers in `deadlines`, one request to each owner; returns at once.

        outs:    u8 [T, C, row_bytes] by layer, C-contiguous, the tickets' until they end
        give_up: when tickets fail, whatever might still come
        patience_seconds: owners are told deadlines so much later, so that they do not refuse rows which the caller takes late
        Raises InvalidArgument, ResourceExhausted when too much is in flight, Unavailable once closed.
        """
        wanted = sorted(deadlines, key=lambda layer: deadlines[layer])
        for number in wanted:
            self._check_lookup(number, windows, outs[number])
        layers = [(number, outs[number], deadlines[number].at_ns) for number in wanted]
        tickets = self._native_of_this_process().submit_lookup(windows, layers, _patience_ns(patience_seconds), give_up.at_ns)
        if isinstance(tickets, int):
            raise _refusal(tickets)
        return {number: RemoteTicket(ticket, deadlines[number]) for number, ticket in zip(wanted, tickets, strict=True)}

    def submit_gather(
        self, layer: int, rows: NDArray[np.int64], out: NDArray[np.uint8], deadline: Deadline, give_up: Deadline, *,
        patience_seconds: float = 0.0,
    ) -> RemoteTicket:  # fmt: skip
        """Start a gather by id; returns at once. rows: [...] int64; out: u8 [..., row_bytes]. Errors as above, and RowOutOfRange."""
        known = self._layer(layer)
        if rows.dtype != np.int64 or not rows.flags.c_contiguous:
            raise InvalidArgument(f"rows: C-contiguous int64 expected, got {rows.dtype}")
        _check_out(out, (*rows.shape, known.row_bytes))
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= known.row_count):
            place = int(np.argmax((rows < 0) | (rows >= known.row_count)))
            raise RowOutOfRange(f"rows[{place}] is {int(rows.flat[place])}; the table has rows 0 to {known.row_count - 1}")
        tickets = self._native_of_this_process().submit_gather(
            layer, rows, out, deadline.at_ns, _patience_ns(patience_seconds), give_up.at_ns
        )
        if isinstance(tickets, int):
            raise _refusal(tickets)
        return RemoteTicket(tickets[0], deadline)

    def store(self, layer: int, give_up_seconds: float, *, patience_seconds: float = 0.0) -> Any:
        """A native store of one table's rows: each of its gathers asks the owners and waits, `give_up_seconds` at most, and
        `patience_seconds` past the deadline of the request that it is for. A request that was stopped is not waited for.

        For a process that serves rows which others hold. Usable until `close`.
        """
        self._layer(layer)
        return self._native.store(layer, round(give_up_seconds * 1e9), _patience_ns(patience_seconds))

    def close(self) -> None:
        """End what is in flight as cancelled. Nobody writes to a buffer afterwards. A second call does nothing."""
        self._closing()

    def _native_of_this_process(self) -> Any:
        if os.getpid() != self._process_id:
            raise InvalidArgument("rows: opened in the process that was forked; start processes with the spawn method")
        return self._native

    def _layer(self, number: int) -> RemoteLayer:
        if number not in self._layers:
            raise InvalidArgument(f"layer {number}: the version has layers {sorted(self._layers)}")
        return self._layers[number]

    def _check_lookup(self, number: int, windows: Windows, out: NDArray[np.uint8]) -> None:
        known = self._layer(number)
        _check_out(out, (windows.token_count, known.columns, known.row_bytes))
        if known.plan is not None and windows.token_count:
            check_windows(known.plan, windows)
            check_tokens(known.plan, windows)

    def _checked(self, number: int, route: Route) -> tuple[int, NDArray[np.int64], NDArray[np.int32]]:
        known, bounds, owners = self._layer(number), route.bounds, route.owners
        if known.plan is None:
            raise InvalidArgument(f"layer {number}: a table that is spread needs a hash plan here")
        if (
            bounds.dtype != np.int64
            or bounds.ndim != 1
            or bounds[0] != 0
            or bounds[-1] != known.row_count
            or np.any(np.diff(bounds) <= 0)
        ):
            raise InvalidArgument(f"layer {number}: bounds are int64, rising from 0 to {known.row_count}")
        if owners.dtype != np.int32 or owners.shape[0] != len(bounds) - 1 or not 1 <= owners.shape[1] <= REPLICAS_MAX:
            raise InvalidArgument(
                f"layer {number}: owners are int32 [{len(bounds) - 1}, 1 to {REPLICAS_MAX}], got {list(owners.shape)}"
            )
        if int(owners.max()) >= self._owners or int(owners.min()) < -1:
            raise InvalidArgument(f"layer {number}: owners are below {self._owners}, or -1 for none")
        return number, np.ascontiguousarray(bounds), np.ascontiguousarray(owners)


def remote_stats() -> dict[str, int]:
    """Counters of this process: requests_total, hedges_total, hedges_won_total, hedges_unpaid_total, failovers_total, late_total
    (layers that came past their deadline), bytes_total, connects_total, losses_total (connections). Starts no thread for it."""
    hub = _hubs.get(os.getpid())
    counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0) if hub is None else hub.stats()
    return counters


_hub_lock = threading.Lock()
_hubs: dict[int, Any] = {}  # by process: a forked child makes its own


def _hub() -> Any:
    with _hub_lock:
        process_id = os.getpid()
        if process_id not in _hubs:
            _hubs.clear()
            try:
                _hubs[process_id] = hub = native_module().RemoteHub()
            except OSError as error:
                raise ResourceExhausted(f"remote: the system grants no thread or descriptor: {error}") from error
            atexit.register(_close, hub, process_id)
        return _hubs[process_id]


def _close(native: Any, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child has not the thread
        native.close()


def _refusal(fault: int) -> TreadleError:
    if fault == Fault.REFUSED:
        return ResourceExhausted("lookup: too many are in flight in this process", _RETRY_SECONDS)
    return Unavailable("lookup: the rows were closed")


def _patience_ns(seconds: float) -> int:
    if not 0 <= seconds <= WAIT_SECONDS_MAX:
        raise InvalidArgument(f"patience_seconds: 0 to {WAIT_SECONDS_MAX}, got {seconds}")
    return round(seconds * 1e9)


def _check_out(out: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
    if out.dtype != np.uint8 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise InvalidArgument(f"out: writable C-contiguous u8 {list(shape)} expected, got {out.dtype} {list(out.shape)}")
