"""Forwards behind a prefix: its keys and values once, then steps of traces that share them or look into a dictionary.

Owns the size of a step and where its tokens stand. Does not choose traces (`collection`, `evaluation`, `self_traces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from treadle.contract.errors import InvalidArgument
from treadle.nn.kv import KVBlock, SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import PrefixMemory, PrefixUse
from treadle.nn.prefix_step import PrefixCollector

STEP_ROWS = 256  # tokens of one forward: enough that weights are read seldom, few enough that a layer's numbers stay in cache


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What stands before the traces of a step.

    position: of their first token
    shared:   keys and values of a prefix; memory: a dictionary, which takes shared's place in the layers that it has
    collect:  is told what the traces see of `shared`
    """

    position: int = 0
    shared: SequenceKV | None = None
    memory: PrefixMemory | None = None
    collect: PrefixCollector | None = None

    @classmethod
    def dictionary(cls, memory: PrefixMemory) -> Before:
        """As an engine does it."""
        return cls(memory.position_offset, memory=memory)


def step(
    model: CausalLM, before: Before, tokens: Sequence[Sequence[int]], kv: Sequence[SequenceKV], *, kv_only: bool = False
) -> Tensor:
    """Continue each kv[r] with tokens[r]; hidden states [T, hidden] of all traces' new tokens, one trace after the other.

    kv_only: nobody reads them, and there are none
    """
    starts = [0, *accumulate(map(len, tokens))]
    places = [torch.arange(sequence.length, sequence.length + len(new)) for sequence, new in zip(kv, tokens, strict=True)]
    uses = None if before.memory is None else [PrefixUse(before.memory) for _ in kv]
    flat = torch.tensor([token for new in tokens for token in new])
    return model.forward(
        flat, torch.cat(places) + before.position, starts, kv, prefixes=uses, shared=before.shared, collect=before.collect, kv_only=kv_only,
    )  # fmt: skip


def encode(
    model: CausalLM,
    tokens: Sequence[int],
    chunks: Sequence[int],
    position: int = 0,
    tick: Callable[[int], None] = lambda done: None,
) -> SequenceKV:
    """Keys and values of a prefix: each chunk attends to itself alone, at its true positions from `position` on.

    chunks: tokens of each, `len(tokens)` in all; tick: tokens done. Runs STEP_ROWS tokens at a time.
    Raises InvalidArgument where the prefix leaves the model no position for a request.
    """
    check_room(model, position + len(tokens), 1)
    whole, done = model.new_kv(), 0
    whole.reserve(len(tokens))
    for chunk in chunks:
        alone = whole if len(chunks) == 1 else model.new_kv()
        alone.reserve(chunk)
        while alone.length < chunk:
            first = done + alone.length
            some = tokens[first : min(first + STEP_ROWS, done + chunk)]
            step(model, Before(position + done), [some], [alone], kv_only=True)
            tick(first + len(some))
        if alone is not whole:
            whole.extend_from(KVBlock(done, done + chunk, alone.block(0, chunk).kv, {}))
        done += chunk
    return whole


def check_room(model: CausalLM, before: int, tokens: int) -> None:
    """Raise InvalidArgument unless the model has positions for `tokens` behind `before`."""
    if before + tokens > model.config.positions_max:
        raise InvalidArgument(
            f"{before} tokens of prefix and {tokens} behind them: the model knows {model.config.positions_max} positions; shorten them"
        )
