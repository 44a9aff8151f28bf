"""Prefetch of one engine step: all Engram layers at its start, each with the deadline that its layer has shown before.

Numpy only, so that every engine can use it. One step at a time; not thread-safe.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.ticket import LayerRows, LookupTicket, Rows
from treadle.contract import Deadline, InvalidArgument, TreadleError, WaitPolicy, Windows

RECORDS_MAX = 8192  # tickets whose times are kept for percentiles, for each layer
FIRST_GUESS_SECONDS_PER_LAYER = 100e-6  # until a layer has been seen to start; small, so that nothing is put off
LEARNING_RATE = 0.2  # of the moving average: five steps forget a change of batch


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


class _LayerRecord:
    """Counts and last times of one layer, and when it starts after the step does, by step size."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._starts: dict[int, float] = {}  # bit length of the token count -> seconds: at most 21 entries
        self.tickets = self.tickets_in_time = self.row_bytes = self.rows_missing = 0
        self.stall_seconds = 0.0
        self._gathers: deque[float] = deque(maxlen=RECORDS_MAX)
        self._slacks: deque[float] = deque(maxlen=RECORDS_MAX)

    def expected_start_seconds(self, token_count: int) -> float:
        return self._starts.get(token_count.bit_length(), FIRST_GUESS_SECONDS_PER_LAYER * self._layer)

    def started(self, token_count: int, seconds: float) -> None:
        bucket = token_count.bit_length()
        known = self._starts.get(bucket, seconds)
        self._starts[bucket] = known + LEARNING_RATE * (seconds - known)

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
    """Prefetches for the steps of one engine.

    policy:   how long to wait at a layer, then what; a step may give its own
    prefetch: False: rows are looked up when the layer asks, to prove that prefetching changes no bit
    """

    def __init__(self, handle: EngramHandle, *, policy: WaitPolicy | None = None, prefetch: bool = True) -> None:
        self._handle, self._policy, self._prefetch = handle, policy or WaitPolicy(), prefetch
        self._records = {layer: _LayerRecord(layer) for layer in handle.layers}
        self._buffers: dict[int, Rows] = {}
        self._step: Step | None = None

    @property
    def handle(self) -> EngramHandle:
        """The version that every step of this prefetcher uses."""
        return self._handle

    def begin(self, windows: Windows) -> Step:
        """Start the lookups of a step; call it as soon as the step's tokens are known.

        Rows of the step before are no longer valid. The arrays of `windows` are borrowed until the step has finished.
        """
        if self._step is not None:
            self._step.finish()
        begun_ns, outs = time.monotonic_ns(), self._outs(windows.token_count)
        deadlines = {
            layer: Deadline.after(record.expected_start_seconds(windows.token_count), now_ns=begun_ns)
            for layer, record in self._records.items()
        }
        ticket = self._handle.prefetch(windows, deadlines, outs) if self._prefetch else None
        self._step = Step(self, windows, begun_ns, outs, ticket, deadlines)
        return self._step

    def figures(self) -> dict[int, LayerFigures]:
        """What each layer's tickets have done since the start."""
        return {layer: record.figures() for layer, record in self._records.items()}

    def _outs(self, token_count: int) -> dict[int, Rows]:
        """Views of buffers that are kept from step to step and grow to the largest step seen."""
        for layer in self._handle.layers:
            kept = self._buffers.get(layer)
            if kept is None or len(kept) < token_count:
                self._buffers[layer] = self._handle.rows_buffer(token_count)
        return {layer: buffer[:token_count] for layer, buffer in self._buffers.items()}


class Step:
    """One step: its windows and its tickets. Made by StepPrefetcher.begin."""

    def __init__(
        self, owner: StepPrefetcher, windows: Windows, begun_ns: int, outs: Mapping[int, Rows], ticket: LookupTicket | None,
        deadlines: Mapping[int, Deadline],
    ) -> None:  # fmt: skip
        self._owner, self._windows, self._begun_ns, self._outs, self._ticket = owner, windows, begun_ns, outs, ticket
        self._deadlines = deadlines

    def rows(self, layer: int, policy: WaitPolicy | None = None) -> LayerRows:
        """Rows of `layer`, waited for by `policy` (None: the prefetcher's). Call it when the layer is about to start, once.

        The rows are valid until the next `begin`. Raises DeadlineExceeded under the policy `fail`, InvalidArgument for a
        layer without a table.
        """
        if layer not in self._outs:
            raise InvalidArgument(f"layer {layer} has no table; Engram layers are {sorted(self._outs)}")
        record = self._owner._records[layer]
        record.started(self._windows.token_count, (time.monotonic_ns() - self._begun_ns) / 1e9)
        failure: TreadleError | None = None
        if self._ticket is None:
            taken = self._look_up_now(layer)
        else:
            taken, failure = self._ticket.settle_layer(layer, policy or self._owner._policy)
        record.took(taken)  # also when it failed: a missed ticket that nobody counts would make "in time" look perfect
        if failure is not None:
            raise failure
        return taken

    def finish(self) -> None:
        """End the step; lookups that nobody asked for are stopped. Safe to call twice."""
        if self._ticket is not None:
            self._ticket.cancel()

    def _look_up_now(self, layer: int) -> LayerRows:
        asked_ns = time.monotonic_ns()
        rows = self._owner._handle.lookup(self._windows, self._outs, [layer])[layer]
        finished_ns = time.monotonic_ns()
        seconds = (finished_ns - asked_ns) / 1e9
        return LayerRows(rows, None, False, seconds, self._deadlines[layer].slack_of(finished_ns), seconds)
