"""What `DecodeStep` refuses, in one place for the native and the numpy form. Leaf loops trust what has passed here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels.arguments import check_array
from treadle.kernels.entry_states_arguments import check_queries, check_rows

_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)


def check_step(caches: Sequence[NDArray[np.float32]], lengths: NDArray[np.int64], rows: NDArray[np.int64], heads: int) -> None:
    """All checks of a DecodeStep's making. Raises InvalidArgument naming the argument."""
    if not len(caches):
        raise InvalidArgument("caches: of at least one sequence")
    check_array("lengths", lengths, _INT64, (len(caches),))
    check_array("rows", rows, _INT64, (len(caches),))
    if rows.min() < 0:
        raise InvalidArgument(f"rows: 0 or more, got {rows.min()}")
    for cache, length in zip(caches, lengths.tolist(), strict=True):
        check_array("caches", cache, _FLOAT32, None, writeable=True)
        if cache.ndim != 5 or cache.shape[1] != 2 or cache.shape[:3] != caches[0].shape[:3] or cache.shape[4] != caches[0].shape[4]:
            raise InvalidArgument(f"caches: all [layers, 2, kv_heads, capacity, head_dim], one is {list(cache.shape)}")
        if not 0 <= length < cache.shape[3]:
            raise InvalidArgument(f"lengths: {length} tokens and one more do not fit a capacity of {cache.shape[3]}")
    kv_heads, head_dim = caches[0].shape[2], caches[0].shape[4]
    if not kv_heads or not head_dim or heads < 1 or heads % kv_heads:
        raise InvalidArgument(f"heads: a multiple of the {kv_heads} key/value heads, got {heads}")


def check_attend(
    cache: NDArray[np.float32], tokens: int, heads: int, layer: int, queries: NDArray[np.float32],
    key_values: NDArray[np.float32], a: NDArray[np.float32], log_z: NDArray[np.float32],
) -> None:  # fmt: skip
    """All checks of `attend`, for a step with a cache like `cache` and rows below `tokens`. Raises InvalidArgument naming the argument."""
    layers, _, kv_heads, _, head_dim = cache.shape
    if not 0 <= layer < layers:
        raise InvalidArgument(f"layer: 0 to {layers - 1}, got {layer}")
    check_queries(queries, heads, head_dim)
    if len(queries) < tokens:
        raise InvalidArgument(f"queries: of {len(queries)} tokens, the step's rows reach {tokens - 1}")
    check_array("key_values", key_values, _FLOAT32, (len(queries), 2, kv_heads, head_dim))
    check_array("a", a, _FLOAT32, (len(queries), heads, head_dim), writeable=True)
    check_array("log_z", log_z, _FLOAT32, (len(queries), heads), writeable=True)


def check_attend_keys(
    queries: NDArray[np.float32], rows: NDArray[np.int64] | None, keys: NDArray[np.float32], values: NDArray[np.float32],
    biases: NDArray[np.float32],
) -> None:  # fmt: skip
    """All checks of `attend_keys`. Raises InvalidArgument naming the argument."""
    check_array("keys", keys, _FLOAT32, None)
    if keys.ndim != 3 or not keys.size:
        raise InvalidArgument(f"keys: [kv_heads, K, head_dim], none of them 0, expected, got {list(keys.shape)}")
    heads = queries.shape[1] if isinstance(queries, np.ndarray) and queries.ndim == 3 else 0
    check_queries(queries, heads, keys.shape[2])
    if not heads or heads % len(keys):
        raise InvalidArgument(f"queries: a multiple of {len(keys)} heads expected, got {heads}")
    check_rows(rows, len(queries))
    check_array("values", values, _FLOAT32, keys.shape)
    check_array("biases", biases, _FLOAT32, keys.shape[:2])
