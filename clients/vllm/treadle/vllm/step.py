"""One step of the engine: rows of all its memories are looked up at its start, waited for before their layer, gated and fused.

Requests of a step may use different memories, or none. Owns what happens to a step's rows and what their absence means for each
request. Does not look up (the SDK's StepPrefetcher), open memories (`memories`) or know vLLM (`batch`, `runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.client.engram import StepPrefetcher
from treadle.client.engram.ticket import LayerRows
from treadle.contract.errors import DataLoss, DeadlineExceeded, NotFound, ResourceExhausted, TreadleError, Unavailable
from treadle.contract.policy import Late, WaitPolicy
from treadle.contract.windows import Windows
from treadle.nn.fusion_batch import FusionGroup, fuse_groups
from treadle.nn.kv import KeepsHistory
from treadle.vllm.memories import Memory
from treadle.vllm.outcomes import Failure, RequestOutcome, StepVerdict, TicketReport, because
from treadle.vllm.windows import Span

if TYPE_CHECKING:
    from treadle.vllm.prefix_step import RunningPrefix

# Why rows may not come although what was asked is right. Anything else (a key that is refused now) ends the requests, whatever their
# policy, and never the engine, which would take all others along.
ROWS_GONE = (Unavailable, ResourceExhausted, DeadlineExceeded, NotFound, DataLoss)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request from its first step to its end: its memory, its version fixed, and what it has met. Fields as in RequestOutcome."""

    memory: Memory | None
    policy: WaitPolicy
    tickets: int = 0
    tickets_in_time: int = 0
    rows_missing: int = 0
    missing_because: str = ""
    degraded: bool = False
    stall_seconds: float = 0.0
    error: Failure | None = None
    dirty_from: int | None = None  # of the step that runs: see StepVerdict
    prefix: RunningPrefix | None = None

    def verdict(self) -> StepVerdict:
        """What the step that is over did; the next begins clean."""
        used = self.memory.used if self.memory is not None else None
        outcome = RequestOutcome(
            used, self.tickets, self.tickets_in_time, self.rows_missing, self.missing_because, self.degraded, self.stall_seconds,
            self.error, self.prefix.used if self.prefix is not None else None,
        )  # fmt: skip
        dirty_from, self.dirty_from = self.dirty_from, None
        return StepVerdict(outcome, dirty_from)

    def missed(self, position: int, cause: TreadleError | None) -> None:
        """From this position on the request is made with rows missing."""
        self.degraded = True
        self.missing_because = self.missing_because or because(cause)
        self.dirty_from = position if self.dirty_from is None else min(position, self.dirty_from)


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """The requests of a step that use one memory.

    spans:   of their tokens, one for each request
    windows: of these tokens, in this order
    kv:      where the fusion keeps what it must see again, one for each request; empty where it keeps nothing
    """

    memory: Memory
    requests: Sequence[RunningRequest]
    spans: Sequence[Span]
    windows: Windows
    kv: Sequence[KeepsHistory]

    @property
    def places(self) -> NDArray[np.int64]:
        """Of the group's tokens in the flat batch."""
        return np.concatenate([np.arange(span.place, span.place + span.count, dtype=np.int64) for span in self.spans])


class EngramStep:
    """The rows of one step, of all its memories. A RunningStep of the operator."""

    def __init__(
        self, prefetcher: StepPrefetcher, groups: Sequence[StepGroup], token_count: int, wait_seconds_max: float,
        report: Callable[[TicketReport], None],
    ) -> None:  # fmt: skip
        """Starts the lookups.

        wait_seconds_max: longest wait at one layer; a request that allows more gets this
        report:           hears of every ticket
        """
        self._groups, self._wait_seconds_max, self._report = groups, wait_seconds_max, report
        self._layers = {layer for group in groups for layer in group.memory.model.layers}
        self._starts = [group.windows.starts.tolist() for group in groups]
        self._rows = prefetcher.begin_groups([(group.memory.handle, group.windows) for group in groups], token_count)
        for group in groups:
            group.memory.tokens += group.windows.token_count
        self._order, self._firsts = _side_by_side(groups, token_count)

    def wants(self, layer: int) -> bool:
        """See RunningStep."""
        return layer in self._layers

    def before_layer(self, layer: int, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """See RunningStep. hidden, residual: [T, width]; T may be more than the step's tokens, for padding."""
        policies = [WaitPolicy(self._wait_seconds(group), Late.MASK) for group in self._groups]
        fusing: list[FusionGroup] = []
        fused: list[int] = []
        for got in self._rows.group_rows(layer, policies):
            group, cause = self._groups[got.group], got.error or (got.rows.cause if got.rows is not None else None)
            if cause is not None:
                group.memory.rows_failed(cause)
            rows, live = self._settle(got.group, layer, got.rows, cause)
            rows, live = rows.to(hidden.device), None if live is None else live.to(hidden.device)
            fusing.append(FusionGroup(group.memory.fusion, self._firsts[got.group], rows, live, self._starts[got.group], group.kv))
            fused.append(got.group)
        order = None if self._order is None else self._order.to(hidden.device)
        stream = hidden if residual is None else hidden + residual
        deltas = fuse_groups(layer, stream if order is None else stream[order], fusing)
        out = hidden.clone()
        for index, part, delta in zip(fused, fusing, deltas, strict=True):
            if self._groups[index].memory.fused:
                if order is None:
                    out[part.tokens] += delta
                else:
                    out[order[part.tokens]] += delta
        return out

    def finish(self) -> None:
        """The step is over, whether it succeeded or not."""
        self._rows.finish()

    def _settle(self, index: int, layer: int, taken: LayerRows | None, cause: TreadleError | None) -> tuple[Tensor, Tensor | None]:
        """A group's rows and which of its tokens are live; what is missing is charged. cause: of the lookup's end."""
        group = self._groups[index]
        rows, missing = _none_came(group) if taken is None else (taken.rows, taken.missing)
        dead = group.windows.dead
        if missing is not None and dead is not None:
            missing = missing.copy()
            missing[dead] = False  # nobody wants the rows of a token that takes part in no n-gram
        lost = None if missing is None else np.asarray(missing.any(axis=1))
        ticket = _ticket(group, layer, taken, 0 if missing is None else int(missing.sum()))
        self._report(ticket)
        self._charge(index, ticket, missing, lost, cause)
        # The fusion was made for whole memories: a token of which a row is missing goes on without any.
        silent = lost if dead is None else dead if lost is None else lost | dead
        return torch.from_numpy(rows), None if silent is None else torch.from_numpy(~silent)

    def _charge(
        self, index: int, ticket: TicketReport, missing: NDArray[np.bool_] | None, lost: NDArray[np.bool_] | None,
        cause: TreadleError | None,
    ) -> None:  # fmt: skip
        """Write down for each request what the ticket did, and what its missing rows mean. lost: [t], tokens with a row missing"""
        group, starts = self._groups[index], self._starts[index]
        for request, span, first, end in zip(group.requests, group.spans, starts, starts[1:], strict=False):
            request.tickets += 1
            request.tickets_in_time += ticket.in_time
            request.stall_seconds += ticket.stall_seconds
            if lost is None or missing is None or not lost[first:end].any():
                continue
            absent = int(missing[first:end].sum())
            request.rows_missing += absent
            request.missed(span.first + int(np.argmax(lost[first:end])), cause)
            if request.error is None and cause is not None and not isinstance(cause, ROWS_GONE):
                request.error = Failure.of(cause)
            elif request.error is None and request.policy.late is Late.FAIL:
                request.error = _missing_error(ticket, absent, cause)

    def _wait_seconds(self, group: StepGroup) -> float:
        """How long this memory's rows may be waited for: as long as the most patient request that uses it allows, and at most
        `wait_seconds_max`: all requests of the step wait, so none of them decides alone."""
        return min(max(request.policy.wait_seconds_max for request in group.requests), self._wait_seconds_max)


def _side_by_side(groups: Sequence[StepGroup], token_count: int) -> tuple[Tensor | None, list[int]]:
    """Where each token of the groups, one group after the other, is in the batch, and where each group begins among these.

    None: they are the whole batch in its own order.
    """
    places = [group.places for group in groups]
    firsts = [0]
    for own in places:
        firsts.append(firsts[-1] + len(own))
    flat = np.concatenate(places)
    if len(flat) == token_count and np.array_equal(flat, np.arange(token_count)):
        return None, firsts[:-1]
    return torch.from_numpy(flat), firsts[:-1]


def _ticket(group: StepGroup, layer: int, taken: LayerRows | None, absent: int) -> TicketReport:
    memory = group.memory
    transport, came = memory.used.transport, group.windows.token_count * memory.model.columns - absent
    if taken is None or taken.cause is not None:  # nobody was slow: it has no slack to tell
        return TicketReport(layer, transport, False, came, absent, taken.stall_seconds if taken is not None else 0.0, None, None)
    gather_seconds = None if absent else taken.gather_seconds
    return TicketReport(layer, transport, taken.in_time, came, absent, taken.stall_seconds, taken.slack_seconds, gather_seconds)


def _none_came(group: StepGroup) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    shape = (group.windows.token_count, group.memory.model.columns)
    return np.zeros((*shape, group.memory.model.row.bytes), dtype=np.uint8), np.ones(shape, dtype=np.bool_)


def _missing_error(ticket: TicketReport, absent: int, cause: TreadleError | None) -> Failure:
    why = f"after a wait of {ticket.stall_seconds:.3g} s" if cause is None else f"({cause})"
    message = f"engram layer {ticket.layer}: {absent} rows missing {why}; try again, or ask for late = mask to go on without them"
    return Failure(Unavailable.__name__, message)
