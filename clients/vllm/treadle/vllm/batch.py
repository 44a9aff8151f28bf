"""The memories of a model's batch: which request uses what, its step of lookups, and what came of it.

Both of vLLM's model runners stand on this: it knows requests by their ids, and takes arrays. One thread, that of the model.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.client.engram import StepPrefetcher
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, TreadleError, Unavailable
from treadle.contract.policy import Late, WaitPolicy
from treadle.contract.windows import Windows
from treadle.nn.fusion import CONV_KERNEL
from treadle.vllm import fuse_op
from treadle.vllm.config import Choice, MemoryConfig, RequestChoice
from treadle.vllm.history import HistoryPages
from treadle.vllm.memories import LanguageModel, Memories, Memory
from treadle.vllm.outcomes import REPORTS_MAX, EngineReports, Failure, StepVerdict, TicketReport
from treadle.vllm.prefix_batch import PrefixBatch
from treadle.vllm.step import EngramStep, RunningRequest, StepGroup
from treadle.vllm.windows import Span

log = logging.getLogger("treadle.vllm")
# Why a memory cannot be opened just now, although the choice was right: a request that masks goes on without it, degraded.
CLOSED_FOR_NOW = (Unavailable, DeadlineExceeded, ResourceExhausted)


@dataclass(frozen=True, slots=True)
class BatchView:
    """The runner's arrays for a step, borrowed.

    request_ids: of the batch, in its order; request i stands in row i of the arrays
    extra_args:  gives those of a request that is new
    firsts:      [requests] position of each request's first token of this step
    counts:      [requests] tokens of it
    windows:     gives those of some spans, with so many columns of look-back
    blocks:      [requests, blocks_max] int32, the KV blocks of each request in order
    lengths:     gives the tokens of a request's prompt, and of prompt and answer at most; None: this runner has no long prefixes
    """

    request_ids: Sequence[str]
    extra_args: Callable[[str], Mapping[str, Any] | None]
    firsts: NDArray[np.integer[Any]]
    counts: NDArray[np.integer[Any]]
    windows: Callable[[Sequence[Span], int], Windows]
    blocks: NDArray[np.int32]
    lengths: Callable[[str], tuple[int, int]] | None = None


class EngramBatch:
    """See the module. `pages`: where the fusion's history lies; set once vLLM has made its KV."""

    def __init__(
        self, config: MemoryConfig, language_model: LanguageModel, device: torch.device, prefixes: PrefixBatch | None = None
    ) -> None:
        """prefixes: those of the engine; None: its attention does not merge, and requests that choose one are refused"""
        self.pages: HistoryPages | None = None
        self.prefixes = prefixes
        self._config = config
        self._memories = Memories(config, language_model, device)
        self._requests: dict[str, RunningRequest] = {}
        self._prefetcher: StepPrefetcher | None = None
        self._step: EngramStep | None = None
        self._tickets: deque[TicketReport] = deque(maxlen=REPORTS_MAX)
        self._tickets_dropped = self._steps = 0
        self._touched: list[str] = []  # requests of this step that have something to tell

    def begin(self, view: BatchView) -> None:
        """A step begins: start the lookups of its rows. Opens what new requests choose; what keeps it from that is theirs alone."""
        self.end()
        self._tidy()
        groups, token_count = self._groups(view)
        if self.prefixes is not None:
            self.prefixes.begin(view, self._requests, token_count, self.pages)
        if groups:
            if self._prefetcher is None:
                self._prefetcher = StepPrefetcher()
            self._steps += 1
            self._step = EngramStep(self._prefetcher, groups, token_count, self._config.wait_seconds_max, self._heard)

    def run(self) -> None:
        """The model runs the step now: its layers take their rows. To be followed by `end`, whether it succeeds or not."""
        fuse_op.run(self._step)
        if self.prefixes is not None:
            self.prefixes.run()

    def end(self) -> None:
        """The step is over, or was none: stop lookups that nobody asked for."""
        fuse_op.run(None)
        step, self._step = self._step, None
        if step is not None:
            step.finish()
        if self.prefixes is not None:
            self.prefixes.end()

    def take_verdicts(self) -> dict[str, StepVerdict]:
        """What the step that is over did, for each of its requests that use a memory or failed to get one."""
        touched, self._touched = self._touched, []
        return {request_id: self._requests[request_id].verdict() for request_id in touched if request_id in self._requests}

    def forget(self, request_id: str) -> None:
        """A request is over. Unknown ones are passed by."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.memory is not None:
            self._memories.release(request.memory)
        if request is not None and request.prefix is not None and self.prefixes is not None:
            self.prefixes.release(request.prefix)

    def open_ahead(self, choice: Choice) -> str:
        """See Memories.open_ahead."""
        return self._memories.open_ahead(choice)

    def let_go(self, choice: Choice) -> None:
        """See Memories.let_go."""
        self._memories.let_go(choice)

    def take_reports(self) -> EngineReports:
        """What layers and memories did; tickets are told once. Between steps, as everything here."""
        self._tidy()  # also when no step comes: pool and store can free a version only once nobody holds it
        tickets, dropped = tuple(self._tickets), self._tickets_dropped
        self._tickets.clear()
        self._tickets_dropped = 0
        figures = {} if self._prefetcher is None else self._prefetcher.layer_figures()
        plain = {layer: asdict(of) for layer, of in figures.items()}
        return EngineReports(plain, tickets, dropped, self._memories.figures, self._steps)

    def close(self) -> None:
        """The engine stops: close all memories."""
        self.end()
        self._requests.clear()
        self._memories.close()
        if self.prefixes is not None:
            self.prefixes.close()

    def _tidy(self) -> None:
        self._memories.tidy()
        if self.prefixes is not None:
            self.prefixes.tidy()

    def _groups(self, view: BatchView) -> tuple[list[StepGroup], int]:
        """The step's groups by memory, and how many tokens it has in all."""
        using: dict[Memory, list[tuple[Span, RunningRequest]]] = {}
        place, until = 0, time.monotonic() + self._config.open_seconds_max  # that all openings of the step may take together
        for row, request_id in enumerate(view.request_ids):
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = self._begun(view, request_id, int(view.firsts[row]), until)
            count = int(view.counts[row])
            if request.memory is not None:
                using.setdefault(request.memory, []).append((Span(row, int(view.firsts[row]), count, place), request))
            if request.memory is not None or request.prefix is not None or request.degraded or request.error is not None:
                self._touched.append(request_id)
            place += count
        return [self._group(memory, members, view) for memory, members in using.items()], place

    def _group(self, memory: Memory, members: list[tuple[Span, RunningRequest]], view: BatchView) -> StepGroup:
        # A request may continue from blocks that another computes in this same step: whoever is further back goes first, so that its
        # history is there.
        members.sort(key=lambda member: member[0].first)
        spans = [span for span, _ in members]
        windows = view.windows(spans, memory.model.order_max - 1)
        kv = []
        if memory.fusion.history_widths:
            assert self.pages is not None, "the pages are made with the KV, before any step"
            reach, width = (CONV_KERNEL - 1) * memory.fusion.shape.dilation, memory.fusion.shape.hidden
            kv = [self.pages.of(span, view.blocks[span.row], reach, width) for span in spans]
        return StepGroup(memory, [request for _, request in members], spans, windows, kv)

    def _begun(self, view: BatchView, request_id: str, first: int, until: float) -> RunningRequest:
        """A request runs for the first time; `first`: from which position on. Waits for its memory, not beyond `until`."""
        request = RunningRequest(None, WaitPolicy(self._config.wait_seconds_max, Late(self._config.late)))
        try:
            wanted = RequestChoice.of(view.extra_args(request_id), self._config)
            request = self._with_memory(wanted, first, until)
            if wanted.prefix is not None:
                if self.prefixes is None or view.lengths is None:
                    raise InvalidArgument("prefix: this engine's attention does not merge; long prefixes need vLLM on a CPU")
                request.prefix = self.prefixes.take(wanted, *view.lengths(request_id))
        except TreadleError as error:
            # Its step computes blocks without the memory that its salt names: were they shared, a memory that comes later would find them.
            request.error, request.dirty_from = Failure.of(error), first
        return request

    def _with_memory(self, wanted: RequestChoice, first: int, until: float) -> RunningRequest:
        """Raises what keeps it from its memory for good."""
        try:
            return RunningRequest(None if wanted.memory is None else self._memories.take(wanted.memory, until), wanted.policy)
        except CLOSED_FOR_NOW as error:
            request = RunningRequest(None, wanted.policy)
            if wanted.policy.late is Late.FAIL:
                request.error = Failure.of(error)
            request.missed(first, error)
            return request

    def _heard(self, ticket: TicketReport) -> None:
        self._tickets_dropped += len(self._tickets) == self._tickets.maxlen
        self._tickets.append(ticket)
