"""What tokens find in a layer's dictionary, and merging it, in numpy: the specification of the native form, and what runs without it.

Owns the path from query heads to attention states. Any search can take the place of `nearest`, as a graph of the keys does.
Source: arXiv 2605.18226, equations 2, 6 and 7, sections 3.5 and 3.6.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import nearest_reference
from treadle.kernels.at_rest import as_numbers
from treadle.kernels.entry_states_arguments import (
    EntryArrays,
    FoundEntries,
    check_entries,
    check_merge,
    check_queries,
    check_rows,
)

__all__ = ["EntryStates", "merge_states"]

KEY_LENGTH_MIN = 1e-12  # a query of zeros stays zeros
Search = Callable[[NDArray[np.float32]], tuple[NDArray[np.int32], NDArray[np.float32]]]


class EntryStates:
    """One layer's dictionary, looked up; any thread may ask."""

    def __init__(self, entries: EntryArrays, search: Search | None = None) -> None:
        """search: keys fp32 [B, n, D] of length 1 to (entry int32, cosine fp32) [B, n]; None: `nearest` over the keys and lists.

        Raises InvalidArgument naming the array that does not fit.
        """
        check_entries(entries)
        self.entries = entries
        self._search = search or self._nearest

    def find(self, queries: NDArray[np.float32], rows: NDArray[np.int64] | None = None) -> FoundEntries:
        """What the tokens `rows` find, in their order; None: all T.

        queries: [T, heads, head_dim] fp32, the form that keys are made of, neither whitened nor joined; only the heads of one token need
                 to lie one after the other, so that a part of a wider array will do
        rows:    int64 [n], places in `queries`
        Returns arrays of its own. Raises InvalidArgument where a query holds NaN, DataLoss where the file behind an array was truncated
        meanwhile (the native form; here that ends the process).
        """
        entries = self.entries
        check_queries(queries, entries.heads, entries.head_dim)
        check_rows(rows, len(queries))
        heads = queries if rows is None else queries[rows]
        if entries.whitening is not None:
            heads = np.einsum("hij,thj->thi", entries.whitening, heads, optimize=True).astype(np.float32)
        books, lookups, joined = entries.heads_of.shape
        width = joined * entries.head_dim
        keys = heads[:, entries.heads_of].reshape(len(heads), books, lookups, width)
        with np.errstate(invalid="ignore", over="ignore"):
            keys = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), np.float32(KEY_LENGTH_MIN))
        asked = np.ascontiguousarray(keys.swapaxes(0, 1)).reshape(books, len(heads) * lookups, width)
        if np.isnan(asked).any():
            raise InvalidArgument("queries: one holds NaN")
        index, cosines = self._search(asked)
        found = FoundEntries.empty(entries, len(heads))
        for book, members in enumerate(entries.heads_of):
            at = index[book].reshape(len(heads), lookups)
            scales = None if entries.state_scales is None else entries.state_scales[book, at]
            found.states[:, members] = as_numbers(entries.states[book, at], scales)
            found.log_z[:, members] = entries.log_z[book, at]
            found.cosines[:, book] = cosines[book].reshape(len(heads), lookups)
        np.less(found.cosines, entries.thresholds[:, None], out=found.outside)
        return found

    def _nearest(self, asked: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        entries = self.entries
        return nearest_reference.nearest(
            asked, entries.keys, entries.key_scales, entries.list_keys, entries.list_starts, entries.lists_probed
        )


def merge_states(
    a: NDArray[np.float32], log_z: NDArray[np.float32], rows: NDArray[np.int64] | None,
    other: NDArray[np.float32], other_log_z: NDArray[np.float32],
) -> None:  # fmt: skip
    """Merge attention states over other keys into those of some tokens, in place: exact for disjoint keys, in natural-log space.

    a:     [T, heads, head_dim] fp32 and log_z [T, heads] fp32, overwritten; a is 0 and log_z -inf where there are no keys
    rows:  int64 [n], no place twice, which tokens; None: all
    other: [n, heads, head_dim] fp32 and other_log_z [n, heads] fp32, apart from `a`; -inf: over no keys, which changes nothing
    Raises InvalidArgument for shapes and dtypes.
    """
    check_merge(a, log_z, rows, other, other_log_z)
    places = slice(None) if rows is None else rows
    mine, mine_log_z = a[places], log_z[places]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(np.isneginf(other_log_z), np.float32(-np.inf), other_log_z - mine_log_z)[..., None]
        merged = mine / (1 + np.exp(difference)) + other / (1 + np.exp(-difference))
    a[places] = np.where(np.isneginf(difference), mine, merged)
    log_z[places] = np.logaddexp(mine_log_z, other_log_z)
