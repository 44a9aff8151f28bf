"""Engram memories in one step: rows are looked up at its start, waited for before their layer, gated and fused.

Requests of one step may use different memories, or none: the slots of one memory lie side by side. Owns what happens to a
step's rows and what their absence means for each request. Does not look up (the prefetcher) or open anything (`catalogue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.errors import MemoryMissing
from inference_worker.domain.ports import LayerRows, Prefetcher
from inference_worker.domain.report import LayerReport
from inference_worker.domain.request import Request
from inference_worker.domain.scheduler import Slot
from inference_worker.domain.sequence import Sequence as RunningSequence
from inference_worker.domain.sequence import kv_of
from treadle.contract.errors import DataLoss, DeadlineExceeded, NotFound, ResourceExhausted, TreadleError, Unavailable
from treadle.contract.policy import Late, WaitPolicy
from treadle.contract.windows import BEFORE_SEQUENCE, Windows
from treadle.nn.fusion_batch import FusionGroup, fuse_groups

WAIT_SECONDS_MAX = 1.0  # at one layer, unless whoever runs the engine says otherwise: all requests of a step wait together
# Why rows may not come although what was asked is right, and the word for it in reports. Anything else is our bug, and fails the step.
ROWS_GONE: dict[type[TreadleError], str] = {
    Unavailable: "unavailable",
    ResourceExhausted: "refused",
    DeadlineExceeded: "late",
    NotFound: "gone",
    DataLoss: "damaged",
}


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """The slots of a step that use one memory.

    first:  of their tokens in the step
    starts: of the slots among the group's own tokens, starts[0] = 0
    """

    memory: EngramMemory
    slots: Sequence[Slot]
    first: int
    windows: Windows
    starts: list[int]


class EngramStep:
    """The rows of one step, of all its memories.

    failed: sequences whose rows are missing and who asked to fail then, with the error of each
    """

    def __init__(self, prefetcher: Prefetcher, groups: Sequence[StepGroup], token_count: int, wait_seconds_max: float) -> None:
        """Starts the lookups. `wait_seconds_max`: longest wait at one layer; a request that allows more gets this."""
        self._groups, self._wait_seconds_max = groups, wait_seconds_max
        self._layers = {layer for group in groups for layer in group.memory.model.layers}
        self.reports: list[LayerReport] = []
        self.failed: dict[RunningSequence, MemoryMissing] = {}
        self._rows = prefetcher.begin_groups([(group.memory.handle, group.windows) for group in groups], token_count)
        for group in groups:
            group.memory.tokens += group.windows.token_count

    def before_layer(self, layer: int, hidden: Tensor) -> Tensor:
        """The hook of the forward: at an Engram layer wait for its rows and fuse them; else `hidden` as it is."""
        if layer not in self._layers:
            return hidden
        policies = [WaitPolicy(self._wait_seconds(group), Late.MASK) for group in self._groups]
        taken, parts = [], []
        for got in self._rows.group_rows(layer, policies):
            group, cause = self._groups[got.group], got.error or (got.rows.cause if got.rows is not None else None)
            if cause is not None:
                if not isinstance(cause, tuple(ROWS_GONE)):
                    raise cause
                group.memory.rows_failed(cause)
            rows, live = self._settle(group, layer, got.rows, cause)
            kv = [kv_of(slot.sequence) for slot in group.slots]
            parts.append(FusionGroup(group.memory.fusion, group.first, rows, live, group.starts, kv))
            taken.append(group)
        deltas = fuse_groups(layer, hidden, parts)
        if not any(group.memory.fused for group in taken):
            return hidden
        out = hidden.clone()
        for group, part, delta in zip(taken, parts, deltas, strict=True):
            if group.memory.fused:
                out[part.tokens] += delta
        return out

    def finish(self) -> None:
        """The step is over, whether it succeeded or not."""
        self._rows.finish()

    def _settle(
        self, group: StepGroup, layer: int, taken: LayerRows | None, cause: TreadleError | None
    ) -> tuple[Tensor, Tensor | None]:
        """A group's rows and which of its tokens are live; what is missing is written down and charged. cause: of the lookup's end."""
        rows, missing = _none_came(group) if taken is None else (taken.rows, taken.missing)
        report = _report(group, layer, taken, 0 if missing is None else int(missing.sum()))
        self.reports.append(report)
        self._charge(group, report, missing, cause)
        # The fusion was made for whole memories: a token of which a row is missing goes on without any.
        live = None if missing is None else torch.from_numpy(~missing.any(axis=1))
        return torch.from_numpy(rows), live

    def _wait_seconds(self, group: StepGroup) -> float:
        """How long this memory's rows may be waited for: all requests of the step wait, so none of them decides alone.

        As long as the most patient request that uses it still allows, its own deadline included, and at most
        `wait_seconds_max`. A request that was cancelled has no say any more.
        """
        wanted = [slot.sequence.request for slot in group.slots if not slot.sequence.cancelled]
        return min(max((_patience_seconds(request) for request in wanted), default=0.0), self._wait_seconds_max)

    def _charge(self, group: StepGroup, report: LayerReport, missing: NDArray[np.bool_] | None, cause: TreadleError | None) -> None:
        """Write down for each request what the ticket did, and what its missing rows mean."""
        for slot, first, end in zip(group.slots, group.starts, group.starts[1:], strict=False):
            sequence = slot.sequence
            absent = 0 if missing is None else int(missing[first:end].sum())
            sequence.memory.tickets += 1
            sequence.memory.tickets_in_time += report.in_time
            sequence.memory.rows_missing += absent
            if absent:
                sequence.memory.missing_because = sequence.memory.missing_because or _because(cause)
                sequence.degraded = True
                if sequence.request.policy.late is Late.FAIL:
                    self.failed.setdefault(sequence, _missing_error(report, absent, cause))


def hint_prompt(prefetcher: Prefetcher, sequence: RunningSequence) -> int:
    """Tell where the rows lie which tokens the steps of this prompt will look up; how many are taken, 0 without a memory."""
    memory = sequence.lease.memory
    if memory is None or not memory.handle.wants_hints:
        return 0
    slot = Slot(sequence, 0, len(sequence.tokens))
    return prefetcher.hint(memory.handle, windows_of([slot], memory.model.order_max - 1))


def by_memory(slots: Sequence[Slot]) -> list[Slot]:
    """The slots in the order that a step runs them: those without a memory first, then those of each memory side by side."""
    places: dict[EngramMemory | None, int] = {None: 0}
    for slot in slots:
        places.setdefault(slot.sequence.lease.memory, len(places))
    return sorted(slots, key=lambda slot: places[slot.sequence.lease.memory])


def groups_of(slots: Sequence[Slot]) -> list[StepGroup]:
    """The groups of a step whose slots are in the order of `by_memory`."""
    groups, first = [], 0
    for memory, members in groupby(slots, lambda slot: slot.sequence.lease.memory):
        own = list(members)
        if memory is not None:
            windows = windows_of(own, memory.model.order_max - 1)
            groups.append(StepGroup(memory, own, first, windows, windows.starts.tolist()))
        first += sum(slot.count for slot in own)
    return groups


def windows_of(slots: Sequence[Slot], depth: int) -> Windows:
    """The windows of some slots, look-back from the sequences' own ids: also where earlier tokens came from the prefix cache."""
    tokens: list[int] = []
    starts, lookback = [0], []
    for slot in slots:
        ids = slot.sequence.tokens
        near = ids[max(0, slot.first - depth) : slot.first][::-1]
        lookback.append(near + [BEFORE_SEQUENCE] * (depth - len(near)))
        tokens += ids[slot.first : slot.first + slot.count]
        starts.append(len(tokens))
    # Made at once from lists: a step of many memories has as many of these, each for a token or two.
    return Windows(
        np.array(tokens, dtype=np.int64),
        np.array(starts, dtype=np.int32),
        np.array(lookback, dtype=np.int64).reshape(len(slots), depth),
    )


def _report(group: StepGroup, layer: int, taken: LayerRows | None, absent: int) -> LayerReport:
    memory = group.memory
    transport, came = memory.transport, group.windows.token_count * memory.model.columns - absent
    if taken is None or taken.cause is not None:  # nobody was slow: it has no slack to tell
        return LayerReport(layer, transport, False, came, absent, taken.stall_seconds if taken is not None else 0.0, None, None)
    gather_seconds = None if absent else taken.gather_seconds
    return LayerReport(layer, transport, taken.in_time, came, absent, taken.stall_seconds, taken.slack_seconds, gather_seconds)


def _none_came(group: StepGroup) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    shape = (group.windows.token_count, group.memory.model.columns)
    return np.zeros((*shape, group.memory.model.row.bytes), dtype=np.uint8), np.ones(shape, dtype=np.bool_)


def _because(cause: TreadleError | None) -> str:
    """Why rows are missing, in one word; without a cause they had not come when the wait was over."""
    return "late" if cause is None else next(word for kind, word in ROWS_GONE.items() if isinstance(cause, kind))


def _missing_error(report: LayerReport, absent: int, cause: TreadleError | None) -> MemoryMissing:
    why = f"after a wait of {report.stall_seconds:.3g} s" if cause is None else f"({cause})"
    return MemoryMissing(
        f"engram layer {report.layer}: {absent} rows missing {why}; try again, or ask for late = mask to go on without them"
    )


def _patience_seconds(request: Request) -> float:
    left = request.deadline.remaining_seconds() if request.deadline is not None else request.policy.wait_seconds_max
    return min(request.policy.wait_seconds_max, left)
