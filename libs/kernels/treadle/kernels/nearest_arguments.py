"""What `nearest` refuses, in one place for the native and the numpy form, and what of it both want to know.

Owns the checks and their messages, and the limits. Leaf loops trust what has passed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels.arguments import check_array

KEY_DIM_MAX = 1 << 20  # numbers of a key
ENTRIES_MAX = 1 << 30  # of a codebook: their numbers fit int32
LISTS_MAX = 1 << 20

_KEY_DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.uint16): "bf16", np.dtype(np.int8): "int8"}
_FLOAT32, _FLOAT16, _INT32 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one search: B codebooks of K keys with D numbers, N queries of each. lists: 0, all entries are scanned."""

    codebooks: int
    queries: int
    entries: int
    dim: int
    lists: int


def check_nearest(
    queries: NDArray[np.float32], keys: NDArray[Any], key_scales: NDArray[np.float16] | None,
    list_keys: NDArray[np.float32] | None, list_starts: NDArray[np.int32] | None, lists_probed: int,
) -> Shape:  # fmt: skip
    """All checks of `nearest` that read no key. Raises InvalidArgument naming the argument."""
    check_array("queries", queries, _FLOAT32, None)
    if not isinstance(keys, np.ndarray) or keys.dtype not in _KEY_DTYPES:
        found = keys.dtype.name if isinstance(keys, np.ndarray) else type(keys).__name__
        raise InvalidArgument(f"keys: float32, uint16 (bfloat16) or int8 expected, got {found}")
    check_array("keys", keys, keys.dtype, None)
    if queries.ndim not in (2, 3) or keys.ndim != queries.ndim:
        raise InvalidArgument(
            f"queries, keys: both [N, D] and [K, D], or both with codebooks first; got {queries.shape}, {keys.shape}"
        )
    books, dim = keys.shape[:-2], keys.shape[-1]
    if queries.shape[:-2] != books or queries.shape[-1] != dim:
        raise InvalidArgument(f"queries: {[*books, 'N', dim]} expected for keys {list(keys.shape)}, got {list(queries.shape)}")
    entries = keys.shape[-2]
    if not 1 <= entries <= ENTRIES_MAX or not 1 <= dim <= KEY_DIM_MAX:
        raise InvalidArgument(f"keys: 1 to {ENTRIES_MAX} entries of 1 to {KEY_DIM_MAX} numbers expected, got {list(keys.shape)}")
    if (key_scales is not None) != (keys.dtype == np.int8):
        raise InvalidArgument("key_scales: int8 keys have them, float32 and bfloat16 keys do not")
    if key_scales is not None:
        check_array("key_scales", key_scales, _FLOAT16, (*books, entries))
    lists = _check_lists(books, entries, dim, list_keys, list_starts, lists_probed)
    return Shape(books[0] if books else 1, queries.shape[-2], entries, dim, lists)


def _check_lists(
    books: tuple[int, ...], entries: int, dim: int, list_keys: NDArray[np.float32] | None, list_starts: NDArray[np.int32] | None,
    lists_probed: int,
) -> int:  # fmt: skip
    if (list_keys is None) != (list_starts is None):
        raise InvalidArgument("list_keys, list_starts: both, or neither")
    if list_keys is None or list_starts is None:
        return 0
    check_array("list_keys", list_keys, _FLOAT32, None)
    lists = list_keys.shape[-2] if list_keys.ndim >= 2 else 0
    if list_keys.shape != (*books, lists, dim) or not 1 <= lists <= LISTS_MAX:
        raise InvalidArgument(f"list_keys: {[*books, 'lists', dim]}, 1 to {LISTS_MAX} lists, expected, got {list(list_keys.shape)}")
    check_array("list_starts", list_starts, _INT32, (*books, lists + 1))
    if (list_starts[..., 0] != 0).any() or (list_starts[..., -1] != entries).any() or (np.diff(list_starts) < 0).any():
        raise InvalidArgument(f"list_starts: must rise from 0 to the {entries} entries")
    if lists_probed < 1:
        raise InvalidArgument(f"lists_probed: at least 1, got {lists_probed}")
    return lists


def nothing_found() -> InvalidArgument:
    """The error for a query whose products with all keys are no numbers."""
    return InvalidArgument("queries, keys: every product of a query is NaN or minus infinity; one of them holds such numbers")
