"""Matched keys of one layer: a few of the prefix's own keys, with values and biases such that attention over them comes close to all.

Closed form, from calibration queries q with outputs y and masses Z over the whole prefix, head by head of the keys:
1. keys C: those of the prefix with the highest root mean square of attention
2. biases log w: w = argmin |Phi w - 1| with Phi = exp(q C / sqrt d - log Z), WEIGHT_MIN <= w <= WEIGHT_MAX
3. values V: least squares of softmax(q C / sqrt d + log w) V = y, with a small ridge
Source: Attention Matching, arXiv 2602.16284, sections 3.2 and 3.3, with one pass instead of one for each layer: what it gets wrong, the
entries correct (docs/decisions/0039). Does not read the spill (`codebooks`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treadle.nn.matched_keys import MatchedKeys

MATCH_TOKENS = 2048  # calibration tokens whose queries the fit is made of
CHOOSE_TOKENS = 256  # of these, whose attention over the whole prefix says which keys are kept
WEIGHT_MIN, WEIGHT_MAX = math.exp(-3.0), math.exp(3.0)
RIDGE = 1e-5  # of the mean diagonal: the values' least squares, else singular where a key gets no attention
POWER_STEPS = 32  # one eigenvector leads by far in products of positive numbers: the bound is exact to 10 digits after 8 or so
STEPS = 300  # not yet at the bottom in most layers of a model: more make biases fit better, and values now better, now worse
_SMALLEST = 1e-30  # of a key that no query sees
PRODUCT_ROWS = 1024  # whose products are added up in fp32; their sums in fp64


def match_keys(rotated: Tensor, a: Tensor, log_z: Tensor, keys: Tensor, count: int) -> MatchedKeys:
    """The `count` matched keys of each key/value head.

    rotated, a: fp32 [n, H, head_dim], queries after RoPE and their outputs over the prefix; log_z: fp32 [n, H]
    keys: [S, KV, head_dim] of the whole prefix, S at least `count`
    """
    kv_heads = keys.shape[1]

    def grouped(of_heads: Tensor) -> Tensor:
        """[n, H, D] as [KV, n G, D]."""
        count, heads, width = of_heads.shape
        return of_heads.view(count, kv_heads, heads // kv_heads, width).transpose(0, 1).reshape(kv_heads, -1, width)

    asked = rotated[:: max(1, len(rotated) // CHOOSE_TOKENS)].contiguous()
    queries, outputs, masses, choosing = (grouped(each) for each in (rotated, a, log_z.unsqueeze(-1), asked))
    found = []
    for head in range(kv_heads):
        own_keys = keys[:, head].to(torch.float32)
        chosen = most_attended(choosing[head], own_keys, count)
        found.append(_fit(queries[head], outputs[head], masses[head, :, 0], own_keys[chosen]))
    return MatchedKeys(*(torch.stack(part) for part in zip(*found, strict=True)))


def most_attended(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """Places, rising, of the `count` keys [S, D] with the highest root mean square of attention by queries [n, D]."""
    attention = (queries @ keys.T / math.sqrt(queries.shape[1])).softmax(1)
    return attention.square().mean(0).topk(count).indices.sort().values


def bounded_least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """argmin |matrix w - target| with WEIGHT_MIN <= w <= WEIGHT_MAX, by accelerated projected gradients on the normal equations.

    matrix: [n, t], target: [n]. Source of the steps: FISTA, Beck and Teboulle 2009.
    """
    product, right = _normal(matrix, matrix), _normal(matrix, target.unsqueeze(1)).squeeze(1)
    step = 1.0 / largest_eigenvalue(product)
    now = ahead = torch.ones_like(right)
    pace = 1.0
    for _ in range(STEPS):
        after = (ahead - step * (product @ ahead - right)).clamp(WEIGHT_MIN, WEIGHT_MAX)
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead, now, pace = after + (pace - 1) / faster * (after - now), after, faster
    return now.to(torch.float32)


def largest_eigenvalue(product: Tensor) -> float:
    """Of a matrix [t, t] without negative numbers and not all 0: an upper bound that comes close after POWER_STEPS.

    Source: Collatz 1942, Wielandt 1950: no eigenvalue is above max (A x)_i / x_i, whatever x > 0 is. A seventh of all eigenvalues' time.
    """
    ahead = product.sum(1)
    for _ in range(POWER_STEPS):
        now = (ahead / ahead.max()).clamp_min(_SMALLEST)
        ahead = product @ now
    return float((ahead / now).max())


def least_squares(shares: Tensor, outputs: Tensor) -> Tensor:
    """argmin |shares V - outputs| + a small ridge: fp32 [t, D] for shares [n, t] and outputs [n, D]."""
    product = _normal(shares, shares)
    product += RIDGE * product.diagonal().mean() * torch.eye(len(product), dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(product, _normal(shares, outputs))
    return solved.to(torch.float32)


def _fit(queries: Tensor, outputs: Tensor, log_z: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [t, D], values [t, D], biases [t]) for the chosen keys of one head; queries, outputs: [n, D], log_z: [n]."""
    shares = (queries @ keys.T / math.sqrt(queries.shape[1]) - log_z.unsqueeze(1)).exp()
    weights = bounded_least_squares(shares, torch.ones(len(shares)))
    weighted = shares * weights
    weighted /= weighted.sum(1, keepdim=True)
    return keys, least_squares(weighted, outputs), weights.log()


def _normal(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, fp64 [t, D]. By numpy, which makes half of a matrix's product with itself and mirrors it."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for first in range(0, len(left), PRODUCT_ROWS):
        rows = slice(first, first + PRODUCT_ROWS)
        total += torch.from_numpy(left[rows].numpy().T @ right[rows].numpy())
    return total
