"""The forward of a dense Llama, Qwen2 or Qwen3 model, written out: every key, value and hidden state is in reach.

Owns the order of computation for a flat batch of sequences, and the hook before each layer. Does not sample, schedule or
decide what is remembered (the engine), and does not read files (`weights`, `config`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from treadle.contract.errors import InvalidArgument
from treadle.nn.config import ModelConfig
from treadle.nn.kv import SequenceKV
from treadle.nn.own_keys import OwnKeys
from treadle.nn.prefix_memory import PrefixUse
from treadle.nn.prefix_step import PrefixCollector, PrefixStep
from treadle.nn.rope import Angles, Rope, rotate
from treadle.nn.weights import LayerWeights, Weights, load_weights

BeforeLayer = Callable[[int, Tensor], Tensor]


class CausalLM:
    """A language model on CPU, without gradients; weights are shared and never written, so threads may use one model."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.rope = Rope(config)

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
        """Load a Hugging Face folder: config.json and safetensors weights, single or with an index.

        Raises NotFound (files missing), InvalidArgument naming the key or tensor that does not fit, DataLoss (torn files).
        """
        config = ModelConfig.from_folder(path)
        return cls(config, load_weights(path, config, dtype))

    def new_kv(self, history: Mapping[int, int] | None = None) -> SequenceKV:
        """An empty KV for one sequence; `history` as a fusion's `history_widths` says."""
        return SequenceKV(self.config, self.dtype, history)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        starts: Sequence[int],
        kv: Sequence[SequenceKV],
        before_layer: BeforeLayer | None = None,
        prefixes: Sequence[PrefixUse | None] | None = None,
        *,
        shared: SequenceKV | None = None,
        collect: PrefixCollector | None = None,
        kv_only: bool = False,
    ) -> Tensor:
        """Run one step: a flat batch in which request r owns rows starts[r]:starts[r+1] and continues kv[r].

        tokens, positions: [T] int64; positions are those of RoPE, while a row sees all keys of its kv and its own request's rows up to itself
        starts:            R+1 rising numbers, 0 first and T last
        kv:                R different sequences; each is appended to, and left as it was if anything raises
        before_layer:      called as (layer, hidden [T, hidden]) before every layer in order; what it returns takes hidden's place
        prefixes:          for each request the dictionary that stands for what came before it, or None; counts its lookups. The caller
                           adds `position_offset` to the positions
        shared:            a sequence before all requests, read and not copied, for those rows and layers that have no dictionary; the
                           positions of the requests go on behind it
        collect:           is told of every layer what all rows saw of `shared`, which must be there
        kv_only:           nobody reads the hidden states: what follows the last layer's attention is left out
        Returns [T, hidden]: the last hidden states after the final norm; of kv_only [0, hidden].
        Raises InvalidArgument (shapes, ids or positions out of range), ResourceExhausted (a sequence grows beyond positions_max),
        FingerprintMismatch (a dictionary made for another model).
        """
        self._check(tokens, positions, starts, kv)
        before = None
        if shared is not None or collect is not None or (prefixes is not None and any(prefixes)):
            before = PrefixStep(self.config, self.rope, starts, kv, prefixes, shared, collect)
        rows = [end - start for start, end in pairwise(starts)]
        for count, sequence in zip(rows, kv, strict=True):
            sequence.reserve(sequence.length + count)
        own = OwnKeys(self.config, starts, kv, self.dtype)
        angles = self.rope.angles(positions)
        hidden = embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            if before_layer is not None:
                hidden = before_layer(index, hidden)
            hidden = hidden + self._attend(index, layer, hidden, angles, own, before)
            if kv_only and index == self.config.layers - 1:
                break
            hidden = hidden + self._mlp(layer, hidden)
        for count, sequence in zip(rows, kv, strict=True):
            sequence.advance(count)
        if before is not None:
            before.finish()
        return hidden[:0] if kv_only else self._norm(hidden, self.weights.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden] as `forward` returns it (pick the rows you need first); returns [n, vocab] fp32."""
        return self.weights.head(hidden).to(torch.float32)

    def _attend(
        self, index: int, layer: LayerWeights, hidden: Tensor, angles: Angles, own: OwnKeys, before: PrefixStep | None
    ) -> Tensor:
        config = self.config
        qkv = layer.qkv(self._norm(hidden, layer.input_norm)).view(len(hidden), -1, config.head_dim)
        query_key, value = torch.split(qkv, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = torch.split(query_key, [config.heads, config.kv_heads], dim=1)
            query_key = torch.cat((self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)), dim=1)
        rotated, key = torch.split(rotate(query_key, angles), [config.heads, config.kv_heads], dim=1)
        key_value = torch.stack((key, value), dim=1)  # [T, 2, kv_heads, head_dim], as a sequence keeps them
        if before is None:
            out, _ = own.attend(index, rotated, key_value, ())
        else:
            out = before.attend(index, query_key[:, : config.heads], rotated, key_value, own)
        return layer.output(out.to(hidden.dtype).view(len(hidden), -1))

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _check(self, tokens: Tensor, positions: Tensor, starts: Sequence[int], kv: Sequence[SequenceKV]) -> None:
        count = tokens.shape[0]
        if (
            tokens.shape != (count,)
            or positions.shape != (count,)
            or tokens.dtype != torch.int64
            or positions.dtype != torch.int64
            or not count
        ):
            raise InvalidArgument(
                f"tokens, positions: int64 [T], T > 0, expected; got {list(tokens.shape)} and {list(positions.shape)}"
            )
        if len(starts) < 2 or starts[0] != 0 or starts[-1] != count or any(a > b for a, b in pairwise(starts)):
            raise InvalidArgument(f"starts: must rise from 0 to the number of tokens ({count})")
        if len(kv) != len(starts) - 1 or len({id(sequence) for sequence in kv}) != len(kv):
            raise InvalidArgument(f"kv: {len(starts) - 1} different sequences expected, got {len(kv)}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab:
            raise InvalidArgument(f"tokens: ids are 0 to {self.config.vocab - 1}, got {int(tokens.min())} to {int(tokens.max())}")
        if int(positions.min()) < 0 or int(positions.max()) >= self.config.positions_max:
            raise InvalidArgument(f"positions: 0 to {self.config.positions_max - 1}, got up to {int(positions.max())}")
