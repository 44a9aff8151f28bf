"""How much of a text stands word for word in another: the share of its tokens that lie in long n-grams of both.

Owns hashing of n-grams and the count. Does not know what the texts are for. A held-out text that shares much with what is learnt
measures how well the memory recites.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONG_NGRAM_TOKENS = 24  # a run of this many tokens that stands elsewhere too is a quotation, not a turn of phrase


def ngram_hashes(texts: Sequence[NDArray[np.int64]], length: int = LONG_NGRAM_TOKENS) -> NDArray[np.uint64]:
    """64-bit hashes of every run of `length` tokens in `texts` (int64 [n] each), rising, each once."""
    return np.unique(np.concatenate([_hashes(tokens, length) for tokens in texts] or [np.empty(0, dtype=np.uint64)]))


def covered(texts: Sequence[NDArray[np.int64]], known: NDArray[np.uint64], length: int = LONG_NGRAM_TOKENS) -> float:
    """Share of the tokens of `texts` that lie in a run of `length` whose hash is in `known` (see `ngram_hashes`); 0 for no tokens."""
    inside = total = 0
    for tokens in texts:
        hashes = _hashes(tokens, length)
        hit = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes if len(known) else hashes != hashes
        edges = np.zeros(len(tokens) + 1, dtype=np.int64)
        edges[: len(hit)] += hit
        edges[length : length + len(hit)] -= hit
        inside += int((np.cumsum(edges)[:-1] > 0).sum())
        total += len(tokens)
    return inside / total if total else 0.0


def _hashes(tokens: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """A 64-bit polynomial hash of every run of `length` tokens; empty for shorter texts."""
    if len(tokens) < length:
        return np.empty(0, dtype=np.uint64)
    count, out = len(tokens) - length + 1, np.zeros(len(tokens) - length + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(length):
            out = out * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + count].astype(np.uint64) + np.uint64(1)
            out ^= out >> np.uint64(29)
    return out
