"""Several memories on the same text: perplexity, and its ratio to none with an interval.

Owns the paired bootstrap over blocks. Does not read folders or print.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engram_pool.growing.corpus import Text, blocks_of
from engram_pool.growing.evaluation import Scores, score
from engram_pool.growing.memory import Memory
from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.nn.config import ModelConfig
from treadle.nn.frozen import FrozenLM
from treadle.nn.token_map import compressed_token_map, token_map_digest

BLOCK_TOKENS = 512
RESAMPLES = 2000
BLOCKS_MIN = 8  # for an interval


def measure(
    model_folder: Path,
    states: Mapping[str, Memory | None],
    texts: Sequence[Text],
    blocks_max: int,
    tick: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """One line a state: memory, perplexity, ratio to the first state, ratio_ci95 (None: too few blocks), tokens, blocks.

    Raises InvalidArgument for a text shorter than a block, FingerprintMismatch for a memory of another tokenizer or hidden size.
    """
    blocks = blocks_of(np.concatenate([text.tokens for text in texts]), BLOCK_TOKENS)
    if not len(blocks):
        raise InvalidArgument(f"text: fewer than {BLOCK_TOKENS} tokens, nothing to measure")
    blocks = blocks[np.unique(np.linspace(0, len(blocks) - 1, min(blocks_max, len(blocks))).round().astype(np.int64))]
    _check_fit(model_folder, states)
    model = FrozenLM.load(model_folder)
    scores = {}
    for name, memory in states.items():
        scores[name] = score(model, blocks, memory, tick=lambda at, of, name=name: tick(name, at, of))  # type: ignore[misc]
    base = next(iter(scores.values()))
    return [
        {
            "memory": name, "perplexity": one.perplexity, "ratio": one.perplexity / base.perplexity,
            "ratio_ci95": ratio_interval(one, base), "blocks": len(blocks), "tokens": len(blocks) * one.tokens,
        }
        for name, one in scores.items()
    ]  # fmt: skip


def ratio_interval(one: Scores, base: Scores, seed: int = 0) -> list[float] | None:
    """95 % interval of perplexity(one) / perplexity(base): blocks drawn again with replacement, the same for both.

    None for fewer than BLOCKS_MIN blocks.
    """
    if len(one.nats) < BLOCKS_MIN:
        return None
    difference = (one.nats - base.nats) / one.tokens
    drawn = np.random.default_rng(seed).integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.percentile(np.exp(difference[drawn].mean(1)), [2.5, 97.5])
    return [float(low), float(high)]


def _check_fit(model_folder: Path, states: Mapping[str, Memory | None]) -> None:
    digest = token_map_digest(compressed_token_map(model_folder / "tokenizer.json")[0])
    hidden = ModelConfig.from_folder(model_folder).hidden
    for memory in states.values():
        if memory is not None and memory.template.token_map != digest:
            raise FingerprintMismatch(f"token_map of {memory.template.name}", digest, str(memory.template.token_map))
        if memory is not None and memory.hidden != hidden:
            raise FingerprintMismatch(f"hidden size of {memory.template.name}", str(hidden), str(memory.hidden))
