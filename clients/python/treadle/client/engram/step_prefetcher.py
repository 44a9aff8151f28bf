"""Prefetch of one engine step: all Engram layers of all its memories at its start, each with the deadline that its layer has
shown before.

Numpy only, so that every engine can use it. One step at a time; not thread-safe, but for `figures`.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.patience import Patience
from treadle.client.engram.ticket import LayerRows, LookupTicket, Rows
from treadle.contract import Deadline, InvalidArgument, TreadleError, WaitPolicy, Windows
from treadle.dataplane import DeadlineQueue

RECORDS_MAX = 8192  # tickets whose times are kept for percentiles, for each layer
FIRST_GUESS_SECONDS_PER_LAYER = 100e-6  # until a layer has been seen to start; small, so that nothing is put off
LEARNING_RATE = 0.2  # of the moving average: five steps forget a change of batch
BUFFERS_MAX = 128  # kept for later steps, one for each layer and row shape; beyond it those that a step does not use go


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What one layer's tickets have done. Percentiles over the last RECORDS_MAX tickets; seconds; bytes of rows."""

    tickets: int
    tickets_in_time: int
    gather_seconds_p50: float
    gather_seconds_p99: float
    slack_seconds_p50: float
    slack_seconds_p01: float
    stall_seconds: float
    row_bytes: int
    rows_missing: int


LookupGroup = tuple[EngramHandle, Windows]  # a memory, open until the step has finished, and the tokens that use it


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What came for one group at one layer: its rows, or the error that kept them from coming. `group`: its place in the step."""

    group: int
    rows: LayerRows | None
    error: TreadleError | None


class _LayerStarts:
    """When one layer starts after the step does, by step size; the same for all memories."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._seconds: dict[int, float] = {}  # bit length of the token count -> seconds: at most 21 entries

    def expected_seconds(self, token_count: int) -> float:
        return self._seconds.get(token_count.bit_length(), FIRST_GUESS_SECONDS_PER_LAYER * self._layer)

    def happened(self, token_count: int, seconds: float) -> None:
        bucket = token_count.bit_length()
        known = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = known + LEARNING_RATE * (seconds - known)


class _LayerRecord:
    """Counts and last times of one layer of one handle."""

    def __init__(self) -> None:
        self.tickets = self.tickets_in_time = self.row_bytes = self.rows_missing = 0
        self.stall_seconds = 0.0
        self._gathers: deque[float] = deque(maxlen=RECORDS_MAX)
        self._slacks: deque[float] = deque(maxlen=RECORDS_MAX)

    def took(self, rows: LayerRows) -> None:
        self.tickets += 1
        self.tickets_in_time += rows.in_time
        self.stall_seconds += rows.stall_seconds
        self.row_bytes += rows.rows.nbytes
        self.rows_missing += 0 if rows.missing is None else int(rows.missing.sum())
        self._gathers.append(rows.gather_seconds)
        self._slacks.append(rows.slack_seconds)

    def figures(self) -> LayerFigures:
        gather = np.percentile(list(self._gathers) or [0.0], [50, 99])
        slack = np.percentile(list(self._slacks) or [0.0], [50, 1])
        return LayerFigures(
            self.tickets, self.tickets_in_time, float(gather[0]), float(gather[1]), float(slack[0]), float(slack[1]),
            self.stall_seconds, self.row_bytes, self.rows_missing,
        )  # fmt: skip


class StepPrefetcher:
    """Prefetches for the steps of one engine, whatever the number of memories: all mapped and local rows are gathered by one queue.

    handle:   the version that `begin` uses; None: steps name theirs, with `begin_groups`
    policy:   how long to wait at a layer, then what; a step may give its own
    prefetch: False: rows are looked up when the layer asks, to prove that prefetching changes no bit
    workers:  native gather threads of the queue
    """

    def __init__(
        self, handle: EngramHandle | None = None, *, policy: WaitPolicy | None = None, prefetch: bool = True, workers: int = 1
    ) -> None:
        self._handle, self._policy, self._prefetch = handle, policy or WaitPolicy(), prefetch
        self._queue = DeadlineQueue(workers=workers)
        self._starts: dict[int, _LayerStarts] = {}
        # A handle that is forgotten takes its records along: closed memories leave nothing here.
        self._records: weakref.WeakKeyDictionary[EngramHandle, dict[int, _LayerRecord]] = weakref.WeakKeyDictionary()
        self._patiences: weakref.WeakKeyDictionary[EngramHandle, Patience] = weakref.WeakKeyDictionary()
        self._totals: dict[int, _LayerRecord] = {}  # of all memories, those that are forgotten too
        self._buffers: dict[tuple[int, int, int], Rows] = {}
        self._step: Step | None = None

    @property
    def handle(self) -> EngramHandle:
        """The version that `begin` uses. Raises InvalidArgument for a prefetcher without one."""
        if self._handle is None:
            raise InvalidArgument("this prefetcher has no handle of its own; name a step's memories with begin_groups")
        return self._handle

    def begin(self, windows: Windows) -> Step:
        """Start the lookups of a step whose tokens all use `handle`; call it as soon as the step's tokens are known.

        Rows of the step before are no longer valid. The arrays of `windows` are borrowed until the step has finished.
        Raises what kept the lookup from starting.
        """
        step = self.begin_groups([(self.handle, windows)], windows.token_count)
        if step.refusals[0] is not None:
            raise step.refusals[0]
        return step

    def begin_groups(self, groups: Sequence[LookupGroup], token_count: int) -> Step:
        """Start the lookups of a step whose tokens use several memories, or some of them none.

        groups:      (handle, windows) of each memory: its tokens, with what came before them; tokens in no group are not
                     looked up, and a handle stays open until the step has finished
        token_count: of the whole step: what the start of a layer depends on
        As `begin`, but a group whose lookup cannot start keeps its error for `Step.group_rows`, and the others go on.
        """
        if self._step is not None:
            self._step.finish()
        begun_ns, outs = time.monotonic_ns(), self._outs(groups)
        deadlines = {
            layer: Deadline.after(self._start_of(layer).expected_seconds(token_count), now_ns=begun_ns)
            for layer in sorted({layer for handle, _ in groups for layer in handle.layers})
        }
        self._step = Step(self, tuple(groups), token_count, begun_ns, outs, deadlines)
        if self._prefetch:
            self._step.start(self._queue)
        return self._step

    def hint(self, handle: EngramHandle, windows: Windows) -> int:
        """Say which tokens steps to come will look up in `handle`, as `EngramHandle.hint`; gathered by the steps' own queue. Any thread."""
        return handle.hint(windows, self._queue)

    def figures(self, handle: EngramHandle | None = None) -> dict[int, LayerFigures]:
        """What the tickets of each layer of `handle` (None: the prefetcher's own) have done since the start. Any thread."""
        of = self.handle if handle is None else handle
        return {layer: record.figures() for layer, record in self._records_of(of).items()}

    def layer_figures(self) -> dict[int, LayerFigures]:
        """What the tickets of each layer have done since the start, those of all memories together. Any thread."""
        return {layer: record.figures() for layer, record in sorted(self._totals.copy().items())}

    def _patience_of(self, handle: EngramHandle) -> Patience:
        patience = self._patiences.get(handle)
        return self._patiences.setdefault(handle, Patience()) if patience is None else patience

    def _took(self, handle: EngramHandle, layer: int, rows: LayerRows) -> None:
        """Count a ticket for its memory and for its layer."""
        self._records_of(handle)[layer].took(rows)
        self._totals.setdefault(layer, _LayerRecord()).took(rows)

    def _records_of(self, handle: EngramHandle) -> dict[int, _LayerRecord]:
        records = self._records.get(handle)
        if records is None:
            records = self._records.setdefault(handle, {layer: _LayerRecord() for layer in handle.layers})
        return records

    def _start_of(self, layer: int) -> _LayerStarts:
        return self._starts.setdefault(layer, _LayerStarts(layer))

    def _outs(self, groups: Sequence[LookupGroup]) -> list[dict[int, Rows]]:
        """Where each group's rows go: views of buffers that are kept from step to step and grow to the largest step seen."""
        outs: list[dict[int, Rows]] = [{} for _ in groups]
        needed: dict[tuple[int, int, int], int] = {}
        places: list[tuple[int, tuple[int, int, int], int, int]] = []
        for index, (handle, windows) in enumerate(groups):
            model, count = handle.model, windows.token_count
            for layer in handle.layers:
                shape = (layer, model.columns, model.row.bytes)
                first = needed.get(shape, 0)
                places.append((index, shape, first, first + count))
                needed[shape] = first + count
        self._make_room(needed)
        for index, shape, first, end in places:
            outs[index][shape[0]] = self._buffers[shape][first:end]
        return outs

    def _make_room(self, needed: Mapping[tuple[int, int, int], int]) -> None:
        if len(self._buffers.keys() | needed.keys()) > BUFFERS_MAX:
            self._buffers = {shape: kept for shape, kept in self._buffers.items() if shape in needed}
        for shape, count in needed.items():
            kept = self._buffers.get(shape)
            if kept is None or len(kept) < count:
                self._buffers[shape] = np.empty((count, *shape[1:]), dtype=np.uint8)


class Step:
    """One step: its groups and their tickets. Made by StepPrefetcher.

    refusals: for each group the error that kept its lookup from starting, or None
    """

    def __init__(
        self, owner: StepPrefetcher, groups: tuple[LookupGroup, ...], token_count: int, begun_ns: int,
        outs: Sequence[Mapping[int, Rows]], deadlines: Mapping[int, Deadline],
    ) -> None:  # fmt: skip
        self._owner, self._groups, self._token_count, self._begun_ns = owner, groups, token_count, begun_ns
        self._outs, self._deadlines = outs, deadlines
        self._tickets: list[LookupTicket | None] = [None] * len(groups)
        self.refusals: list[TreadleError | None] = [None] * len(groups)

    def start(self, queue: DeadlineQueue) -> None:
        """Submit every group's layers; called once, by the prefetcher."""
        for index, (handle, windows) in enumerate(self._groups):
            deadlines = {layer: self._deadlines[layer] for layer in handle.layers}
            try:
                self._tickets[index] = handle.prefetch(windows, deadlines, self._outs[index], queue)
            except TreadleError as error:
                self.refusals[index] = error

    def rows(self, layer: int, policy: WaitPolicy | None = None) -> LayerRows:
        """Rows of `layer` in a step of one memory, waited for by `policy` (None: the prefetcher's). Call it when the layer is
        about to start, once.

        The rows are valid until the next step. Raises DeadlineExceeded under the policy `fail`, InvalidArgument for a
        layer without a table, or a step of several memories.
        """
        if len(self._groups) != 1:
            raise InvalidArgument(f"this step has {len(self._groups)} memories; take their rows with group_rows")
        if layer not in self._deadlines:
            raise InvalidArgument(f"layer {layer} has no table; Engram layers are {sorted(self._deadlines)}")
        (got,) = self.group_rows(layer, [policy or self._owner._policy])
        if got.error is not None:
            raise got.error
        assert got.rows is not None
        return got.rows

    def group_rows(self, layer: int, policies: Sequence[WaitPolicy]) -> list[GroupRows]:
        """Rows of `layer` for the groups that have a table there, in order. Call it when the layer is about to start, once.

        policies: one for each group of the step. All waits count from now: one after the other they take no longer than
                  the longest of them. A memory that was waited for in vain for IN_VAIN_SECONDS_MAX is waited for briefly, until
                  its rows come again.
        The rows are valid until the next step. Raises InvalidArgument for a layer that was taken already, or if the
        number of policies differs; every other error stands in its group's answer.
        """
        if len(policies) != len(self._groups):
            raise InvalidArgument(f"policies: {len(self._groups)}, one for each group, expected; got {len(policies)}")
        needed_ns = time.monotonic_ns()
        if layer in self._deadlines:
            self._owner._start_of(layer).happened(self._token_count, (needed_ns - self._begun_ns) / 1e9)
        return [
            self._take(index, layer, policies[index], needed_ns)
            for index, (handle, _) in enumerate(self._groups)
            if layer in handle.layers
        ]

    def finish(self) -> None:
        """End the step; lookups that nobody asked for are stopped. Safe to call twice."""
        for ticket in self._tickets:
            if ticket is not None:
                ticket.cancel()

    def _take(self, index: int, layer: int, policy: WaitPolicy, needed_ns: int) -> GroupRows:
        ticket, refusal = self._tickets[index], self.refusals[index]
        if refusal is not None:
            return GroupRows(index, None, refusal)
        taken: LayerRows
        failure: TreadleError | None = None
        if ticket is not None:
            spent_seconds = (time.monotonic_ns() - needed_ns) / 1e9
            patience = self._owner._patience_of(self._groups[index][0])
            left = WaitPolicy(max(0.0, patience.allowed_seconds(policy.wait_seconds_max) - spent_seconds), policy.late)
            taken, failure = ticket.settle_layer(layer, left, needed_ns)
            if taken.missing is None or taken.cause is None:  # an error that ends a wait says nothing about how long to wait
                patience.waited(taken.stall_seconds, in_vain=taken.missing is not None)
        else:
            try:
                taken = self._look_up_now(index, layer)
            except TreadleError as error:
                return GroupRows(index, None, error)
        # Also when it failed: a missed ticket that nobody counts would make "in time" look perfect.
        self._owner._took(self._groups[index][0], layer, taken)
        return GroupRows(index, taken, failure)

    def _look_up_now(self, index: int, layer: int) -> LayerRows:
        (handle, windows), asked_ns = self._groups[index], time.monotonic_ns()
        rows = handle.lookup(windows, self._outs[index], [layer])[layer]
        finished_ns = time.monotonic_ns()
        seconds = (finished_ns - asked_ns) / 1e9
        return LayerRows(rows, None, False, seconds, self._deadlines[layer].slack_of(finished_ns), seconds)
