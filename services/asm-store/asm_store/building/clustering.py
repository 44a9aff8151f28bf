"""Spherical k-means: unit keys to unit centroids, by the cosine that lookups use.

Owns mini-batches, seeds and clusters that lost all their keys. Does not know what a key is made of (`treadle.nn.lookup_keys`) or
what stands behind a cluster (`entries`). Source: arXiv 2605.18226, section 3.4; batches as in Sculley, WWW 2010.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treadle.contract.errors import InvalidArgument

KEYS_AT_ONCE, PRODUCT_NUMBERS = 4096, 4 << 20  # rows of one product with all centroids, and numbers in it: 16 MiB
BATCH_KEYS, BATCH_PER_ENTRY = 8192, 8  # an iteration looks at so many keys, or so many an entry, whichever is more


def assign(keys: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """For keys fp32 [n, D]: the centroid with the largest product, int64 [n] (of equal ones the first), and that product, fp32 [n].

    centroids: fp32 [K, D]. PRODUCT_NUMBERS are held beside the result.
    """
    index, cosine = torch.empty(len(keys), dtype=torch.int64), torch.empty(len(keys))
    rows = max(1, min(KEYS_AT_ONCE, PRODUCT_NUMBERS // len(centroids)))
    for first in range(0, len(keys), rows):
        part = slice(first, first + rows)
        index[part], cosine[part] = _largest(keys[part] @ centroids.T)
    return index, cosine


def fit_centroids(keys: Tensor, entries: int, iterations: int, seed: Sequence[int], *, batch_part: int = 1) -> Tensor:
    """Cluster unit keys [n, D] into `entries` unit centroids [K, D], the same for the same seed on the same machine.

    batch_part: an iteration looks at one of so many parts of a usual batch
    iterations: each assigns one batch of keys and moves the centroids to the mean of all keys that they were given so far, or, where
    a batch is all keys, of those of this iteration. A centroid without keys begins again at the key farthest from its own.
    Raises InvalidArgument where there are fewer keys than entries.
    """
    if len(keys) < entries:
        raise InvalidArgument(
            f"{entries} entries need as many calibration samples, there are {len(keys)}: give more traces, or fewer --entries"
        )
    draw = np.random.default_rng(seed)
    centroids = _begin(keys, entries, draw)
    batch = max(BATCH_KEYS, BATCH_PER_ENTRY * entries) // batch_part
    sums, counts = torch.zeros_like(centroids), torch.zeros(entries)
    for _ in range(iterations):
        if len(keys) > batch:
            some = keys[torch.from_numpy(np.sort(draw.choice(len(keys), batch, replace=False)))]
        else:
            some, sums, counts = keys, torch.zeros_like(centroids), torch.zeros(entries)
        index, cosine = assign(some, centroids)
        sums.index_add_(0, index, some)
        counts += torch.bincount(index, minlength=entries)
        centroids = _moved(centroids, sums, counts, some, cosine)
    return centroids


def unit(vectors: Tensor) -> Tensor:
    """Each of length 1; zeros stay zeros."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def _largest(products: Tensor) -> tuple[Tensor, Tensor]:
    """(place, product) of the largest in each row. By numpy: torch's search adds a fifth to the time of the products."""
    index = torch.from_numpy(products.numpy().argmax(1))
    return index, products.gather(1, index.unsqueeze(1)).squeeze(1)


def _begin(keys: Tensor, entries: int, draw: np.random.Generator) -> Tensor:
    """Different keys at random; where there are too few different ones (the same token gives the same key), some twice."""
    order, rows = draw.permutation(len(keys)), keys.numpy()
    places: dict[bytes, int] = {}  # of the first of its kind; at most `entries` keys are copied, however many there are
    for place, row in enumerate(order):
        places.setdefault(rows[row].tobytes(), place)
        if len(places) == entries:
            break
    chosen = np.fromiter(places.values(), np.int64)
    if len(chosen) < entries:
        again = np.setdiff1d(np.arange(len(order)), chosen)[: entries - len(chosen)]
        chosen = np.concatenate((chosen, again))
    return keys[torch.from_numpy(order[chosen])]


def _moved(centroids: Tensor, sums: Tensor, counts: Tensor, keys: Tensor, cosine: Tensor) -> Tensor:
    """Centroids at the mean direction of their keys; those that never had any at the keys farthest from theirs.

    What `sums` and `counts` hold for a centroid that begins again is nothing, so it stays so.
    """
    moved = torch.where((counts > 0).unsqueeze(1), unit(sums), centroids)
    lost = torch.nonzero(counts == 0).flatten()
    farthest = torch.argsort(cosine, stable=True)[: len(lost)]
    moved[lost[: len(farthest)]] = keys[farthest]
    return moved
