"""Tickets of a lookup: one for each layer, whatever carries the rows, and what a policy makes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, Late, TreadleError, WaitPolicy

Rows = NDArray[np.uint8]


class LayerTicket(Protocol):
    """A started lookup of one layer. Times are time.monotonic_ns(), 0 = not yet."""

    @property
    def deadline(self) -> Deadline:
        """When the layer is expected to start."""

    @property
    def submitted_ns(self) -> int:
        """When it was started."""

    @property
    def started_ns(self) -> int:
        """When somebody began to work on it."""

    @property
    def finished_ns(self) -> int:
        """When the last row came."""

    @property
    def done(self) -> bool:
        """True once all rows are there."""

    def wait(self, seconds: float) -> bool:
        """Wait, without the GIL, until the rows are there; True if they are."""

    def cancel(self) -> NDArray[np.bool_]:
        """Stop; nobody writes to `out` any more. Returns bool [T * C]: True where the row is there."""

    def fileno(self) -> int:
        """A descriptor that is readable once the ticket has ended."""

    def close(self) -> None:
        """Let go of the descriptor."""


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer of one step.

    rows:          u8 [T, C, row_bytes]; zero where missing
    missing:       bool [T, C], True where a row never came (the request is then degraded); None: all are there
    in_time:       they were there when they were asked for
    stall_seconds: how long the caller waited
    slack_seconds: deadline minus completion; negative when late
    gather_seconds: from submission to the last row
    cause:         the error that ended the lookup before all rows were there; None: it did not fail, at most it was late
    """

    rows: Rows
    missing: NDArray[np.bool_] | None
    in_time: bool
    stall_seconds: float
    slack_seconds: float
    gather_seconds: float
    cause: TreadleError | None = None


class LookupTicket:
    """A prefetch in flight: a ticket and an `out` for each layer. Close it, or wait for every layer."""

    def __init__(self, tickets: Mapping[int, LayerTicket], outs: Mapping[int, Rows]) -> None:
        self._tickets, self._outs = dict(tickets), dict(outs)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers not yet taken."""
        return tuple(self._tickets)

    def wait(self, policy: WaitPolicy | None = None) -> dict[int, LayerRows]:
        """Take every layer that has not been taken. Raises DeadlineExceeded under the policy `fail`."""
        return {layer: self.wait_layer(layer, policy) for layer in self.layers}

    def wait_layer(self, layer: int, policy: WaitPolicy | None = None) -> LayerRows:
        """Wait for one layer, at most `policy.wait_seconds_max`; then mask or fail as the policy says.

        The rows are the `out` given at the start; nobody writes to it after this. Raises DeadlineExceeded under the policy
        `fail`, with the missing rows zeroed all the same, and whatever ended the lookup otherwise (a pool that is gone); under
        `mask` that is the rows' `cause`.
        """
        rows, failure = self.settle_layer(layer, policy or WaitPolicy())
        if failure is not None:
            raise failure
        return rows

    def settle_layer(self, layer: int, policy: WaitPolicy, needed_ns: int | None = None) -> tuple[LayerRows, TreadleError | None]:
        """`wait_layer` for callers that count: what came, and the error to raise where rows are missing and the policy is `fail`.

        needed_ns: when the layer needed its rows (time.monotonic_ns()), which is what `in_time` means; None: now
        """
        if layer not in self._tickets:
            raise InvalidArgument(f"layer {layer}: not prefetched, or taken already; left are {sorted(self._tickets)}")
        asked_ns = time.monotonic_ns()
        ticket, out = self._tickets.pop(layer), self._outs[layer]
        cause: TreadleError | None = None
        try:
            came = ticket.wait(policy.wait_seconds_max)
        except TreadleError as error:
            came, cause = False, error
        missing = None if came else _take_what_came(ticket, out)
        rows = _judge(ticket, out, missing, asked_ns, asked_ns if needed_ns is None else needed_ns, cause)
        if missing is None or policy.late is Late.MASK:
            return rows, None
        late = f"layer {layer}: {int(missing.sum())} of {missing.size} rows missing after {policy.wait_seconds_max:g} s"
        return rows, cause or DeadlineExceeded(late)

    async def arrived(self, layer: int) -> None:
        """Return once the rows of `layer` are there or the lookup has ended; for asyncio, without a thread."""
        loop, ticket = asyncio.get_running_loop(), self._tickets[layer]
        ended = asyncio.Event()
        descriptor = ticket.fileno()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)

    def cancel(self) -> None:
        """Stop what has not been taken; the buffers are the caller's again."""
        for layer in self.layers:
            ticket = self._tickets.pop(layer)
            ticket.cancel()
            ticket.close()


def _take_what_came(ticket: LayerTicket, out: Rows) -> NDArray[np.bool_] | None:
    """Stop the ticket, zero what did not come. Returns bool [T, C] of the missing, None if all came at the last moment."""
    missing = ~ticket.cancel().reshape(out.shape[:2])
    if not missing.any():
        return None
    out[missing] = 0
    return missing


def _judge(
    ticket: LayerTicket, out: Rows, missing: NDArray[np.bool_] | None, asked_ns: int, needed_ns: int, cause: TreadleError | None
) -> LayerRows:
    now_ns = time.monotonic_ns()
    finished_ns = ticket.finished_ns or now_ns
    deadline, submitted_ns = ticket.deadline, ticket.submitted_ns
    ticket.close()
    in_time = missing is None and finished_ns <= needed_ns
    stall_seconds = 0.0 if in_time else (now_ns - asked_ns) / 1e9
    gather_seconds = (finished_ns - submitted_ns) / 1e9
    failed = None if missing is None else cause
    return LayerRows(out, missing, in_time, stall_seconds, deadline.slack_of(finished_ns), gather_seconds, failed)
