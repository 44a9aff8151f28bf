"""What is grown and how: every number that decides the result, in one frozen record that stands in the card.

Owns defaults and their checks. Does not train. The defaults are those that were measured to work on a 135M-parameter model
and a million tokens (see docs/benchmarks.md), and were not searched beyond that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from treadle.contract.errors import InvalidArgument

MIX_EVERY = 5


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to grow.

    layers:           0-based decoder layers that get an Engram, rising
    orders, heads:    n-gram orders, consecutive; heads of each
    dim:              values of a row
    prime_base:       smallest number of rows of a head
    tokens_max:       tokens of text to learn from in each pass; 0: all
    passes:           more than one ruins what the memory does to text that it has not seen
    block_tokens:     length of a block; history and attention begin anew with each
    blocks_per_step:  blocks of one step of the optimisers
    mix_every:        every so many steps one step on other text, whose rows are not changed; 0: never
    mix_blocks:       blocks of such a step
    row_rate, row_floor:  of the rows' Adagrad: step = rate G / sqrt(sum of mean squares + floor x their running mean)
    projection_rate:  of Adam, which moves projections and norms; 0: they stay as they are (rows only)
    seed:             of block order and random starts
    """

    layers: tuple[int, ...] = (1, 14)
    orders: tuple[int, ...] = (2, 3)
    heads: int = 8
    dim: int = 32
    prime_base: int = 10_007
    tokens_max: int = 0
    passes: int = 1
    block_tokens: int = 512
    blocks_per_step: int = 4
    mix_every: int = MIX_EVERY
    mix_blocks: int = 1
    row_rate: float = 0.1
    row_floor: float = 4.0
    projection_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        low = {
            "heads": 1, "dim": 2, "prime_base": 2, "tokens_max": 0, "passes": 1, "block_tokens": 16, "blocks_per_step": 1,
            "mix_every": 0, "mix_blocks": 1, "seed": 0,
        }  # fmt: skip
        for name, least in low.items():
            if getattr(self, name) < least:
                raise InvalidArgument(f"{name}: at least {least}, got {getattr(self, name)}")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise InvalidArgument(f"layers: rising 0-based numbers, got {list(self.layers)}")
        if not self.orders or self.orders[0] < 2 or list(self.orders) != list(range(self.orders[0], self.orders[-1] + 1)):
            raise InvalidArgument(f"orders: consecutive, from 2 on, such as 2 3; got {list(self.orders)}")
        if self.row_rate <= 0 or self.row_floor < 0 or self.projection_rate < 0 or self.mix_every == 1:
            raise InvalidArgument("row_rate > 0, row_floor >= 0, projection_rate >= 0, mix_every 0 or at least 2")

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def schedule(done: float) -> float:
    """Factor on both rates when `done` (0 to 1) of the steps are behind: 1 in the first half, then linear down to 0.1."""
    return 1.0 if done < 0.5 else 1.0 - 0.9 * (min(done, 1.0) - 0.5) / 0.5
