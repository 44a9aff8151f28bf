"""Entries sorted into lists, for a two-level lookup: lists of neighbours that lie one after the other.

Owns the clustering of keys into lists, offline and in numpy. Does not look up (`treadle.kernels.nearest`) nor move tensors: the
caller stores its entries in the order given here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels.arguments import check_array

KEYS_AT_ONCE = 8192  # products [keys, lists] are made in pieces, so that memory stays bounded


def entry_lists(
    keys: NDArray[np.float32], lists: int, seed: int, iterations: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Cluster keys by spherical k-means (largest cosine to a unit centroid), the same for the same seed on the same machine.

    keys: [K, D] fp32, of any length but compared by direction; lists: 1 to K; iterations: 0 or more, passes that move centroids
    Returns (order int32 [K], list_keys fp32 [lists, D] of length 1, list_starts int32 [lists + 1]): entry order[i] goes to place i,
    and places list_starts[l] to list_starts[l + 1] are list l, each list in its old order. A list that nobody is nearest to is begun
    again at the key farthest from its own centroid; in the end a list may still be empty.
    Raises InvalidArgument for shapes, dtypes and numbers that are not finite.
    """
    check_array("keys", keys, np.dtype(np.float32), None)
    if keys.ndim != 2 or not len(keys) or not 1 <= lists <= len(keys) or iterations < 0:
        raise InvalidArgument(
            f"entry_lists: keys [K, D], 1 to K lists and 0 or more iterations expected, got {keys.shape}, {lists}, {iterations}"
        )
    if not np.isfinite(keys).all():
        raise InvalidArgument("keys: a number is NaN or infinite")
    unit = _unit(keys)
    centroids = unit[np.sort(np.random.default_rng(seed).choice(len(unit), lists, replace=False))]
    nearest, cosine = _assign(unit, centroids)
    for _ in range(iterations):
        centroids = _moved(unit, centroids, nearest, cosine)
        nearest, cosine = _assign(unit, centroids)
    starts = np.zeros(lists + 1, dtype=np.int32)
    np.cumsum(np.bincount(nearest, minlength=lists), out=starts[1:])
    return np.argsort(nearest, kind="stable").astype(np.int32), centroids, starts


def _assign(unit: NDArray[np.float32], centroids: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    nearest, cosine = np.empty(len(unit), dtype=np.int64), np.empty(len(unit), dtype=np.float32)
    for first in range(0, len(unit), KEYS_AT_ONCE):
        part = slice(first, first + KEYS_AT_ONCE)
        products = unit[part] @ centroids.T
        nearest[part] = products.argmax(axis=1)
        cosine[part] = products.max(axis=1)
    return nearest, cosine


def _moved(
    unit: NDArray[np.float32], centroids: NDArray[np.float32], nearest: NDArray[np.int64], cosine: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Centroids at the mean direction of their keys; those without keys at the keys farthest from theirs."""
    order = np.argsort(nearest, kind="stable")
    counts = np.bincount(nearest, minlength=len(centroids))
    filled = np.flatnonzero(counts)
    sums = np.zeros_like(centroids)
    sums[filled] = np.add.reduceat(unit[order], (np.cumsum(counts) - counts)[filled], axis=0)
    moved = _unit(sums)
    lost = np.flatnonzero(~moved.any(axis=1))  # no keys, or keys that cancel out
    moved[lost] = unit[np.argsort(cosine, kind="stable")[: len(lost)]]
    return moved


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each of length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: NDArray[np.float32] = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit
