"""Queries to lookup keys: which of their forms, whitened or not, which heads joined; and whitening itself.

What the builder clusters, and the definition of the keys that `treadle.kernels.EntryStates` makes of queries that are looked up. Owns the
order of heads in an entry (`join_heads`). Does not search (`prefix_memory`) or cluster.
Source: arXiv 2605.18226, sections 3.5 and 3.6, equation 8; what these leave open is settled in docs/decisions/0033.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from treadle.contract.dictionary import DictionarySettings, Grouping, KeyMode
from treadle.contract.errors import InvalidArgument
from treadle.nn.rope import Rope, rotate

_LENGTH_MIN = 1e-12  # a query of zeros stays zeros


class HeadLayout(Protocol):
    """How the heads of a model stand to each other; a DictionaryModel and a ModelConfig fit."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads, a divisor of `heads`: query head h uses key/value head h // G."""


def lookup_keys(
    queries: Tensor, rotated: Tensor, rope: Rope | None, settings: DictionarySettings, model: HeadLayout,
    whitening: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The lookup keys of T tokens in one layer: fp32 [T, B, G / c, D], each of length 1 (a query of zeros stays zeros).

    queries, rotated: [T, H, head_dim] before and after RoPE; which of them is read says settings.key
    rope:      turns to settings.key_position; None will do for other modes than rope-unified
    whitening: [H, head_dim, head_dim] fp32 as `whitening_of` gives it, applied to each head before heads are joined; None: not whitened
    Raises InvalidArgument where settings, model and arguments do not fit each other.
    """
    if settings.whitened != (whitening is not None):
        raise InvalidArgument(f"whitening: settings.ridge_ppm is {settings.ridge_ppm}, so it is {_asked_for(settings.whitened)}")
    heads = lookup_queries(queries, rotated, rope, settings)
    if whitening is not None:
        heads = torch.bmm(heads.transpose(0, 1), whitening.transpose(1, 2)).transpose(0, 1)
    joined = join_heads(heads, settings, model).flatten(3)
    lengths: Tensor = torch.linalg.vector_norm(joined, dim=-1, keepdim=True)
    return joined / lengths.clamp_min_(_LENGTH_MIN)


def lookup_queries(queries: Tensor, rotated: Tensor, rope: Rope | None, settings: DictionarySettings) -> Tensor:
    """The form of the query heads that settings.key says, neither whitened nor joined: fp32 [T, H, head_dim]. What whitening is learnt from.

    Arguments as for `lookup_keys`. Raises InvalidArgument for rope-unified keys without `rope`.
    """
    if settings.key is KeyMode.OWN_POSITION:
        return rotated.to(torch.float32)
    if settings.key is KeyMode.PRE_ROPE:
        return queries.to(torch.float32)
    if rope is None:
        raise InvalidArgument("rope: rope-unified keys need the model's Rope")
    return rotate(queries.to(torch.float32), rope.angles(torch.tensor([settings.key_position])))


def join_heads(values: Tensor, settings: DictionarySettings, model: HeadLayout) -> Tensor:
    """Heads [T, H, ...] as the entries of a dictionary hold them, [T, B, G / c, h, ...]: `Dictionary.heads_of_lookups` says which.

    Raises InvalidArgument where settings.heads_joined does not divide a group.
    """
    joined, books, groups = _sizes(settings, model)
    parted = values.reshape(len(values), model.kv_heads, groups, joined, *values.shape[2:])
    if settings.grouping is Grouping.INDIVIDUAL:
        return parted
    return parted.transpose(1, 2).reshape(len(values), books, groups, model.kv_heads * joined, *values.shape[2:])


def whitening_of(queries: Tensor, ridge_ppm: int) -> Tensor:
    """Sigma^(-1/2) of each head, so that no direction of its queries outweighs another: fp32 [H, head_dim, head_dim], symmetric.

    queries:   [n, H, head_dim] of one layer, in the form that settings.key says (`lookup_queries`)
    ridge_ppm: added to Sigma's diagonal, in millionths of its mean
    Sigma is the mean of q q^T, not centred: a cosine is taken from the origin, and the mean of the queries, hardly varying, would
    come out as the largest part of every centred key. Raises InvalidArgument for no queries, a ridge of 0, or a head that is all zeros.
    """
    if queries.ndim != 3 or not len(queries) or ridge_ppm < 1:
        raise InvalidArgument(f"whitening: queries [n, H, head_dim] and a ridge, got {list(queries.shape)} and {ridge_ppm} ppm")
    heads = queries.to(torch.float64).transpose(0, 1)
    sigma = torch.bmm(heads.transpose(1, 2), heads) / len(queries)
    mean = sigma.diagonal(dim1=1, dim2=2).mean(-1)
    if not bool((mean > 0).all()) or not bool(mean.isfinite().all()):
        raise InvalidArgument("whitening: the queries of a head are all zeros, or not finite")
    sigma += (ridge_ppm / 1e6 * mean)[:, None, None] * torch.eye(sigma.shape[-1], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(sigma)
    whitening: Tensor = (vectors * values.rsqrt().unsqueeze(1)) @ vectors.transpose(1, 2)
    return whitening.to(torch.float32)


def _sizes(settings: DictionarySettings, model: HeadLayout) -> tuple[int, int, int]:
    """c, B and G / c."""
    joined, group = settings.heads_joined, model.heads // model.kv_heads
    if group % joined:
        raise InvalidArgument(f"settings.heads_joined: divides the {group} query heads of a group, got {joined}")
    return joined, model.kv_heads if settings.grouping is Grouping.INDIVIDUAL else 1, group // joined


def _asked_for(whitened: bool) -> str:
    return "needed" if whitened else "not to be given"
