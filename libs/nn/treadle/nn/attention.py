"""Attention of one sequence's rows over its keys, and the merging of attention states.

An attention state is (a, log Z): the output over some of the keys, and the natural logarithm of the softmax's denominator
there. States over disjoint keys merge exactly (`merge`). Does not hold keys (`kv`) or rotate them (`rope`).
Source: arXiv 2605.18226, equations 2 and 3, with log Z in place of Z (docs/decisions/0033). No gradients flow through states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treadle.contract.dictionary import LOG_BASE
from treadle.contract.errors import InvalidArgument

SCORES_AT_ONCE = 1 << 22  # fp32 numbers, 16 MiB: rows go in pieces, so that a state over a long prefix takes no more memory
CAUSAL_ROWS = 256  # at once: a piece passes over the keys behind its last row
LOG_BASES = {LOG_BASE: 1.0, "2": math.log(2.0)}  # a logarithm to this base -> what makes it a natural one; 2: FlashInfer's
_SMALLEST = torch.finfo(torch.float32).tiny
# torch's own kernel behind scaled_dot_product_attention tells log Z, and stands for 40 us of a decoding step's 60 here. torch does not
# promise it, hence the question; `_state` is the same written out.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


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
    Returns [T, H, D] of q's dtype; with_state: (a fp32 [T, H, D], log_z fp32 [T, H]), a = 0 and log_z = -inf where a row sees no key.
    Raises InvalidArgument where shapes do not fit.
    """
    _check(q, k, v, mask)
    rows, keys, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if with_state:
        return _causal_state(q, k, v) if mask is None else _in_pieces(q, k, v, mask)
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


def attention_state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state of rows that all see all keys, those of a prefix before them: (a fp32 [T, H, D], log_z fp32 [T, H]).

    q, k, v: as for `attention`; no keys: a = 0 and log_z = -inf. Takes SCORES_AT_ONCE numbers beside the result.
    Raises InvalidArgument where shapes do not fit.
    """
    _check_shapes(q, k, v)
    return _state_over_all(q, k, v)


def merge(a: Tensor, log_z: Tensor, other: Tensor, other_log_z: Tensor) -> tuple[Tensor, Tensor]:
    """The attention state over two disjoint sets of keys, from the state over each: exact, in natural-log space and fp32.

    Associative and commutative up to rounding, which is 6e-8 of a weight, and 6e-8 |log Z| where log Z was rounded before.
    a, other: [T, H, D], 0 where the set is empty; log_z, other_log_z: [T, H] fp32, -inf for an empty set (which changes nothing)
    Returns (a fp32 [T, H, D], log_z fp32 [T, H]). Raises InvalidArgument where log_z is not fp32: Z reaches 5.7e9, fp16 ends at 65504.
    """
    return merged_output(a, log_z, other, other_log_z), torch.logaddexp(log_z, other_log_z)


def merged_output(a: Tensor, log_z: Tensor, other: Tensor, other_log_z: Tensor) -> Tensor:
    """What `merge` returns first, alone: a fp32 [T, H, D]."""
    if log_z.dtype != torch.float32 or other_log_z.dtype != torch.float32:
        raise InvalidArgument(f"log_z: float32 expected, got {log_z.dtype} and {other_log_z.dtype}")
    # Only the difference of the logarithms counts, and near 0 it is exact: log Z of 1e4 is rounded to 1e-3, its sum with another too.
    share = torch.sigmoid(other_log_z - log_z).masked_fill(other_log_z.isneginf(), 0.0)  # two empty sets: 0, not NaN
    return torch.lerp(a.to(torch.float32), other.to(torch.float32), share.unsqueeze(-1))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionState:
    """A state that has crossed a border (a process, a file, another engine), and says what its logarithm means.

    a:     [T, H, D], any floating dtype, 0 where the set of keys is empty
    log_z: [T, H] fp32, -inf for an empty set; log_base: one of LOG_BASES
    Raises InvalidArgument for other shapes, dtypes or bases.
    """

    a: Tensor
    log_z: Tensor
    log_base: str = LOG_BASE

    def __post_init__(self) -> None:
        if self.log_base not in LOG_BASES:
            raise InvalidArgument(f"log_base: one of {sorted(LOG_BASES)}, got {self.log_base!r}")
        if self.a.ndim != 3 or self.log_z.shape != self.a.shape[:2] or self.log_z.dtype != torch.float32:
            raise InvalidArgument(
                f"state: a [T, H, D] and log_z fp32 [T, H] expected, got {list(self.a.shape)} and {self.log_z.dtype} {list(self.log_z.shape)}"
            )

    def natural(self) -> AttentionState:
        """The same state with a natural logarithm."""
        if self.log_base == LOG_BASE:
            return self
        return AttentionState(self.a, self.log_z * LOG_BASES[self.log_base])

    def merged(self, other: AttentionState) -> AttentionState:
        """The state over both sets of keys, natural; see `merge`."""
        mine, theirs = self.natural(), other.natural()
        return AttentionState(*merge(mine.a, mine.log_z, theirs.a, theirs.log_z))


def _causal_state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The T rows are the last T of the S keys, each sees those up to itself."""
    rows, before = q.shape[0], k.shape[0] - q.shape[0]
    if rows == 1:
        return _state_over_all(q, k, v)
    if _fuses(q, k):
        own = _fused_causal(q, k[before:], v[before:])
        return merge(*own, *_state_over_all(q, k[:before], v[:before])) if before else own
    parts = []
    for first in range(0, max(rows, 1), CAUSAL_ROWS):
        part = q[first : first + CAUSAL_ROWS]
        seen = before + first + len(part)
        parts.append(_in_pieces(part, k[:seen], v[:seen], causal_mask(len(part), seen)))
    return _joined(parts)


def _state_over_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Every row sees every key."""
    if not _fuses(q, k):
        return _in_pieces(q, k, v, None)
    (rows, heads, dim), (kv_heads, groups) = q.shape, (k.shape[1], q.shape[1] // k.shape[1])
    # The heads of a group stand where rows stand: each key is read once, not once per head.
    folded = q.reshape(rows, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, dim)
    assert _FUSED is not None
    out, log_z = _FUSED(folded, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
    return (
        out.view(kv_heads, groups, rows, dim).permute(2, 0, 1, 3).reshape(q.shape),
        log_z.view(kv_heads, groups, rows).permute(2, 0, 1).reshape(rows, heads),
    )


def _fused_causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As many keys as rows."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (each.transpose(0, 1).repeat_interleave(groups, 0).unsqueeze(0) for each in (k, v))
    assert _FUSED is not None
    out, log_z = _FUSED(q.transpose(0, 1).unsqueeze(0), keys, values, 0.0, True)
    return out.squeeze(0).transpose(0, 1), log_z.squeeze(0).transpose(0, 1)


def _fuses(q: Tensor, k: Tensor) -> bool:
    return _FUSED is not None and q.dtype == k.dtype == torch.float32 and q.device.type == "cpu" and bool(len(q)) and bool(len(k))


def _in_pieces(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """mask None: every row sees every key."""
    if not len(k):
        return torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    at_once = max(1, SCORES_AT_ONCE // (q.shape[1] * len(k)))
    keys, values = k.to(torch.float32).permute(1, 2, 0), v.to(torch.float32).transpose(0, 1)
    return _joined(
        [
            _state(q[first : first + at_once], keys, values, None if mask is None else mask[first : first + at_once])
            for first in range(0, max(len(q), 1), at_once)
        ]
    )


def _state(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q: [T, H, D]; keys: fp32 [KV, D, S], values: fp32 [KV, S, D]; mask: [T, S], or None where every row sees every key."""
    (rows, heads, dim), (kv_heads, count, _) = q.shape, values.shape
    groups = heads // kv_heads
    scaled = q.to(torch.float32) * (1.0 / math.sqrt(dim))
    folded = scaled.reshape(rows, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, dim)
    scores = torch.matmul(folded, keys)  # [KV, G T, S], written over from here on: it is the largest thing around
    if mask is not None:
        scores.view(kv_heads, groups, rows, count).masked_fill_(~mask, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    if mask is not None:
        peak.masked_fill_(peak.isneginf(), 0.0)  # a row that sees no key: weights of 0, not of NaN
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, values).div_(total if mask is None else total.clamp_min(_SMALLEST))
    log_z = total.log_().add_(peak)
    return (
        out.view(kv_heads, groups, rows, dim).permute(2, 0, 1, 3).reshape(q.shape),
        log_z.view(kv_heads, groups, rows).permute(2, 0, 1).reshape(rows, heads),
    )


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([a for a, _ in parts]), torch.cat([log_z for _, log_z in parts])


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    _check_shapes(q, k, v)
    if mask is None and q.shape[0] > k.shape[0]:
        raise InvalidArgument(f"attention: {q.shape[0]} causal rows cannot be the last of {k.shape[0]} keys")
    if mask is not None and (mask.shape != (q.shape[0], k.shape[0]) or mask.dtype != torch.bool):
        raise InvalidArgument(f"mask: bool [{q.shape[0]}, {k.shape[0]}] expected, got {mask.dtype} {list(mask.shape)}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise InvalidArgument(
            f"attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; [T, H, D] and twice [S, KV, D] expected"
        )
