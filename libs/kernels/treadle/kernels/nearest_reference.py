"""The nearest entry in numpy: the specification of the native form, and what runs where that was not built.

Owns what the nearest entry is: the one with the largest dot product, the first of several. Keys of length 1 make that the largest
cosine (arXiv 2605.18226, section 3.4); two levels are that section's hierarchical lookup, over lists that lie one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.kernels.at_rest import as_numbers
from treadle.kernels.nearest_arguments import check_nearest, nothing_found

__all__ = ["nearest"]

QUERIES_AT_ONCE, ENTRIES_AT_ONCE = 64, 4096  # keys are widened to fp32 in pieces, so that memory stays bounded

Found = tuple[NDArray[np.int32], NDArray[np.float32]]


def nearest(
    queries: NDArray[np.float32], keys: NDArray[Any], key_scales: NDArray[np.float16] | None = None,
    list_keys: NDArray[np.float32] | None = None, list_starts: NDArray[np.int32] | None = None, lists_probed: int = 16,
) -> Found:  # fmt: skip
    """The entry with the largest dot product for each query; of equal ones the first. All arrays are read only, and stay the caller's.

    queries:     [N, D] or [B, N, D] fp32, C-contiguous as all of them; with B codebooks, the others have B first too
    keys:        [K, D] fp32, uint16 (bfloat16 bits) or int8, read in place, also from a mapped file
    key_scales:  [K] fp16, for int8 keys: key = number * scale; None for others
    list_keys:   [L, D] fp32 and list_starts [L + 1] int32: entries list_starts[i] to list_starts[i + 1] belong to list i. Only the
                 `lists_probed` lists with the largest products are scanned (of equal ones the first; a list without entries is
                 passed over). None: all entries are scanned
    Returns (index int32, dot fp32), each [N] or [B, N]. Products are summed in fp32 in no stated order, so that entries nearer
    than its rounding may trade places. A product that is NaN is never the largest.
    Raises InvalidArgument for shapes, dtypes, list_starts that do not rise from 0 to K, and where a query has no product that is a
    number. The native form alone: DataLoss where the file behind an array was truncated meanwhile; here that ends the process.
    """
    shape = check_nearest(queries, keys, key_scales, list_keys, list_starts, lists_probed)
    index = np.full((shape.codebooks, shape.queries), -1, dtype=np.int32)
    dot = np.full((shape.codebooks, shape.queries), -np.inf, dtype=np.float32)
    asked = queries.reshape(shape.codebooks, shape.queries, shape.dim)
    books = keys.reshape(shape.codebooks, shape.entries, shape.dim)
    for book in range(shape.codebooks):
        scales = None if key_scales is None else key_scales.reshape(shape.codebooks, shape.entries)[book]
        for first in range(0, shape.queries, QUERIES_AT_ONCE):
            part = slice(first, first + QUERIES_AT_ONCE)
            found = index[book, part], dot[book, part]
            if list_keys is None or list_starts is None:
                _scan(asked[book, part], books[book], scales, 0, shape.entries, found)
                continue
            starts = list_starts.reshape(shape.codebooks, -1)[book]
            probed = _probed(asked[book, part], list_keys.reshape(shape.codebooks, -1, shape.dim)[book], starts, lists_probed)
            for number in np.flatnonzero(probed.any(axis=0)):
                begin, end = int(starts[number]), int(starts[number + 1])
                mine = np.flatnonzero(probed[:, number])
                best = found[0][mine], found[1][mine]
                _scan(asked[book, part][mine], books[book], scales, begin, end, best)
                found[0][mine], found[1][mine] = best
    if (index < 0).any():
        raise nothing_found()
    return index.reshape(queries.shape[:-1]), dot.reshape(queries.shape[:-1])


def _probed(
    queries: NDArray[np.float32], list_keys: NDArray[np.float32], starts: NDArray[np.int32], most: int
) -> NDArray[np.bool_]:
    """[N, L], True for the lists that a query scans."""
    scores = _products(queries, list_keys, None)
    scores[:, np.diff(starts) == 0] = -np.inf
    best = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    probed = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(probed, best, True, axis=1)
    return probed


def _scan(
    queries: NDArray[np.float32], keys: NDArray[Any], scales: NDArray[np.float16] | None, begin: int, end: int, best: Found
) -> None:
    """Entries begin to end, in order; what beats `best` takes its place."""
    index, dot = best
    for first in range(begin, end, ENTRIES_AT_ONCE):
        part = slice(first, min(end, first + ENTRIES_AT_ONCE))
        products = _products(queries, keys[part], None if scales is None else scales[part])
        at = products.argmax(axis=1)
        largest = products[np.arange(len(products)), at]
        better = largest > dot
        index[better], dot[better] = first + at[better], largest[better]


def _products(queries: NDArray[np.float32], keys: NDArray[Any], scales: NDArray[np.float16] | None) -> NDArray[np.float32]:
    """[N, K]; NaN is -inf, so that it is never the largest."""
    wide: NDArray[np.float32] = keys if keys.dtype == np.float32 else as_numbers(keys, None)
    with np.errstate(invalid="ignore", over="ignore"):
        products = queries @ wide.T
        if scales is not None:
            products *= scales.astype(np.float32)
    products[np.isnan(products)] = -np.inf
    return products
