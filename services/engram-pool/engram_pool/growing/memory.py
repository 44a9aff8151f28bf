"""A memory while it grows: fp32 rows, and the projections that turn them into a part of the hidden state.

Owns the tensors, their start, the lookup of rows and the fusion with gradients. Does not own optimisers (`optimiser`), the
order of training (`grower`) or files (`folder`). The fusion is the v4.1 form of `treadle.nn.fusion`, which serves it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from engram_pool.growing.recipe import Recipe
from treadle.contract import EngramModel, Fusion, Windows
from treadle.contract.families import deepseek_v41_model
from treadle.contract.row_layout import row_layout
from treadle.kernels import HashPlan, row_ids
from treadle.nn.fusion import DOT_MIN, GATE_EPS
from treadle.nn.token_map import token_map_digest

FORM = "v4.1"


@dataclass(slots=True, eq=False)
class Layer:
    """What one Engram layer learns.

    rows: fp32 [N, dim]; wkv: fp32 [2 hidden, columns x dim], keys before values; query_weight, key_weight: fp32 [hidden]
    """

    rows: Tensor
    wkv: Tensor
    query_weight: Tensor
    key_weight: Tensor

    @property
    def projections(self) -> list[Tensor]:
        """What Adam moves."""
        return [self.wkv, self.query_weight, self.key_weight]


class Memory:
    """The layers of one memory, with the hash that says which rows a token needs.

    template:  manifest without tables, rows in bf16 until a precision is chosen
    token_map: int32 [V]
    """

    def __init__(self, template: EngramModel, token_map: NDArray[np.int32], layers: Mapping[int, Layer]) -> None:
        self.template, self.token_map, self.layers = template, token_map, dict(layers)
        self._plans = {layer: HashPlan.from_model(template, layer, token_map) for layer in template.layers}

    @classmethod
    def begin(
        cls, name: str, recipe: Recipe, token_map: NDArray[np.int32], compressed: int, pad_id: int, hidden: int,
        spread: Mapping[int, float],
    ) -> Memory:  # fmt: skip
        """A memory that changes nothing yet: zero rows, random projections.

        An n-gram that was never learnt stays exactly silent. Random rows under a zero value projection, the other start that
        changes nothing, learn half as much.

        spread: root mean square of the hidden state before each layer; the value projection has spread / sqrt(inputs)
        """
        template = template_of(name, recipe, token_map, compressed, pad_id)
        inputs = recipe.dim * template.columns
        layers = {}
        for layer in template.layers:
            drawn = np.random.default_rng([recipe.seed, layer]).standard_normal((2, hidden, inputs), dtype=np.float32)
            drawn *= np.asarray([1.0, spread[layer]], dtype=np.float32)[:, None, None] / np.float32(inputs**0.5)
            layers[layer] = Layer(
                torch.zeros(template.rows_hashed(layer), recipe.dim), torch.from_numpy(drawn.reshape(2 * hidden, inputs)),
                torch.ones(hidden), torch.ones(hidden),
            )  # fmt: skip
        return cls(template, token_map, layers)

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        return int(next(iter(self.layers.values())).query_weight.shape[0])

    def ids(self, layer: int, blocks: NDArray[np.int64]) -> Tensor:
        """Row ids int64 [B L, C] of blocks [B, L], on the rows' device; history begins with each block."""
        count, length = blocks.shape
        depth = self.template.order_max - 1
        starts = np.arange(count + 1, dtype=np.int32) * length
        windows = Windows(blocks.reshape(-1), starts, np.full((count, depth), -1, dtype=np.int64))
        return torch.from_numpy(row_ids(self._plans[layer], windows)).to(self.layers[layer].rows.device)

    def with_layers(self, layers: Mapping[int, Layer]) -> Memory:
        """The same memory with other tensors."""
        return Memory(self.template, self.token_map, layers)

    def to(self, device: torch.device) -> Memory:
        """The same memory with its tensors on `device`; itself where they are there."""
        if all(part.rows.device == device for part in self.layers.values()):
            return self
        return self.with_layers({
            layer: Layer(*(tensor.to(device) for tensor in (part.rows, *part.projections))) for layer, part in self.layers.items()
        })  # fmt: skip

    def named(self, name: str) -> Memory:
        """The same memory under another name."""
        return Memory(replace(self.template, name=name), self.token_map, self.layers)


def delta(layer: Layer, hidden: Tensor, rows: Tensor, gate: float | None = None) -> Tensor:
    """What is added to the hidden state: gate x value, differentiable in all of them.

    hidden: [T, hidden]; rows: fp32 [T, columns x dim]; gate: this number instead of the learnt one (an ablation)
    Returns [T, hidden] of hidden's dtype, computed in fp32.
    """
    key, value = linear(rows, layer.wkv).chunk(2, dim=-1)
    if gate is not None:
        return (gate * value).to(hidden.dtype)
    width, eps = (hidden.shape[-1],), GATE_EPS[FORM]
    state = rms_norm(hidden.to(torch.float32), width, layer.query_weight, eps)
    dot = (state * rms_norm(key, width, layer.key_weight, eps)).sum(-1) / width[0] ** 0.5
    root = dot.abs().clamp_min(DOT_MIN).sqrt()
    return (torch.sigmoid(torch.where(dot < 0, -root, root)).unsqueeze(-1) * value).to(hidden.dtype)


def template_of(name: str, recipe: Recipe, token_map: NDArray[np.int32], compressed: int, pad_id: int) -> EngramModel:
    """The manifest without tables, rows in bf16."""
    return deepseek_v41_model(
        name, token_map=token_map_digest(token_map), pad_id=pad_id, compressed_vocab_size=compressed, layers=recipe.layers,
        prime_base=recipe.prime_base, orders=recipe.orders, heads=recipe.heads, row=row_layout("bf16", recipe.dim),
        fusion=Fusion(FORM),
    )  # fmt: skip
