"""Traces run behind a prefix, once, in steps of bounded size; what their queries see of it goes to the spill.

What all traces begin with (a chat template's opening, a question's form) runs once, and is written for each of them.
Owns the order of traces and which of them share a step: both follow from the traces alone, so that a build that goes on makes the
same numbers as one that was never stopped. Does not decide when to save (`build`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from asm_store.building.spill import Spill
from asm_store.building.stepping import STEP_ROWS, Before, check_room, step
from asm_store.building.traces import Trace
from treadle.contract.dictionary import KeyMode
from treadle.nn.kv import KVBlock, SequenceKV
from treadle.nn.model import CausalLM

OPENING_MAX = STEP_ROWS  # tokens at a trace's beginning that are kept as numbers of every layer


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
        self.opening = opening_of(traces)
        self.batches = batches(traces, len(self.opening))
        self._opened: dict[int, tuple[Tensor, ...]] = {}  # layer -> what the opening's tokens asked and saw
        self._begin: list[int] | None = None  # of traces that begin in this step: how many tokens each has in it

    def tokens_of(self, batches_done: int) -> int:
        """Tokens in the spill after so many batches."""
        return sum(len(self._traces[number]) for batch in self.batches[:batches_done] for number in batch)

    def run(self, batches_done: int = 0) -> Iterator[int]:
        """Run the batches that are left; after each, how many are done. The spill holds tokens_of(batches_done) tokens at the start."""
        before = replace(self._before, collect=self)  # not kept in self: a cycle would hold the prefix until it is searched for
        block = None
        if self.opening and batches_done < len(self.batches):
            opened = self._model.new_kv()
            step(self._model, before, [self.opening], [opened], kv_only=True)
            block = opened.block(0, opened.length)
        for number, batch in enumerate(self.batches[batches_done:], batches_done + 1):
            traces = [self._traces[place][len(self.opening) :] for place in batch]
            kv = [self._begun(block) for _ in traces]
            for first in range(0, max(map(len, traces)), STEP_ROWS):  # more than once only where one long trace is alone
                pieces = [trace[first : first + STEP_ROWS] for trace in traces]
                self._begin = None if first else list(map(len, pieces))
                step(self._model, before, pieces, kv, kv_only=True)
            yield number

    def take(self, layer: int, queries: Tensor, rotated: Tensor, a: Tensor, log_z: Tensor) -> None:
        """Fits PrefixCollector."""
        if layer not in self._layers:
            return
        seen: tuple[Tensor, ...] = rotated if self._rotated else queries, a, log_z - self._log_chunks
        if self.opening and layer not in self._opened:
            self._opened[layer] = tuple(each.clone() for each in seen)
            return
        if self.opening and self._begin is not None:
            opened = self._opened[layer]
            seen = tuple(_before_each(first, torch.split(each, self._begin)) for first, each in zip(opened, seen, strict=True))
        self._spill.append(layer, *seen)

    def _begun(self, opening: KVBlock | None) -> SequenceKV:
        kv = self._model.new_kv()
        if opening is not None:
            kv.extend_from(opening)
        return kv


def opening_of(traces: Sequence[Trace]) -> Trace:
    """The tokens that all traces begin with, OPENING_MAX at most, and at least one of each left; none of a single trace."""
    if len(traces) < 2:
        return ()
    ends = min(traces), max(traces)  # in the order of tuples: what these two share, all between them share
    alike = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False))]
    return tuple(alike[: min(OPENING_MAX, min(map(len, traces)) - 1)])


def batches(traces: Sequence[Trace], opening: int = 0) -> list[range]:
    """Numbers of the traces that run together: neighbours, of STEP_ROWS tokens in all at most; a longer trace runs alone.

    opening: tokens at the beginning of each that do not run again
    """
    made, first, rows = list[range](), 0, 0
    for number, trace in enumerate(traces):
        if number > first and rows + len(trace) - opening > STEP_ROWS:
            made.append(range(first, number))
            first, rows = number, 0
        rows += len(trace) - opening
    return [*made, range(first, len(traces))]


def positions_of(traces: Sequence[Trace], first: int) -> Tensor:
    """Where the tokens of the spill stand, int64: each trace from `first` on, one trace after the other."""
    return torch.cat([torch.arange(first, first + len(trace)) for trace in traces])


def _before_each(opened: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([part for piece in pieces for part in (opened, piece)])
