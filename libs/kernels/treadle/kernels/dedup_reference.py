"""Row ids without repeats, in numpy: the specification of the native form, and what runs where that was not built."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.kernels import arguments


def unique_rows(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The different ids of `rows`, in the order of their first appearance, and where each id went.

    rows: [...] int64, C-contiguous, at most arguments.DEDUP_ROWS_MAX ids
    Returns ([U] int64, [n] int32), both new: rows.reshape(-1) == unique[inverse]. Raises InvalidArgument; the native form also
    ResourceExhausted, without memory for its table of ids.
    """
    arguments.check_dedup(rows)
    unique, first, inverse = np.unique(rows.reshape(-1), return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return unique[order], place[inverse.reshape(-1)]


def spread(fetched: NDArray[np.uint8], inverse: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
    """Copy fetched[inverse] into out: the rows of a batch from those of its different ids.

    fetched: [U, row_bytes] uint8; inverse: [n] int32 from `unique_rows`; out: [n, row_bytes] uint8, the caller's, overwritten; all
    C-contiguous. Raises InvalidArgument for shapes, dtypes and an inverse that points outside `fetched`.
    """
    arguments.check_spread(fetched, inverse, out)
    if inverse.size:
        np.take(fetched, inverse, axis=0, out=out, mode="clip")  # checked; "raise" would copy through a buffer
