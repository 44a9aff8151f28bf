"""One layer's codebooks from its spilled samples: keys fitted, samples assigned, states added up.

Owns the passes over a layer and their memory. Does not know how tensors lie at rest (`artifact`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asm_store.building.clustering import assign, fit_centroids
from asm_store.building.entries import Aggregated, Entries, new_entries
from asm_store.building.spill import Spill
from treadle.contract.dictionary import DictionaryModel, DictionarySettings, Grouping, KeyMode
from treadle.nn.lookup_keys import join_heads, lookup_keys, lookup_queries, whitening_of
from treadle.nn.matched_keys import MatchedKeys
from treadle.nn.rope import Rope, rotate

TOKENS_AT_ONCE = 1024  # read from the spill
MATCHED_BATCH_PART = 2  # behind matched keys half as many keys an iteration fit as well, without them worse (docs/benchmarks.md)
FIT_BYTES = 96 << 20  # of fp32 keys that centroids are fitted on: more tokens than that are drawn from
WHITENING_TOKENS = 8192  # drawn at random for the covariance; the paper takes a random subsample too


@dataclass(frozen=True, slots=True, eq=False)
class LayerSamples:
    """What the spill holds of one layer, as keys and states of a dictionary's shape; nothing is held.

    positions: int64 [tokens of the spill], where each stands
    matched:   what every query sees at least; states are what is left beyond it then
    """

    spill: Spill
    layer: int
    settings: DictionarySettings
    model: DictionaryModel
    rope: Rope
    positions: Tensor
    matched: MatchedKeys | None = None

    @property
    def codebooks(self) -> int:
        """B."""
        return self.model.kv_heads if self.settings.grouping is Grouping.INDIVIDUAL else 1

    @property
    def entry_heads(self) -> int:
        """h, query heads of an entry."""
        return self.settings.heads_joined * (1 if self.settings.grouping is Grouping.INDIVIDUAL else self.model.kv_heads)

    def whitening(self, tokens: int) -> Tensor | None:
        """From the first `tokens`: fp32 [H, head_dim, head_dim], None where none is asked for."""
        if not self.settings.whitened:
            return None
        queries = self.spill.queries(self.layer, self._some(tokens, WHITENING_TOKENS))
        return whitening_of(lookup_queries(queries, queries, self.rope, self.settings), self.settings.ridge_ppm)

    def keys(self, tokens: int, whitening: Tensor | None) -> Tensor:
        """Keys fp32 [n, B, G / c, D] of the first `tokens`, or of as many of them, at random, as FIT_BYTES hold."""
        limit = FIT_BYTES // (4 * self.model.heads * self.model.head_dim)
        chosen = self._some(tokens, limit)
        parts = [
            self._keys_of(self.spill.queries(self.layer, chosen[first : first + TOKENS_AT_ONCE]), whitening)
            for first in range(0, len(chosen), TOKENS_AT_ONCE)
        ]
        return torch.cat(parts)

    def references(self, tokens: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """At most `limit` of the first `tokens`, at random: rotated queries and a, fp32 [n, H, head_dim], and log_z [n, H]."""
        chosen = self._some(tokens, limit)
        samples = self.spill.chosen(self.layer, chosen)
        return self._rotated(samples.queries, self.positions[torch.from_numpy(chosen)]), samples.a, samples.log_z

    def blocks(self, first: int, last: int, whitening: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tokens [first, last) in pieces: keys fp32 [n, B, G / c, D], a [n, B, G / c, h, head_dim], log_z [n, B, G / c, h]."""
        for at in range(first, last, TOKENS_AT_ONCE):
            end = min(at + TOKENS_AT_ONCE, last)
            samples = self.spill.read(self.layer, at, end)
            a, log_z = samples.a, samples.log_z
            if self.matched is not None:
                seen, seen_log_z = self.matched.state(self._rotated(samples.queries, self.positions[at:end]))
                a, log_z = a - seen, log_z - seen_log_z
            a, log_z = join_heads(a, self.settings, self.model), join_heads(log_z, self.settings, self.model)
            yield self._keys_of(samples.queries, whitening), a, log_z

    def key_blocks(self, first: int, last: int, whitening: Tensor | None) -> Iterator[Tensor]:
        """Tokens [first, last) in pieces: keys fp32 [n, B, G / c, D]."""
        for at in range(first, last, TOKENS_AT_ONCE):
            yield self._keys_of(self.spill.queries(self.layer, np.arange(at, min(at + TOKENS_AT_ONCE, last))), whitening)

    def _rotated(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Spilled queries [n, H, head_dim] after RoPE."""
        if self.settings.key is KeyMode.OWN_POSITION:
            return queries
        return rotate(queries, self.rope.angles(positions))

    def _keys_of(self, queries: Tensor, whitening: Tensor | None) -> Tensor:
        return lookup_keys(queries, queries, self.rope, self.settings, self.model, whitening)

    def _some(self, tokens: int, limit: int) -> NDArray[np.int64]:
        if tokens <= limit:
            return np.arange(tokens)
        draw = np.random.default_rng([self.settings.seed, self.layer, 0])
        return np.sort(draw.choice(tokens, limit, replace=False))


def fit(samples: LayerSamples, tokens: int, whitening: Tensor | None) -> Tensor:
    """Centroids fp32 [B, K, D] from the first `tokens`. Raises InvalidArgument where there are too few."""
    settings, keys = samples.settings, samples.keys(tokens, whitening)
    return torch.stack(
        [
            fit_centroids(
                keys[:, book].reshape(-1, keys.shape[-1]),
                settings.entries,
                settings.iterations,
                (settings.seed, samples.layer, 1 + book),
                batch_part=1 if samples.matched is None else MATCHED_BATCH_PART,
            )
            for book in range(samples.codebooks)
        ]
    )


def add_up(samples: LayerSamples, centroids: Tensor, first: int, last: int, whitening: Tensor | None) -> list[Entries]:
    """Sums over the tokens [first, last) for each codebook, each sample in the entry whose centroid is nearest. centroids: [B, K, D]"""
    settings, model = samples.settings, samples.model
    sums = [new_entries(settings.aggregation, settings.entries, samples.entry_heads, model.head_dim) for _ in centroids]
    for keys, a, log_z in samples.blocks(first, last, whitening):
        for book, entries in enumerate(sums):
            flat = keys[:, book].flatten(0, 1)
            index, _ = assign(flat, centroids[book])
            entries.add(index, flat, a[:, book].flatten(0, 1), log_z[:, book].flatten(0, 1))
    return sums


def filled(entries: Aggregated, keys: Tensor) -> Aggregated:
    """Every entry with a state: one that no sample chose takes that of its nearest neighbour which some did, and its count.

    keys: fp32 [K, D], the entries' keys; they stay as they are. An entry without a state would tell a query that there is no prefix.
    """
    empty = torch.nonzero(entries.counts == 0).flatten()
    chosen = torch.nonzero(entries.counts > 0).flatten()
    place = torch.arange(len(keys))
    place[empty] = chosen[assign(keys[empty], keys[chosen])[0]]
    return replace(entries.taken(place), keys=keys)


def cosines(samples: LayerSamples, keys: Tensor, first: int, last: int, whitening: Tensor | None) -> NDArray[np.float32]:
    """Cosine of every lookup of the tokens [first, last) to the key that it finds: fp32 [B, n]. keys: [B, K, D] as they lie at rest."""
    parts = [
        torch.stack([assign(block[:, book].flatten(0, 1), keys[book])[1] for book in range(len(keys))])
        for block in samples.key_blocks(first, last, whitening)
    ]
    found: NDArray[np.float32] = torch.cat(parts, dim=1).numpy()
    return found
