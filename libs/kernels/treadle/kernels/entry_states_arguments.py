"""What `EntryStates` and `merge_states` refuse, in one place for the native and the numpy form. Leaf loops trust what has passed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.contract.dictionary import Dictionary, tensor_name
from treadle.kernels.arguments import check_array
from treadle.kernels.nearest_arguments import check_nearest

_FLOAT32, _FLOAT16, _INT32, _INT64 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class EntryArrays:
    """One layer of a dictionary: B codebooks of K entries for h query heads each, so that a key has D = h * head_dim numbers.

    keys:         [B, K, D] fp32, uint16 (bfloat16 bits) or int8, of length 1; states: [B, K, h, head_dim] of the same dtype
    key_scales:   [B, K] fp16 and state_scales [B, K, h] fp16, for int8: number * scale; None for others
    log_z:        [B, K, h] fp32
    thresholds:   [B] fp32, a lookup with a smaller cosine is outside; copied
    heads_of:     [B, N, h] int32, the query heads that are joined for each of the N lookups of a token; every head once; copied
    list_keys, list_starts, lists_probed: of a two-level lookup, as `nearest` takes them; the starts are copied
    whitening:    [heads, head_dim, head_dim] fp32, multiplied with each head before it is joined; None: not whitened
    Arrays are C-contiguous, and those that are not copied are read in place, also from a mapped file, as long as the object lives.
    """

    keys: NDArray[Any]
    states: NDArray[Any]
    log_z: NDArray[np.float32]
    thresholds: NDArray[np.float32]
    heads_of: NDArray[np.int32]
    key_scales: NDArray[np.float16] | None = None
    state_scales: NDArray[np.float16] | None = None
    list_keys: NDArray[np.float32] | None = None
    list_starts: NDArray[np.int32] | None = None
    lists_probed: int = 16
    whitening: NDArray[np.float32] | None = None

    @classmethod
    def of_layer(
        cls, dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]], layer: int, *, guard_percent: int, lists_probed: int
    ) -> EntryArrays:
        """Of a layer that has a dictionary. tensors: by name, as `map_tensors` gives them; guard_percent: the quantile of the thresholds."""

        def part(name: str) -> NDArray[Any] | None:
            tensor = tensors.get(tensor_name(layer, name))
            return None if tensor is None else np.ascontiguousarray(tensor)  # those of a file are

        keys, states, log_z, quantiles = (
            np.ascontiguousarray(tensors[tensor_name(layer, name)]) for name in ("keys", "states", "log_z", "cosine_quantiles")
        )
        return cls(
            keys, states, log_z, quantiles[:, guard_percent].copy(), np.array(dictionary.heads_of_lookups, dtype=np.int32),
            part("key_scales"), part("state_scales"), part("list_keys"), part("list_starts"), lists_probed, part("whitening"),
        )  # fmt: skip

    @property
    def heads(self) -> int:
        """Query heads of a token."""
        return int(self.heads_of.size)

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return int(self.states.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class FoundEntries:
    """What n tokens found: states fp32 [n, heads, head_dim], log_z fp32 [n, heads], cosines fp32 and outside bool [n, B, N]."""

    states: NDArray[np.float32]
    log_z: NDArray[np.float32]
    cosines: NDArray[np.float32]
    outside: NDArray[np.bool_]

    @classmethod
    def empty(cls, entries: EntryArrays, tokens: int) -> FoundEntries:
        """Room for `tokens`, with nothing written."""
        books, lookups, _ = entries.heads_of.shape
        return cls(
            np.empty((tokens, entries.heads, entries.head_dim), np.float32),
            np.empty((tokens, entries.heads), np.float32),
            np.empty((tokens, books, lookups), np.float32),
            np.empty((tokens, books, lookups), np.bool_),
        )


def check_entries(entries: EntryArrays) -> None:
    """All checks that read no key and no state. Raises InvalidArgument naming the argument."""
    keys, states = entries.keys, entries.states
    if not isinstance(keys, np.ndarray) or keys.ndim != 3 or not isinstance(states, np.ndarray) or states.ndim != 4:
        raise InvalidArgument("keys, states: arrays [B, K, D] and [B, K, h, head_dim] expected")
    books, count, dim = keys.shape
    queries = np.empty((books, 0, dim), np.float32)
    check_nearest(queries, keys, entries.key_scales, entries.list_keys, entries.list_starts, entries.lists_probed)
    joined, head_dim = states.shape[2:]
    check_array("states", states, keys.dtype, (books, count, joined, head_dim))
    if joined * head_dim != dim:
        raise InvalidArgument(f"states: {joined} heads of {head_dim} numbers do not make a key of {dim}")
    check_array("heads_of", entries.heads_of, _INT32, None)
    if entries.heads_of.ndim != 3 or entries.heads_of.shape[::2] != (books, joined):
        raise InvalidArgument(f"heads_of: [{books}, lookups, {joined}] expected, got {list(entries.heads_of.shape)}")
    if not np.array_equal(np.sort(entries.heads_of, axis=None), np.arange(entries.heads)) or not entries.heads:
        raise InvalidArgument(f"heads_of: every head from 0 to {entries.heads - 1} once")
    check_array("log_z", entries.log_z, _FLOAT32, (books, count, joined))
    check_array("thresholds", entries.thresholds, _FLOAT32, (books,))
    if (entries.state_scales is not None) != (keys.dtype == np.int8):
        raise InvalidArgument("state_scales: int8 states have them, float32 and bfloat16 states do not")
    if entries.state_scales is not None:
        check_array("state_scales", entries.state_scales, _FLOAT16, (books, count, joined))
    if entries.whitening is not None:
        check_array("whitening", entries.whitening, _FLOAT32, (entries.heads, head_dim, head_dim))


def check_queries(queries: NDArray[np.float32], heads: int, head_dim: int) -> None:
    """Raises InvalidArgument unless `queries` is [T, heads, head_dim] fp32 whose heads lie one after the other."""
    fits = isinstance(queries, np.ndarray) and queries.dtype == _FLOAT32 and queries.ndim == 3 and queries.flags.aligned
    if not fits or queries.shape[1:] != (heads, head_dim):
        raise InvalidArgument(f"queries: float32 [T, {heads}, {head_dim}] expected, got {_described(queries)}")
    dense = _strides_fit(queries.shape[1:], queries.strides[1:])
    if len(queries) and (not dense or queries.strides[0] < 0 or queries.strides[0] % 4):
        raise InvalidArgument("queries: the heads of a token must lie one after the other")


def check_rows(rows: NDArray[np.int64] | None, total: int) -> int:
    """How many of `total` tokens are meant: all for None. Raises InvalidArgument for a row that is not one of them."""
    if rows is None:
        return total
    check_array("rows", rows, _INT64, None)
    if rows.ndim != 1 or (rows.size and not 0 <= rows.min() <= rows.max() < total):
        raise InvalidArgument(f"rows: a list of places below {total}, the number of tokens, expected")
    return len(rows)


def check_merge(
    a: NDArray[np.float32], log_z: NDArray[np.float32], rows: NDArray[np.int64] | None,
    other: NDArray[np.float32], other_log_z: NDArray[np.float32],
) -> None:  # fmt: skip
    """All checks of `merge_states`. Raises InvalidArgument naming the argument."""
    check_array("a", a, _FLOAT32, None, writeable=True)
    if a.ndim != 3:
        raise InvalidArgument(f"a: [T, heads, head_dim] expected, got {list(a.shape)}")
    check_array("log_z", log_z, _FLOAT32, a.shape[:2], writeable=True)
    count = check_rows(rows, len(a))
    check_array("other", other, _FLOAT32, (count, *a.shape[1:]))
    check_array("other_log_z", other_log_z, _FLOAT32, (count, a.shape[1]))


def _strides_fit(shape: Sequence[int], strides: Sequence[int]) -> bool:
    heads, dim = shape
    return (dim == 1 or strides[1] == 4) and (heads == 1 or strides[0] == 4 * dim)


def _described(array: object) -> str:
    return f"{array.dtype.name} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
