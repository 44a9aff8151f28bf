"""The forward of a frozen model over equal blocks, with a gradient to the hidden state and to nothing else.

What learns beside a frozen model (an Engram table and its fusion) needs d loss / d hidden between layers, and no gradient
of any weight. The backward is written out: torch's own attention backward on CPU takes three times as long (85 against 30 ms
for 4 blocks of 512 tokens and SmolLM2's heads, bf16, one core), and autograd keeps what a frozen layer never needs.

Owns the two directions and the loss. Does not own what is added between layers, an optimiser or files (`weights` reads them).
Same mathematics as `CausalLM`, tested against it and against autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from treadle.contract.errors import InvalidArgument
from treadle.nn.config import ModelConfig
from treadle.nn.linear import Linear
from treadle.nn.rope import Rope
from treadle.nn.weights import CPU, Checkpoint, opened

QUERY_ROWS = 256  # queries of one attention product: causal products over chunks skip a quarter of a 512 x 512 square
LOSS_ROWS = 512  # rows of logits at once: 37 MiB fp32 at 18,800 tokens


class _Product:
    """x W^T forward and dy W backward, both packed. The plain weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.forward, self.backward = Linear(weight, bias), Linear(weight.t().contiguous())


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor
    qkv: _Product
    output: _Product
    mlp_norm: Tensor
    gate_up: _Product
    down: _Product


@dataclass(slots=True, eq=False)
class _Kept:
    """What one layer's backward needs of its forward."""

    hidden: Tensor
    heads: tuple[Tensor, Tensor, Tensor]  # q [B KV, G, L, D], k and v [B KV, L, D]
    weights: list[Tensor]  # softmax of each chunk of queries
    middle: Tensor
    gate: Tensor
    up: Tensor


def training_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it; fp32 on a CPU that would emulate it (one without AVX-512 takes six times as long)."""
    if device.type != "cpu":
        return torch.bfloat16
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]
    return torch.bfloat16 if native else torch.float32


class FrozenLM:
    """A frozen Llama or Qwen2 model over blocks of equal length, on one device. On a CPU
    weights take twice their plain size: each product is packed for both directions.
    Raises InvalidArgument for models with a norm on queries and keys (Qwen3), which have no backward here.
    """

    def __init__(self, config: ModelConfig, embedding_weight: Tensor, layers: list[_Layer], norm: Tensor, head: Tensor) -> None:
        self.config, self.embedding, self.head, self.norm = config, embedding_weight, head, norm
        self.dtype, self.device = embedding_weight.dtype, embedding_weight.device
        self._layers, self._rope = layers, Rope(config)
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int, list[Tensor]] = {}
        self._head: Linear | None = None

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype | None = None, device: torch.device = CPU) -> FrozenLM:
        """Load a Hugging Face folder. dtype: None: `training_dtype`. Raises as CausalLM.load, and InvalidArgument for Qwen3."""
        config = ModelConfig.from_folder(path)
        if config.qk_norm:
            raise InvalidArgument(f"{path}: models with norms on queries and keys (Qwen3) cannot be trained beside yet")
        with opened(path, dtype or training_dtype(device), device) as checkpoint:
            table = checkpoint.tensor("model.embed_tokens.weight", config.vocab, config.hidden)
            head = table if config.tied else checkpoint.tensor("lm_head.weight", config.vocab, config.hidden)
            layers = [_layer(checkpoint, config, f"model.layers.{index}.") for index in range(config.layers)]
            return cls(config, table, layers, checkpoint.tensor("model.norm.weight", config.hidden), head)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: [B, L] int64 on any device; returns [B L, hidden] in the model's dtype, a leaf without gradient."""
        return embedding(tokens.reshape(-1).to(self.device), self.embedding)

    def run(self, hidden: Tensor, length: int, first: int, last: int) -> Tensor:
        """Layers first … last-1 over blocks of `length` tokens, each attending to itself alone from position 0.

        hidden: [B length, hidden] of the model's dtype; not written. Returns the same shape, differentiable in `hidden`.
        """
        if hidden.shape[0] % length:
            raise InvalidArgument(f"hidden: {hidden.shape[0]} rows are no blocks of {length}")
        if first == last:
            return hidden
        return _Layers.apply(hidden, self, length, first, last)  # type: ignore[no-any-return,no-untyped-call]

    def loss(self, hidden: Tensor, targets: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Negative log-likelihood of the next tokens, nats, summed; differentiable in `hidden`.

        hidden:  [T, hidden], as `run` leaves it behind the last layer; the final norm is applied here
        targets: [T] int64 on any device, the tokens that follow (row numbers of `chosen` where that is given); -1: not counted
        chosen:  [n, hidden], rows of the output matrix that the softmax goes over; None: the whole vocabulary
        """
        weight = self.head if chosen is None else chosen
        return _Loss.apply(hidden, self, targets.to(self.device), weight)  # type: ignore[no-any-return,no-untyped-call]

    @torch.no_grad()
    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood [T] fp32 of each row over the whole vocabulary, 0 where targets is -1; no gradient."""
        if self._head is None:
            self._head = Linear(self.head)
        normed, out = (
            rms_norm(hidden, self.norm.shape, self.norm, self.config.norm_eps),
            torch.zeros(len(hidden), device=self.device),
        )
        for at in range(0, len(hidden), LOSS_ROWS):
            wanted = targets[at : at + LOSS_ROWS].to(self.device)
            logits = self._head(normed[at : at + LOSS_ROWS]).to(torch.float32)
            picked = logits.gather(1, wanted.clamp_min(0).unsqueeze(1)).squeeze(1)
            out[at : at + LOSS_ROWS] = torch.where(wanted < 0, 0.0, logits.logsumexp(-1) - picked)
        return out

    def forward_layer(self, index: int, hidden: Tensor, length: int, kept: list[_Kept] | None) -> Tensor:
        """One layer; what its backward needs is appended to `kept`."""
        layer, eps = self._layers[index], self.config.norm_eps
        normed = rms_norm(hidden, layer.input_norm.shape, layer.input_norm, eps)
        heads = self._heads(layer.qkv.forward(normed), length)
        attended, weights = self._attend(heads, length, keep=kept is not None)
        middle = hidden + layer.output.forward(attended)
        normed = rms_norm(middle, layer.mlp_norm.shape, layer.mlp_norm, eps)
        gate, up = layer.gate_up.forward(normed).chunk(2, dim=-1)
        if kept is not None:
            kept.append(_Kept(hidden, heads, weights, middle, gate, up))
        return layer.down.forward(silu(gate) * up).add_(middle)

    def backward_layer(self, index: int, kept: _Kept, grad: Tensor, length: int) -> Tensor:
        """d loss / d hidden before a layer, from that behind it. grad: [T, hidden], not written."""
        layer, eps = self._layers[index], self.config.norm_eps
        inner = layer.down.backward(grad)
        d_gate_up = torch.empty(len(grad), 2 * self.config.intermediate, dtype=grad.dtype, device=grad.device)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(inner, silu(kept.gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(inner.mul_(kept.up), kept.gate))
        d_middle = _norm_backward(layer.gate_up.backward(d_gate_up), kept.middle, layer.mlp_norm, eps).add_(grad)
        d_heads = self._attend_backward(kept, layer.output.backward(d_middle), length)
        return _norm_backward(layer.qkv.backward(d_heads), kept.hidden, layer.input_norm, eps).add_(d_middle)

    def _heads(self, qkv: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        config, groups = self.config, self.config.heads // self.config.kv_heads
        cos, sin = self._angles_of(length)
        split = qkv.view(-1, length, config.heads + 2 * config.kv_heads, config.head_dim).transpose(1, 2)
        turned = _turn(split[:, : config.heads + config.kv_heads], cos, sin)
        q = turned[:, : config.heads].reshape(-1, groups, length, config.head_dim)
        k = turned[:, config.heads :].reshape(-1, length, config.head_dim)
        return q, k, split[:, config.heads + config.kv_heads :].reshape(-1, length, config.head_dim)

    def _attend(self, heads: tuple[Tensor, Tensor, Tensor], length: int, *, keep: bool) -> tuple[Tensor, list[Tensor]]:
        q, k, v = heads
        scale, out, weights = 1 / math.sqrt(self.config.head_dim), torch.empty_like(q), []
        for at, mask in zip(range(0, length, QUERY_ROWS), self._masks_of(length), strict=True):
            rows, keys = slice(at, at + QUERY_ROWS), slice(0, at + QUERY_ROWS)
            chunk = q[:, :, rows].flatten(1, 2)
            scores = torch.baddbmm(mask, chunk, k[:, keys].transpose(1, 2), alpha=scale)
            share = torch.softmax(scores, -1)
            out[:, :, rows] = torch.bmm(share, v[:, keys]).view(q.shape[0], q.shape[1], -1, q.shape[3])
            if keep:
                weights.append(share)
        return self._flat(out, length), weights

    def _attend_backward(self, kept: _Kept, grad: Tensor, length: int) -> Tensor:
        """d loss / d qkv [T, (heads + 2 kv_heads) head_dim] from that of the heads' outputs [T, heads head_dim]."""
        (q, k, v), config, scale = kept.heads, self.config, 1 / math.sqrt(self.config.head_dim)
        d_out = grad.view(-1, length, config.heads, config.head_dim).transpose(1, 2).reshape(q.shape)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at, share in zip(range(0, length, QUERY_ROWS), kept.weights, strict=True):
            rows, keys = slice(at, at + QUERY_ROWS), slice(0, at + QUERY_ROWS)
            chunk, d_chunk = q[:, :, rows].flatten(1, 2), d_out[:, :, rows].flatten(1, 2)
            d_share = torch.bmm(d_chunk, v[:, keys].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_share, share, -1, share.dtype)
            d_v[:, keys] += torch.bmm(share.transpose(1, 2), d_chunk)
            d_k[:, keys] += torch.bmm(d_scores.transpose(1, 2), chunk)
            d_q[:, :, rows] = torch.bmm(d_scores, k[:, keys]).view(q.shape[0], q.shape[1], -1, q.shape[3])
        cos, sin = self._angles_of(length)
        d_qkv = torch.empty(len(grad), config.heads + 2 * config.kv_heads, config.head_dim, dtype=grad.dtype, device=grad.device)
        by_head = d_qkv.view(-1, length, config.heads + 2 * config.kv_heads, config.head_dim).transpose(1, 2)
        _turn_back(d_q.view(-1, config.heads, length, config.head_dim).mul_(scale), cos, sin, by_head[:, : config.heads])
        shape, value_at = (-1, config.kv_heads, length, config.head_dim), config.heads + config.kv_heads
        _turn_back(d_k.view(shape).mul_(scale), cos, sin, by_head[:, config.heads : value_at])
        by_head[:, value_at:] = d_v.view(shape)
        return d_qkv.view(len(grad), -1)

    def _flat(self, heads: Tensor, length: int) -> Tensor:
        return (
            heads.view(-1, self.config.heads, length, self.config.head_dim)
            .transpose(1, 2)
            .reshape(-1, self.config.heads * self.config.head_dim)
        )

    def _angles_of(self, length: int) -> tuple[Tensor, Tensor]:
        if length not in self._angles:
            cos, sin = self._rope.angles(torch.arange(length))
            self._angles[length] = cos.squeeze(1).to(self.device, self.dtype), sin.squeeze(1).to(self.device, self.dtype)
        return self._angles[length]

    def _masks_of(self, length: int) -> list[Tensor]:
        """What is added to the scores of each chunk of queries, [1, G rows, keys]: 0, or -inf for keys behind the query."""
        if length not in self._masks:
            groups, masks = self.config.heads // self.config.kv_heads, []
            for at in range(0, length, QUERY_ROWS):
                rows = min(QUERY_ROWS, length - at)
                mask = torch.full((rows, at + rows), -torch.inf, dtype=self.dtype, device=self.device).triu(at + 1)
                masks.append(mask.repeat(groups, 1).unsqueeze(0))
            self._masks[length] = masks
        return self._masks[length]


class _Layers(torch.autograd.Function):
    """A run of layers as one step of autograd."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, model: FrozenLM, length: int, first: int, last: int) -> Tensor:
        kept: list[_Kept] | None = [] if ctx.needs_input_grad[0] else None
        for index in range(first, last):
            hidden = model.forward_layer(index, hidden, length, kept)
        ctx.run = model, length, first, kept
        return hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        model, length, first, kept = ctx.run
        grad = grads[0]
        while kept:
            grad = model.backward_layer(first + len(kept) - 1, kept.pop(), grad, length)
        return grad, None, None, None, None


class _Loss(torch.autograd.Function):
    """Final norm, output matrix and cross-entropy; the gradient is made in the forward, so that logits are never kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, model: FrozenLM, targets: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(hidden, model.norm.shape, model.norm, model.config.norm_eps)
        d_normed, total = torch.empty_like(normed), torch.zeros((), dtype=torch.float64, device=hidden.device)
        for at in range(0, len(hidden), LOSS_ROWS):
            wanted = targets[at : at + LOSS_ROWS]
            counted = wanted >= 0
            logits = torch.mm(normed[at : at + LOSS_ROWS], weight.t()).to(torch.float32)
            logits -= logits.logsumexp(-1, keepdim=True)
            picked = logits.gather(1, wanted.clamp_min(0).unsqueeze(1))
            total -= torch.where(counted, picked.squeeze(1), 0.0).sum(dtype=torch.float64)
            share = logits.exp_()
            share.scatter_add_(1, wanted.clamp_min(0).unsqueeze(1), torch.full_like(picked, -1.0))
            share.mul_(counted.unsqueeze(1))
            torch.mm(share.to(weight.dtype), weight, out=d_normed[at : at + LOSS_ROWS])
        ctx.grad = _norm_backward(d_normed, hidden, model.norm, model.config.norm_eps)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.grad * grads[0].to(ctx.grad.dtype), None, None, None


def _layer(checkpoint: Checkpoint, config: ModelConfig, at: str) -> _Layer:
    hidden, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim

    def product(names: list[str], inputs: int, outputs: tuple[int, ...], bias: bool) -> _Product:
        return _Product(*checkpoint.fused(names, inputs, outputs, bias))

    return _Layer(
        input_norm=checkpoint.tensor(f"{at}input_layernorm.weight", hidden),
        qkv=product([f"{at}self_attn.{name}_proj" for name in "qkv"], hidden, (query, key, key), config.attention_bias),
        output=product([f"{at}self_attn.o_proj"], query, (hidden,), config.output_bias),
        mlp_norm=checkpoint.tensor(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=product([f"{at}mlp.gate_proj", f"{at}mlp.up_proj"], hidden, (config.intermediate,) * 2, config.mlp_bias),
        down=product([f"{at}mlp.down_proj"], config.intermediate, (hidden,), config.mlp_bias),
    )


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, n, L, D] with cos and sin [L, D / 2]; a new tensor."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _turn_back(grad: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """The transposed turn: what a gradient behind RoPE is before it."""
    first, second = grad.chunk(2, dim=-1)
    half = grad.shape[-1] // 2
    torch.add(first * cos, second * sin, out=out[..., :half])
    torch.sub(second * cos, first * sin, out=out[..., half:])


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """d loss / d x of rms_norm(x) * weight. grad, x: [T, d]; a new tensor."""
    inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_() / x.shape[-1] + eps).rsqrt_()
    weighted = grad * weight
    along = (weighted * x).sum(-1, keepdim=True, dtype=torch.float32) * inverse.square() / x.shape[-1]
    return weighted.sub_(x * along.to(x.dtype)).mul_(inverse.to(x.dtype))
