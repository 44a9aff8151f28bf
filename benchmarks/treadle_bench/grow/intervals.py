"""Perplexity ratios with their uncertainty, from losses of blocks that both sides were measured on.

Owns the pairing and the bootstrap. The draw is crossed: seeds with replacement, and blocks with replacement, the same
blocks for every seed, since every seed was measured on the same blocks. Two limits of it stand beside every table: three seeds
say little about the spread of seeds, and blocks of one chapter resemble each other, so intervals are somewhat too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument
from treadle_bench.grow.store import Scores

DRAWS = 4000
BLOCKS_MIN = 8  # for an interval

Floats = NDArray[np.float64]
Interval = tuple[float, float]  # 95 %


@dataclass(frozen=True, slots=True)
class Ratio:
    """Perplexity of one side over the other's: of all seeds and blocks, its 95 % interval (None below BLOCKS_MIN), of each seed."""

    value: float
    interval: Interval | None
    by_seed: tuple[float, ...]
    blocks: int


def perplexity(scores: Sequence[Scores], tokens_a_block: int) -> float:
    """exp of the mean loss of a token over seeds and blocks."""
    return math.exp(float(np.mean([np.mean(each.nats) for each in scores])) / tokens_a_block)


def tail_perplexity(scores: Sequence[Scores], tokens_a_block: int) -> float:
    """99th percentile of the perplexities of single blocks, all seeds together."""
    return math.exp(float(np.percentile(np.concatenate([each.nats for each in scores]), 99)) / tokens_a_block)


def paired(mine: Sequence[Scores], base: Sequence[Scores], tokens_a_block: int) -> Floats:
    """Mine minus base, nats a token, [seeds, blocks]: the blocks that every score of both sides has.

    base: one for each of mine, or a single one for all (the frozen model has no seed). Raises InvalidArgument if no block is shared.
    """
    bases = list(base) * len(mine) if len(base) == 1 else list(base)
    if not mine or len(bases) != len(mine):
        raise InvalidArgument(f"{len(mine)} runs cannot be paired with {len(base)}")
    shared = sorted(set.intersection(*(set(each.blocks) for each in (*mine, *bases))))
    if not shared:
        raise InvalidArgument("the two sides were measured on different blocks")
    return np.stack([_picked(a, shared) - _picked(b, shared) for a, b in zip(mine, bases, strict=True)]) / tokens_a_block


def ratio(difference: Floats, *, seed: int = 0) -> Ratio:
    """Of `paired`'s differences: exp of their mean, with a bootstrap over seeds and blocks."""
    blocks = difference.shape[1]
    by_seed = tuple(math.exp(float(value)) for value in difference.mean(1))
    interval = None
    if blocks >= BLOCKS_MIN:
        means = _bootstrap_means(difference, seed)
        low, high = np.percentile(np.exp(means), [2.5, 97.5])
        interval = float(low), float(high)
    return Ratio(math.exp(float(difference.mean())), interval, by_seed, blocks)


def gain_difference(mine: Floats, other: Floats, *, seed: int = 0) -> tuple[float, Interval | None]:
    """By how many points of perplexity (% of the baseline) `mine` gains more than `other`; 95 % interval, the same draws for both.

    mine, other: differences to one baseline on the same blocks, [seeds, blocks]
    """
    value = float(_points(mine.mean(), other.mean()))
    if mine.shape[1] < BLOCKS_MIN:
        return value, None
    low, high = np.percentile(_points(_bootstrap_means(mine, seed), _bootstrap_means(other, seed)), [2.5, 97.5])
    return value, (float(low), float(high))


def gain_growth(early: tuple[Floats, Floats], late: tuple[Floats, Floats], *, seed: int = 0) -> tuple[float, Interval | None]:
    """By how many points `gain_difference` of `late` is above that of `early`; 95 % interval, the same draws for all four.

    early, late: (mine, other) as for gain_difference, all four of the same seeds and blocks
    """
    value = float(_points(late[0].mean(), late[1].mean()) - _points(early[0].mean(), early[1].mean()))
    if late[0].shape[1] < BLOCKS_MIN:
        return value, None
    draws = [_points(*(_bootstrap_means(side, seed) for side in sides)) for sides in (late, early)]
    low, high = np.percentile(draws[0] - draws[1], [2.5, 97.5])
    return value, (float(low), float(high))


def _points(mine: Floats, other: Floats) -> Floats:
    return np.asarray(100.0 * (np.exp(other) - np.exp(mine)))


def _bootstrap_means(difference: Floats, seed: int) -> Floats:
    seeds, blocks = difference.shape
    draw = np.random.default_rng(seed)
    chosen_blocks = draw.multinomial(blocks, np.full(blocks, 1 / blocks), size=DRAWS) / blocks  # weights, [DRAWS, blocks]
    chosen_seeds = draw.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds
    return np.asarray(np.einsum("ds,sb,db->d", chosen_seeds, difference, chosen_blocks, optimize=True))


def _picked(scores: Scores, numbers: Sequence[int]) -> Floats:
    by_number = dict(zip(scores.blocks, scores.nats, strict=True))
    return np.array([by_number[number] for number in numbers])
