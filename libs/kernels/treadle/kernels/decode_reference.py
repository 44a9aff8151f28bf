"""Attention of single tokens over their sequences' keys in numpy: the specification of the native form, and what runs without it.

Owns appending to a sequence's keys and values and the state (a, log Z) over them. Sequences of several new tokens: `treadle.nn.attention`.
Source: arXiv 2605.18226, equation 2, with log Z in place of Z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.kernels.decode_arguments import check_attend, check_attend_keys, check_step

__all__ = ["DecodeStep", "attend_keys"]


class DecodeStep:
    """Some requests of one step that go on by one token each. Of one thread, and of no use after a cache has grown or moved."""

    def __init__(
        self, caches: Sequence[NDArray[np.float32]], lengths: NDArray[np.int64], rows: NDArray[np.int64], heads: int
    ) -> None:
        """caches:  of each of n sequences, different ones, [layers, 2, kv_heads, capacity, head_dim] fp32, keys and values; held, written
        lengths: [n] int64, tokens that are in a cache already, fewer than its capacity
        rows:    [n] int64, the token of the step that each of them goes on by
        heads:   query heads, a multiple of kv_heads
        Raises InvalidArgument naming what does not fit.
        """
        check_step(caches, lengths, rows, heads)
        self._sequences = list(zip(caches, lengths.tolist(), rows.tolist(), strict=True))
        self._tokens, self._heads = int(rows.max()) + 1, heads

    def attend(
        self, layer: int, queries: NDArray[np.float32], key_values: NDArray[np.float32],
        a: NDArray[np.float32], log_z: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Append the tokens' keys and values in one layer, and let them attend to all tokens of their sequences, themselves included.

        queries:    [T, heads, head_dim] fp32, rotated; only the heads of one token need to lie one after the other
        key_values: [T, 2, kv_heads, head_dim] fp32, keys (rotated) and values
        a, log_z:   [T, heads, head_dim] and [T, heads] fp32, written in the step's rows alone
        Raises InvalidArgument for shapes and dtypes.
        """
        check_attend(self._sequences[0][0], self._tokens, self._heads, layer, queries, key_values, a, log_z)
        for cache, length, row in self._sequences:
            cache[layer, :, :, length] = key_values[row]
            keys, values = cache[layer, :, :, : length + 1]
            grouped = queries[row].reshape(len(keys), -1, keys.shape[2]) / np.float32(math.sqrt(keys.shape[2]))
            scores = grouped @ keys.swapaxes(1, 2)
            peak = scores.max(-1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(-1, keepdims=True)
            a[row] = (weights @ values / total).reshape(a.shape[1:])
            log_z[row] = (np.log(total) + peak).reshape(-1)


def attend_keys(
    queries: NDArray[np.float32], rows: NDArray[np.int64] | None, keys: NDArray[np.float32], values: NDArray[np.float32],
    biases: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # fmt: skip
    """The attention states of some tokens over the same few keys: (a fp32 [n, heads, head_dim], log_z fp32 [n, heads]).

    queries:      [T, heads, head_dim] fp32, rotated; only the heads of one token need to lie one after the other
    rows:         int64 [n], which of the T tokens; None: all
    keys, values: [kv_heads, K, head_dim] fp32, keys rotated; kv_heads divides heads
    biases:       [kv_heads, K] fp32, added to the scaled scores; -inf: no key. a = 0 and log_z = -inf where there is none
    Every token reads every key: for few tokens. Raises InvalidArgument for shapes and dtypes.
    """
    check_attend_keys(queries, rows, keys, values, biases)
    asked = queries if rows is None else queries[rows]
    tokens, heads, dim = asked.shape
    kv_heads = len(keys)
    grouped = asked.reshape(tokens, kv_heads, -1, dim) / np.float32(math.sqrt(dim))
    scores = grouped @ keys.swapaxes(1, 2) + biases[:, None]
    peak = scores.max(-1, keepdims=True)
    peak[np.isneginf(peak)] = 0
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_z = np.log(total) + peak
    a = weights @ values / np.maximum(total, np.finfo(np.float32).tiny)
    return a.reshape(asked.shape).astype(np.float32), log_z.reshape(tokens, heads).astype(np.float32)
