"""Attention of one sequence's rows over its keys, and the merging of attention states.

An attention state is (a, log Z): the output over some of the keys, and the natural logarithm of the softmax's denominator
there. States over disjoint keys merge exactly (`merge`). Does not hold keys (`kv`) or rotate them (`rope`).
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treadle.contract.errors import InvalidArgument


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, with_state: Literal[False] = False) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, with_state: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, with_state: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v, query heads sharing key/value heads in groups.

    q:    [T, H, D]
    k, v: [S, KV, D], H a multiple of KV, any strides with the last dimension dense; read in place, never repeated
    mask: [T, S] bool, True where a row sees a key. None: causal, the T rows being the last T of the S keys
    Returns [T, H, D] of q's dtype; with_state: (a [T, H, D], log_z [T, H] fp32), a = 0 and log_z = -inf where a row sees no key.
    Raises InvalidArgument where shapes do not fit.
    """
    _check(q, k, v, mask)
    rows, keys, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if with_state:
        return _attention_state(q, k, v, causal_mask(rows, keys) if mask is None else mask)
    keys_first, values_first = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)  # [1, KV, S, D]
    if rows == 1 and mask is None:
        # One row sees every key, so the heads of a group can stand where rows stand: each key is read once, not once per head.
        folded = q.reshape(1, k.shape[1], groups, q.shape[2])
        return scaled_dot_product_attention(folded, keys_first, values_first).reshape(q.shape)
    if mask is None and rows < keys:
        mask = causal_mask(rows, keys)
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), keys_first, values_first, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1
    )
    return out.squeeze(0).transpose(0, 1)


def causal_mask(rows: int, keys: int) -> Tensor:
    """[rows, keys] bool, True where row t, being key `keys - rows + t` itself, sees a key."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def merge(a: Tensor, log_z: Tensor, other: Tensor, other_log_z: Tensor) -> tuple[Tensor, Tensor]:
    """The attention state over two disjoint sets of keys, from the state over each: exact, in natural-log space and fp32.

    a, other: [T, H, D]; log_z, other_log_z: [T, H] fp32, -inf for an empty set (which changes nothing)
    Returns (a fp32 [T, H, D], log_z fp32 [T, H]).
    """
    both = torch.logaddexp(log_z, other_log_z)
    peak = torch.where(both.isneginf(), 0.0, both)  # two empty sets: weights of 0, not of NaN
    mine, theirs = (log_z - peak).exp().unsqueeze(-1), (other_log_z - peak).exp().unsqueeze(-1)
    return a.to(torch.float32) * mine + other.to(torch.float32) * theirs, both


def _attention_state(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    (rows, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    groups = heads // kv_heads
    folded = q.to(torch.float32).reshape(rows, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, dim)
    scores = torch.matmul(folded, k.to(torch.float32).permute(1, 2, 0)).view(kv_heads, groups, rows, keys) / math.sqrt(dim)
    scores = scores.masked_fill(~mask, -torch.inf)
    log_z = scores.logsumexp(-1)  # [KV, G, T]
    peak = torch.where(log_z.isneginf(), 0.0, log_z)
    weights = (scores - peak.unsqueeze(-1)).exp().view(kv_heads, groups * rows, keys)
    out = torch.matmul(weights, v.to(torch.float32).transpose(0, 1)).view(kv_heads, groups, rows, dim)
    return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype), log_z.permute(2, 0, 1).reshape(rows, heads)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise InvalidArgument(
            f"attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; [T, H, D] and twice [S, KV, D] expected"
        )
    if mask is None and q.shape[0] > k.shape[0]:
        raise InvalidArgument(f"attention: {q.shape[0]} causal rows cannot be the last of {k.shape[0]} keys")
    if mask is not None and (mask.shape != (q.shape[0], k.shape[0]) or mask.dtype != torch.bool):
        raise InvalidArgument(f"mask: bool [{q.shape[0]}, {k.shape[0]}] expected, got {mask.dtype} {list(mask.shape)}")
