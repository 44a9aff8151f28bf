"""Where rows come from: one contract, and the sources that gather in this process (mapped, local, fake).

A source owns its memory until `close()`. The gRPC source is in `rpc_source`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.hints import hint_pieces
from treadle.client.engram.pool_types import OpenedModel
from treadle.client.engram.ticket import LayerTicket, Rows
from treadle.contract import (
    DataLoss,
    Deadline,
    EngramModel,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Transport,
    TreadleError,
    Windows,
)
from treadle.contract.warm_state import WarmState
from treadle.dataplane import WORKERS_MAX, DeadlineQueue, Ticket
from treadle.dataplane.warming import PageWarmer, Warming
from treadle.kernels import HashPlan, gather_rows, lookup
from treadle.kernels.pages import HUGE_PAGE_BYTES, mapped_page_bytes
from treadle.kernels.segment import Segment


class RowSource(Protocol):
    """Rows of one version of one model."""

    transport: Transport

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """Copy rows by id. rows: [T, C]; out: [T, C, row_bytes], overwritten. Raises RowOutOfRange, `out` untouched."""

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """Hash and gather some layers, each into its `outs`."""

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """Start a lookup of the layers in `deadlines`; returns at once. `outs` belong to the tickets until they end.

        queue: of the caller, shared by many sources, for those that gather in this process; None: a queue of the source's own
        """

    def page_bytes(self) -> int:
        """Page size in use for the tables, bytes; 0 where they are not in this process."""

    def close(self) -> None:
        """Give the memory back; tickets still queued end as cancelled."""


@runtime_checkable
class HasBuffers(Protocol):
    """A source with memory of its own for rows."""

    def buffer(self, shape: tuple[int, ...]) -> Rows:
        """An `out` that rows go into without a copy. Raises ResourceExhausted."""


class TableSource:
    """Tables in this process's address space, gathered by a native deadline queue: the caller's, or one made at first need.

    workers: threads of the queue of its own; none run where callers bring theirs
    """

    def __init__(self, transport: Transport, model: EngramModel, tables: Mapping[int, Rows], token_map: NDArray[np.int32] | None,
                 *, workers: int = 1, warming: Warming | None = None) -> None:  # fmt: skip
        self.transport, self._warming = transport, warming
        self._tables = dict(tables)
        self._plans = {layer: HashPlan.from_model(model, layer, token_map) for layer in model.layers}
        for layer in model.layers:
            _check_table(layer, self._tables[layer], model)
        self._tickets = _Tickets(workers)
        self._closing = weakref.finalize(self, self._tickets.close)

    def own(self, memory: ExitStack) -> None:
        """Take over what the tables lie in: closed after the queue, also when this source is only forgotten."""
        memory.callback(self._tickets.close)
        self._closing.detach()
        self._closing = weakref.finalize(self, memory.close)

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """See RowSource."""
        gather_rows(self._tables[layer], rows, out)

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """See RowSource."""
        for layer in layers:
            lookup(self._plans[layer], self._tables[layer], windows, outs[layer])

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """See RowSource."""
        queue = self._tickets.queue if queue is None else queue
        tickets: dict[int, Ticket] = {}
        try:
            for layer in sorted(deadlines, key=lambda layer: deadlines[layer]):
                tickets[layer] = queue.submit_lookup(
                    self._plans[layer], self._tables[layer], windows, outs[layer], deadlines[layer]
                )
        except TreadleError:  # all or none: a ticket that nobody holds would write into a buffer that is used again
            for ticket in tickets.values():
                ticket.cancel()
            raise
        self._tickets.remember(tickets.values())
        return dict(tickets)

    @property
    def tables(self) -> dict[int, tuple[HashPlan, Rows]]:
        """By layer, how tokens become rows, and the rows; this source's, until it is closed."""
        return {layer: (self._plans[layer], table) for layer, table in self._tables.items()}

    @property
    def wants_hints(self) -> bool:
        """See TakesHints: while pages are not entered, and where the tables lie on a disk."""
        return self.warm_state is not WarmState.WARM

    def hint(self, windows: Windows, queue: DeadlineQueue | None = None) -> int:
        """See TakesHints."""
        if not self.wants_hints:
            return 0
        never, taken = dict.fromkeys(self._tables, Deadline.never()), 0
        for piece in hint_pieces(windows):
            outs = {
                layer: np.empty((piece.token_count, self._plans[layer].columns, table.shape[1]), dtype=np.uint8)
                for layer, table in self._tables.items()
            }
            try:
                self.submit(piece, outs, never, queue)
            except ResourceExhausted:  # a hint may be left: the lookup itself comes in any case
                break
            taken += piece.token_count
        return taken

    @property
    def warm_state(self) -> WarmState:
        """Whether all pages of its tables are entered in this process."""
        return WarmState.WARM if self._warming is None else self._warming.state

    def page_bytes(self) -> int:
        """See RowSource."""
        return min((mapped_page_bytes(table.ctypes.data) for table in self._tables.values()), default=0)

    def close(self) -> None:
        """See RowSource."""
        self._tables.clear()
        self._closing()


class _Tickets:
    """What a source has in flight, in whose queue ever, and the queue of its own."""

    def __init__(self, workers: int) -> None:
        if not 1 <= workers <= WORKERS_MAX:  # said now, though the threads start when the first lookup needs them
            raise InvalidArgument(f"workers: 1 to {WORKERS_MAX}, got {workers}")
        self._workers, self._lock = workers, threading.Lock()
        self._queue: DeadlineQueue | None = None
        self._in_flight: list[Ticket] = []

    @property
    def queue(self) -> DeadlineQueue:
        """The source's own queue, made when first asked for."""
        with self._lock:
            if self._queue is None:
                self._queue = DeadlineQueue(workers=self._workers)
            return self._queue

    def remember(self, tickets: Iterable[Ticket]) -> None:
        """Keep these until they are done."""
        with self._lock:
            self._in_flight = [ticket for ticket in self._in_flight if not ticket.done]
            self._in_flight += tickets

    def close(self) -> None:
        """Cancel what is left; nothing reads the tables afterwards."""
        with self._lock:
            for ticket in self._in_flight:
                ticket.cancel()
            self._in_flight = []
            if self._queue is not None:
                self._queue.close()


def mapped_source(opened: OpenedModel, *, workers: int = 1) -> TableSource:
    """Map the host's one copy, read-only, holding its lock. Its pages are entered in the background: gathers work meanwhile.

    Raises NotFound if the version left meanwhile or lies on another host, InvalidArgument if the pool holds a part of it only,
    DataLoss if a segment does not fit.
    """
    with ExitStack() as stack:
        segments = map_segments(opened, stack)
        model = opened.resident.model
        tables = {layer: segment.rows for layer, segment in segments.items()}
        token_map = segments[model.layers[0]].token_map
        warmer = PageWarmer()
        stack.callback(warmer.close)
        warming = warmer.warm([span for segment in segments.values() for span in segment.spans_to_enter()])
        source = TableSource(Transport.MAPPED, model, tables, token_map, workers=workers, warming=warming)
        source.own(stack.pop_all())  # only now: a source that could not be made must not keep the version's lock
        return source


def local_source(opened: OpenedModel, *, workers: int = 1) -> TableSource:
    """Copy the tables into private memory of this process, on huge pages where the kernel grants them."""
    with ExitStack() as stack:
        segments = map_segments(opened, stack)
        model = opened.resident.model
        tables = {layer: private_copy(segment.rows) for layer, segment in segments.items()}
        token_map = segments[model.layers[0]].token_map
        kept = None if token_map is None else token_map.copy()
        return TableSource(Transport.LOCAL, model, tables, kept, workers=workers)


def private_copy(table: Rows) -> Rows:
    """A copy of `table` in anonymous memory that asks for transparent huge pages."""
    size = -(-table.nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = np.frombuffer(memory, dtype=np.uint8, count=table.nbytes).reshape(table.shape)
    np.copyto(copy, table)
    return copy


class FakeSource:
    """Tables from arrays, with a delay, for tests of engines."""

    def __init__(
        self, model: EngramModel, tables: Mapping[int, Rows], token_map: NDArray[np.int32] | None, delay_seconds: float
    ) -> None:
        self.transport = Transport.FAKE
        self._inner = TableSource(Transport.FAKE, model, tables, token_map)
        self._delay_ns = round(delay_seconds * 1e9)

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """See RowSource."""
        self._inner.gather(layer, rows, out)

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """See RowSource."""
        self._inner.lookup(layers, windows, outs)

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """See RowSource."""
        tickets = self._inner.submit(windows, outs, deadlines, queue)
        return {layer: _DelayedTicket(ticket, outs[layer], self._delay_ns) for layer, ticket in tickets.items()}

    def page_bytes(self) -> int:
        """See RowSource."""
        return self._inner.page_bytes()

    def close(self) -> None:
        """See RowSource."""
        self._inner.close()


class _DelayedTicket:
    """A ticket whose rows count as absent until the delay is over."""

    def __init__(self, inner: LayerTicket, out: Rows, delay_ns: int) -> None:
        self._inner, self._delay_ns = inner, delay_ns
        self._rows = out.shape[0] * out.shape[1]
        self.deadline, self.submitted_ns, self.started_ns = inner.deadline, inner.submitted_ns, inner.submitted_ns

    @property
    def _due_ns(self) -> int:
        return self.submitted_ns + self._delay_ns

    @property
    def done(self) -> bool:
        return self._inner.done and time.monotonic_ns() >= self._due_ns

    @property
    def finished_ns(self) -> int:
        return max(self._inner.finished_ns, self._due_ns) if self.done else 0

    def wait(self, seconds: float) -> bool:
        until_ns = time.monotonic_ns() + round(seconds * 1e9)
        came = self._inner.wait(seconds)
        left_ns = min(until_ns, self._due_ns) - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        return came and self._due_ns <= until_ns

    def cancel(self) -> NDArray[np.bool_]:
        came = self._inner.cancel()
        return came if time.monotonic_ns() >= self._due_ns else np.zeros(self._rows, dtype=np.bool_)

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()


def map_segments(opened: OpenedModel, stack: ExitStack) -> dict[int, Segment]:
    """Map every segment, by layer, under the version's shared lock; both go with `stack`. Raises NotFound, InvalidArgument, DataLoss."""
    for place in opened.segments:
        if place.held:
            raise InvalidArgument(
                f"{opened.resident.model.name} {opened.resident.version}: this pool holds a part of layer {place.layer} only: "
                "other rows would read as zeros; ask all its owners"
            )
    if not opened.segments:
        raise NotFound(
            f"version {opened.resident.version}: this pool has no table to map, it serves those of others; open it by ring"
        )
    stack.callback(os.close, _hold_lock(opened))
    segments = {}
    for place in opened.segments:
        segment = stack.enter_context(Segment(place.path, place.segment_offset_bytes, place.file_bytes))
        segments[place.layer] = segment
        if (segment.row_count, segment.row_bytes) != (place.rows, place.row_bytes) or segment.held is not None:
            raise DataLoss(
                f"{place.path}: {segment.row_count} x {segment.row_bytes} bytes, the pool says {place.rows} x {place.row_bytes}"
            )
    return segments


def _hold_lock(opened: OpenedModel) -> int:
    """Take the shared lock of the version. The pool frees a version only under the exclusive lock."""
    try:
        descriptor = os.open(opened.lock_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"{opened.lock_path}: {error.strerror}; is the pool on this host, and its folder readable?") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:
            raise NotFound(f"version {opened.resident.version} was removed while it was being opened")
    except BlockingIOError as error:
        os.close(descriptor)
        raise NotFound(f"version {opened.resident.version} is being removed") from error
    except NotFound:
        os.close(descriptor)
        raise
    return descriptor


def _check_table(layer: int, table: Rows, model: EngramModel) -> None:
    needed = (model.rows_hashed(layer), model.row.bytes)
    if table.dtype != np.uint8 or table.ndim != 2 or table.shape[1] != needed[1] or table.shape[0] < needed[0]:
        raise InvalidArgument(f"layer {layer}: u8 [>= {needed[0]}, {needed[1]}] expected, got {table.dtype} {list(table.shape)}")
