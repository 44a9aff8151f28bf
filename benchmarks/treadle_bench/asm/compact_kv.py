"""What a rival keeps of a prefix: some keys and values of each head, each with a bias. Stands where a dictionary stands in a forward.

Does not choose them (`attention_matching`, `kvpress_rivals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treadle.contract.errors import InvalidArgument
from treadle.nn.config import ModelConfig
from treadle.nn.kv import SequenceKV
from treadle.nn.matched_keys import MatchedKeys
from treadle.nn.prefix_memory import Found
from treadle.nn.rope import Rope


@dataclass(frozen=True, slots=True)
class _Made:
    """What `CausalLM.forward` compares with its model."""

    model: ModelConfig


class CompactKV:
    """Keys, values and biases of all layers; takes a PrefixMemory's place in a PrefixUse.

    position_offset: where the first token behind the prefix stands
    """

    def __init__(self, config: ModelConfig, layers: Sequence[MatchedKeys], position_offset: int) -> None:
        if len(layers) != config.layers:
            raise InvalidArgument(f"{config.layers} layers expected, got {len(layers)}")
        self.dictionary, self.layers, self.position_offset = _Made(config), frozenset(range(config.layers)), position_offset
        self._layers = list(layers)

    @property
    def tokens(self) -> float:
        """Keys that a head keeps, on average."""
        return float(torch.stack([each.biases.isfinite().sum() / len(each.biases) for each in self._layers]).mean())

    def lookup(self, layer: int, queries: Tensor, rotated: Tensor, rope: Rope | None = None) -> Found:
        """Attention states of T tokens over what is kept. rotated: [T, H, head_dim]; the other arguments are a dictionary's."""
        rows = len(rotated)
        a, log_z = self._layers[layer].state(rotated)
        return Found(a, log_z, torch.ones(rows, 1, 1), torch.zeros(rows, 1, 1, dtype=torch.bool))


def kept_of(kv: SequenceKV, config: ModelConfig, kept: Tensor, position_offset: int) -> CompactKV:
    """Some of a prefix's own keys and values. kept: bool [layers, KV, tokens]; a head that keeps none sees nothing of the prefix."""
    layers = []
    for layer in range(config.layers):
        keys, values = kv.keys(layer).to(torch.float32), kv.values(layer).to(torch.float32)
        heads = [
            (keys[chosen, head], values[chosen, head], torch.zeros(int(chosen.sum()))) for head, chosen in enumerate(kept[layer])
        ]
        padded_keys, padded_values = (pad_sequence([head[part] for head in heads], batch_first=True) for part in (0, 1))
        bias = pad_sequence([head[2] for head in heads], batch_first=True, padding_value=-torch.inf)
        layers.append(MatchedKeys(padded_keys, padded_values, bias))
    return CompactKV(config, layers, position_offset)
