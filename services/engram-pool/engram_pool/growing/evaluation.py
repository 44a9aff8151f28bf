"""What a memory does to text: negative log-likelihood block by block, over the whole vocabulary, with rows as they are or spoilt.

Owns the measuring and the spoiling. Does not choose the text (`corpus`, benchmarks). Blocks stand alone: no context and no
n-gram history from the block before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram_pool.growing.memory import Layer, Memory, delta
from treadle.contract.errors import InvalidArgument
from treadle.contract.row_layout import row_layout
from treadle.kernels import dequantise, quantise
from treadle.nn.frozen import FrozenLM

BLOCKS_AT_ONCE = 4
Tick = Callable[[int, int], None]  # (blocks done, blocks in all)
Spoil = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Scores:
    """nats: float64 [blocks], summed over the predicted tokens of each block; tokens: predicted tokens of a block."""

    nats: NDArray[np.float64]
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token."""
        if not len(self.nats):
            raise InvalidArgument("no whole block to measure perplexity on")
        return math.exp(float(self.nats.mean()) / self.tokens)


def score(
    model: FrozenLM, blocks: NDArray[np.int64], memory: Memory | None = None, *, gate: float | None = None, tick: Tick | None = None
) -> Scores:
    """Scores of blocks int64 [n, L], with `memory` or without. gate: this number instead of the learnt gate."""
    parts = []
    for at in range(0, len(blocks), BLOCKS_AT_ONCE):
        some = blocks[at : at + BLOCKS_AT_ONCE]
        hidden = hidden_after(model, some, memory, gate=gate)
        parts.append(model.losses(hidden, targets_of(some)).view(some.shape).sum(1, dtype=torch.float64).cpu().numpy())
        if tick is not None:
            tick(min(at + BLOCKS_AT_ONCE, len(blocks)), len(blocks))
    return Scores(np.concatenate(parts) if parts else np.empty(0), blocks.shape[1] - 1)


@torch.no_grad()
def hidden_after(model: FrozenLM, blocks: NDArray[np.int64], memory: Memory | None, *, gate: float | None = None) -> Tensor:
    """Hidden states [B L, hidden] behind the last layer."""
    hidden, at, length = model.embed(torch.from_numpy(blocks)), 0, blocks.shape[1]
    memory = None if memory is None else memory.to(model.device)
    for layer, part in memory.layers.items() if memory is not None else ():
        assert memory is not None
        hidden = model.run(hidden, length, at, layer)
        hidden = hidden + delta(part, hidden, part.rows[memory.ids(layer, blocks)].flatten(1), gate)
        at = layer
    return model.run(hidden, length, at, model.config.layers)


def targets_of(blocks: NDArray[np.int64]) -> Tensor:
    """The next token of each place, flat int64; -1 behind the last token of a block."""
    following = np.full(blocks.shape, -1, dtype=np.int64)
    following[:, :-1] = blocks[:, 1:]
    return torch.from_numpy(following.reshape(-1))


def shuffled(memory: Memory, seed: int = 0) -> Memory:
    """The same rows, each in another's place: what a fabric that delivers wrong rows would do."""
    return _spoilt(memory, seed, lambda rows, draw: rows[torch.randperm(len(rows), generator=draw)])


def randomised(memory: Memory, seed: int = 0) -> Memory:
    """Random rows of the same spread as those that were learnt."""

    def random(rows: Tensor, draw: torch.Generator) -> Tensor:
        learnt = rows[rows.any(1)]
        return torch.randn(rows.shape, generator=draw) * (learnt.square().mean().sqrt() if len(learnt) else 0.0)

    return _spoilt(memory, seed, random)


def in_precision(memory: Memory, precision: str) -> Memory:
    """The rows as they read back from `bf16`, `fp8` or `int4`, and projections as they read back from bf16."""

    def read_back(part: Layer) -> Layer:
        layout = row_layout(precision, part.rows.shape[1])
        rows = torch.from_numpy(dequantise(quantise(part.rows.numpy(), layout), layout))
        return Layer(rows, *(tensor.to(torch.bfloat16).to(torch.float32) for tensor in part.projections))

    return memory.with_layers({layer: read_back(part) for layer, part in memory.layers.items()})


def _spoilt(memory: Memory, seed: int, spoil: Spoil) -> Memory:
    draws = {layer: torch.Generator().manual_seed(seed * 1000 + layer) for layer in memory.layers}
    return memory.with_layers({
        layer: replace(part, rows=spoil(part.rows, draws[layer])) for layer, part in memory.layers.items()
    })  # fmt: skip
