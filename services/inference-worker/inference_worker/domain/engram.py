"""Engram memory in the engine: rows are looked up at the start of a step, waited for before their layer, gated and fused.

Owns what happens to a step's rows and what their absence means for each request. Does not look up (the prefetcher), open
pools (adapters) or know the fusion's mathematics (`treadle.nn.fusion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_worker.domain.errors import MemoryMissing
from inference_worker.domain.ports import LayerFigures, LayerRows, Prefetcher, StepRows
from inference_worker.domain.report import LayerReport
from inference_worker.domain.request import MemoryReport, Request
from inference_worker.domain.scheduler import Slot
from inference_worker.domain.sequence import Sequence as RunningSequence
from inference_worker.domain.sequence import kv_of
from treadle.contract.engram_model import EngramModel
from treadle.contract.errors import (
    DataLoss,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)
from treadle.contract.policy import Late, WaitPolicy
from treadle.contract.windows import Windows
from treadle.nn import demo_profile
from treadle.nn.config import ModelConfig
from treadle.nn.fusion import EngramFusion
from treadle.nn.kv import SequenceKV
from treadle.nn.token_map import compressed_token_map, token_map_digest

WAIT_SECONDS_MAX = 1.0  # at one layer, unless whoever runs the engine says otherwise: all requests of a step wait together
# Why rows may not come although what was asked is right. Anything else is our bug, and fails the step.
ROWS_GONE = (Unavailable, ResourceExhausted, DeadlineExceeded, NotFound, DataLoss)


class EngramMemory:
    """One version of an Engram model, for every step of one engine.

    transport: how its rows come, for reports
    fused:     True: rows are added to the hidden state. False (shadowed): all is computed and nothing added; waits, policies
               and degraded answers are the same, so that a shadowed run shows what a fused one would meet.
    wait_seconds_max: longest wait of a step at one layer; a request that allows more gets this
    """

    def __init__(
        self, model: EngramModel, version: str, transport: str, fusion: EngramFusion, prefetcher: Prefetcher, *, fused: bool,
        wait_seconds_max: float = WAIT_SECONDS_MAX,
    ) -> None:  # fmt: skip
        self.model, self.version, self.transport, self.fused = model, version, transport, fused
        self.wait_seconds_max = WaitPolicy(wait_seconds_max).wait_seconds_max  # checked there
        self._fusion, self._prefetcher = fusion, prefetcher

    @property
    def identity(self) -> dict[str, str]:
        """What KV made with this memory depends on."""
        return {"engram": self.model.name, "engram_version": self.version, "engram_fused": str(self.fused)}

    @property
    def history_widths(self) -> Mapping[int, int]:
        """What the fusion keeps for each token of a sequence beside its KV."""
        return self._fusion.history_widths

    def begin(self, slots: Sequence[Slot]) -> EngramStep:
        """Start looking up the rows of a step."""
        windows = windows_of(slots, self.model.order_max - 1)
        try:
            return EngramStep(self, slots, windows, self._prefetcher.begin(windows))
        except ROWS_GONE as error:  # a queue that is full, a pool that is gone: the step goes on as its requests' policies say
            return EngramStep(self, slots, windows, None, error)

    def fuse(self, layer: int, hidden: Tensor, rows: NDArray[np.uint8], live: NDArray[np.bool_] | None, starts: Sequence[int],
             kv: Sequence[SequenceKV]) -> Tensor:  # fmt: skip
        """The hidden state [T, d] with the rows of a layer added, or as it was where they are shadowed."""
        mask = None if live is None else torch.from_numpy(live)
        delta = self._fusion.forward(layer, hidden, torch.from_numpy(rows), mask, starts, kv)
        return hidden + delta if self.fused else hidden

    def figures(self) -> Mapping[int, LayerFigures]:
        """Figures of each layer since the start. Any thread."""
        return self._prefetcher.figures()

    def report_of(self, sequence: RunningSequence) -> MemoryReport:
        """What this memory did for a request."""
        counts = sequence.memory
        return MemoryReport(
            "engram", self.model.name, self.version, self.transport, counts.tickets, counts.tickets_in_time, counts.rows_missing,
            not self.fused,
        )  # fmt: skip


class EngramStep:
    """The rows of one step.

    rows:   None where the lookup could not begin, and `refusal` says why
    failed: sequences whose rows are missing and who asked to fail then, with the error of each
    """

    def __init__(
        self,
        memory: EngramMemory,
        slots: Sequence[Slot],
        windows: Windows,
        rows: StepRows | None,
        refusal: TreadleError | None = None,
    ) -> None:
        self._memory, self._slots, self._windows, self._rows, self._refusal = memory, slots, windows, rows, refusal
        self._starts = windows.starts.tolist()
        self.reports: list[LayerReport] = []
        self.failed: dict[RunningSequence, MemoryMissing] = {}

    def before_layer(self, layer: int, hidden: Tensor) -> Tensor:
        """The hook of the forward: at an Engram layer wait for its rows and fuse them; else `hidden` as it is."""
        if layer not in self._memory.model.layers:
            return hidden
        taken = self._take(layer)
        rows, missing = self._none_came() if taken is None else (taken.rows, taken.missing)
        report = self._report(layer, taken, 0 if missing is None else int(missing.sum()))
        self.reports.append(report)
        self._charge(report, missing)
        # The fusion was made for whole memories: a token of which a row is missing goes on without any.
        live = None if missing is None else np.asarray(~missing.any(axis=1))
        return self._memory.fuse(layer, hidden, rows, live, self._starts, [kv_of(slot.sequence) for slot in self._slots])

    def finish(self) -> None:
        """The step is over, whether it succeeded or not."""
        if self._rows is not None:
            self._rows.finish()

    def _take(self, layer: int) -> LayerRows | None:
        try:
            return self._rows.rows(layer, WaitPolicy(self._wait_seconds(), Late.MASK)) if self._rows is not None else None
        except ROWS_GONE as error:  # the pool is gone, and these rows are not in this process
            self._refusal = error
            return None

    def _wait_seconds(self) -> float:
        """How long the layer that starts now may wait: all requests of the step wait, so none of them decides alone.

        As long as the most patient request still allows, its own deadline included, and at most the memory's own
        `wait_seconds_max`. A request that was cancelled has no say any more.
        """
        wanted = [slot.sequence.request for slot in self._slots if not slot.sequence.cancelled]
        patience = max((_patience_seconds(request) for request in wanted), default=0.0)
        return min(patience, self._memory.wait_seconds_max)

    def _report(self, layer: int, taken: LayerRows | None, absent: int) -> LayerReport:
        transport, came = self._memory.transport, self._windows.token_count * self._memory.model.columns - absent
        if taken is None:
            return LayerReport(layer, transport, False, came, absent, 0.0, None, None)
        gather_seconds = None if absent else taken.gather_seconds
        return LayerReport(layer, transport, taken.in_time, came, absent, taken.stall_seconds, taken.slack_seconds, gather_seconds)

    def _none_came(self) -> tuple[NDArray[np.uint8], NDArray[np.bool_] | None]:
        shape = (self._windows.token_count, self._memory.model.columns)
        return np.zeros((*shape, self._memory.model.row.bytes), dtype=np.uint8), np.ones(shape, dtype=np.bool_)

    def _charge(self, report: LayerReport, missing: NDArray[np.bool_] | None) -> None:
        """Write down for each request what the ticket did, and what its missing rows mean."""
        for slot, first, end in zip(self._slots, self._starts, self._starts[1:], strict=False):
            sequence = slot.sequence
            absent = 0 if missing is None else int(missing[first:end].sum())
            sequence.memory.tickets += 1
            sequence.memory.tickets_in_time += report.in_time
            sequence.memory.rows_missing += absent
            if absent:
                sequence.degraded = True
                if sequence.request.policy.late is Late.FAIL:
                    self.failed.setdefault(sequence, self._missing_error(report, absent))

    def _missing_error(self, report: LayerReport, absent: int) -> MemoryMissing:
        why = f"after a wait of {report.stall_seconds:.3g} s" if self._refusal is None else f"({self._refusal})"
        return MemoryMissing(
            f"engram layer {report.layer}: {absent} rows missing {why}; try again, or ask for late = mask to go on without them"
        )


def _patience_seconds(request: Request) -> float:
    left = request.deadline.remaining_seconds() if request.deadline is not None else request.policy.wait_seconds_max
    return min(request.policy.wait_seconds_max, left)


def windows_of(slots: Sequence[Slot], depth: int) -> Windows:
    """The windows of a step, look-back from the sequences' own ids: also where earlier tokens came from the prefix cache."""
    parts = []
    for slot in slots:
        begin = max(0, slot.first - depth)
        parts.append((slot.sequence.tokens[begin : slot.first + slot.count], slot.first - begin))
    return Windows.of_sequences(parts, depth)


def check_fits(engram: EngramModel, config: ModelConfig, tokenizer_json: Path) -> None:
    """Raise unless rows of this Engram model can be looked up and fused for this language model.

    Raises FingerprintMismatch naming `token_map` when the tables were made for another tokenizer, InvalidArgument when the
    model has no such layers or no such end-of-sequence id.
    """
    beyond = [layer for layer in engram.layers if layer >= config.layers]
    if beyond:
        raise InvalidArgument(f"engram model {engram.name}: layers {beyond}, the language model has {config.layers}")
    if engram.token_map is None:
        if engram.eos_id is not None and engram.eos_id >= config.vocab:
            raise InvalidArgument(
                f"engram model {engram.name}: eos_id {engram.eos_id}, the language model has {config.vocab} tokens"
            )
        return
    digest = token_map_digest(compressed_token_map(tokenizer_json)[0])
    if digest != engram.token_map:
        raise FingerprintMismatch("token_map", digest, engram.token_map)


def fusion_of(engram: EngramModel, hidden: int, weights: Path | None) -> EngramFusion:
    """The fusion that the manifest names: its weights from the file, or random ones from a seed where it names none.

    Raises InvalidArgument for a manifest without a form, or when the file or its digest is there without the other,
    FingerprintMismatch for another file than the manifest's.
    """
    digest = None if engram.fusion is None else engram.fusion.weights
    if digest is None and weights is None:
        known = engram.name == demo_profile.NAME and engram.layers == demo_profile.LAYERS
        return EngramFusion.build(engram, hidden, delta_rms=demo_profile.DELTA_RMS) if known else EngramFusion.build(engram, hidden)
    if weights is None:
        raise InvalidArgument(f"engram_fusion_weights: {engram.name} was made with the weights {digest}; give their file")
    return EngramFusion.load(weights, engram, hidden)
