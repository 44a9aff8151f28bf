"""Traces run behind a prefix, once, in steps of bounded size; what their queries see of it goes to the spill.

Owns the order of traces and which of them share a step: both follow from the traces alone, so that a build that goes on makes the
same numbers as one that was never stopped. Does not decide when to save (`build`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from asm_store.building.spill import Spill
from asm_store.building.stepping import STEP_ROWS, Before, check_room, step
from asm_store.building.traces import Trace
from treadle.contract.dictionary import KeyMode
from treadle.nn.model import CausalLM


class Collection:
    """Runs `traces` behind `before.shared` and writes queries and states of the spill's layers.

    key:             which form of the queries is written
    chunks_averaged: Z is written as the mean over so many chunks of the prefix; 1: as their sum
    """

    def __init__(
        self, model: CausalLM, before: Before, traces: Sequence[Trace], spill: Spill, key: KeyMode, chunks_averaged: int = 1
    ) -> None:
        check_room(model, before.position, max(map(len, traces)))
        self._model, self._traces, self._spill = model, traces, spill
        self._before = before
        self._layers, self._rotated = frozenset(spill.layers), key is KeyMode.OWN_POSITION
        self._log_chunks = math.log(chunks_averaged)
        self.batches = batches(traces)

    def tokens_of(self, batches_done: int) -> int:
        """Tokens in the spill after so many batches."""
        return sum(len(self._traces[number]) for batch in self.batches[:batches_done] for number in batch)

    def run(self, batches_done: int = 0) -> Iterator[int]:
        """Run the batches that are left; after each, how many are done. The spill holds tokens_of(batches_done) tokens at the start."""
        before = replace(self._before, collect=self)  # not kept in self: a cycle would hold the prefix until it is searched for
        for number, batch in enumerate(self.batches[batches_done:], batches_done + 1):
            traces = [self._traces[place] for place in batch]
            kv = [self._model.new_kv() for _ in traces]
            for first in range(0, max(map(len, traces)), STEP_ROWS):  # more than once only where one long trace is alone
                step(self._model, before, [trace[first : first + STEP_ROWS] for trace in traces], kv)
            yield number

    def take(self, layer: int, queries: Tensor, rotated: Tensor, a: Tensor, log_z: Tensor) -> None:
        """Fits PrefixCollector."""
        if layer in self._layers:
            self._spill.append(layer, rotated if self._rotated else queries, a, log_z - self._log_chunks)


def batches(traces: Sequence[Trace]) -> list[range]:
    """Numbers of the traces that run together: neighbours, of STEP_ROWS tokens in all at most; a longer trace runs alone."""
    made, first, rows = list[range](), 0, 0
    for number, trace in enumerate(traces):
        if number > first and rows + len(trace) > STEP_ROWS:
            made.append(range(first, number))
            first, rows = number, 0
        rows += len(trace)
    return [*made, range(first, len(traces))]


def positions_of(traces: Sequence[Trace], first: int) -> Tensor:
    """Where the tokens of the spill stand, int64: each trace from `first` on, one trace after the other."""
    return torch.cat([torch.arange(first, first + len(trace)) for trace in traces])
