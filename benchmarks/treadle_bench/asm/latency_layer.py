"""One layer of the Llama-3.1-8B geometry, made up: a prefix as keys and values, the same number of dictionary entries, and queries.

Owns the shapes and how the numbers are drawn: keys in clusters, queries near keys, none of them twice. Their values decide nothing
that is timed but which lists are scanned. What a lookup finds on a real model is measured by `latency_recall`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treadle.kernels import entry_lists

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
HEADS_JOINED = 2  # c: query heads in a key
KEY_DIM = HEADS_JOINED * HEAD_DIM
LOOKUPS = GROUP // HEADS_JOINED  # of a token in each codebook; there is one for each key/value head
LIST_ITERATIONS = 4
KEYS_OF_A_CLUSTER = 16
KEY_NOISE, QUERY_NOISE = 0.6, 0.5  # length of what is added to a unit vector

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Lists:
    """First level of all codebooks. keys: [B, lists, D] fp32; starts: [B, lists + 1] int32."""

    keys: Floats
    starts: NDArray[np.int32]


class Layer:
    """A prefix of `entries` tokens and a dictionary of `entries` entries, in lists of about their square root. keys: [B, K, D] fp32, unit."""

    def __init__(self, entries: int, seed: int = 0) -> None:
        self.entries = entries
        self._chance = np.random.default_rng(seed)
        clusters = unit(self._normal(KV_HEADS, max(1, entries // KEYS_OF_A_CLUSTER), KEY_DIM))
        members = self._chance.integers(0, clusters.shape[1], (KV_HEADS, entries))
        near = np.take_along_axis(clusters, members[:, :, None], axis=1)
        keys = unit(near + KEY_NOISE * unit(self._normal(KV_HEADS, entries, KEY_DIM)))
        sorted_keys, list_keys, starts = [], [], []
        for book in range(KV_HEADS):
            order, first, start = entry_lists(keys[book], round(math.sqrt(entries)), seed, LIST_ITERATIONS)
            sorted_keys.append(keys[book][order])
            list_keys.append(first)
            starts.append(start)
        self.keys = np.stack(sorted_keys)
        self.lists = Lists(np.stack(list_keys), np.stack(starts))

    @cached_property
    def states(self) -> Floats:
        """[B, K, c, head_dim] fp32."""
        return self._normal(KV_HEADS, self.entries, HEADS_JOINED, HEAD_DIM)

    @cached_property
    def log_z(self) -> Floats:
        """[B, K, c] fp32."""
        return self._normal(KV_HEADS, self.entries, HEADS_JOINED)

    def prefix(self) -> tuple[Floats, Floats]:
        """Keys and values of the prefix, each [kv_heads, L, head_dim] fp32."""
        return self._normal(KV_HEADS, self.entries, HEAD_DIM), self._normal(KV_HEADS, self.entries, HEAD_DIM)

    def queries(self, count: int) -> Floats:
        """[count, heads, head_dim] fp32, each near another key."""
        asked = self._chance.integers(0, self.entries, (count, KV_HEADS, LOOKUPS))
        near = self.keys[np.arange(KV_HEADS)[:, None], asked]
        drawn = near + QUERY_NOISE * unit(self._normal(count, KV_HEADS, LOOKUPS, KEY_DIM))
        heads: Floats = drawn.reshape(count, HEADS, HEAD_DIM)
        return heads

    def _normal(self, *shape: int) -> Floats:
        return self._chance.standard_normal(shape, dtype=np.float32)


def unit(vectors: Floats) -> Floats:
    """Each of length 1."""
    lengthened: Floats = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return lengthened


def asked_keys(query: Floats) -> Floats:
    """Lookup keys [B, lookups, D], unit, of one token's query heads [heads, head_dim]: neighbours of a group joined."""
    return unit(query.reshape(KV_HEADS, LOOKUPS, KEY_DIM))
