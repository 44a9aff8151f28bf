"""Entries of two dictionaries made for the same keys become one, in log space: the state over both chunks of the prefix.

Z adds up (`sum`), what equation 3 of arXiv 2605.18226 calls exact, or is the mean over the chunks (`mean`). numpy only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.dictionary import ChunkMerge, RowDtype
from treadle.contract.errors import InvalidArgument

Array = NDArray[np.float32]
I8_MAX = 127


def merge_entries(
    a1: Array, log_z1: Array, a2: Array, log_z2: Array, *, how: ChunkMerge, chunks: tuple[int, int]
) -> tuple[Array, Array]:
    """States and log Z of entries over both parts. Logarithms are natural and added in fp64: fp32 has 1e-3 left of 1e4.

    a1, a2: fp32 [..., head_dim]; log_z1, log_z2: fp32 [...], -inf for an entry without samples
    chunks: of the prefix behind each: weights of the mean, which leaves a part without samples out of it
    """
    logs = np.stack([log_z1, log_z2]).astype(np.float64)
    present = np.isfinite(logs)
    if how is ChunkMerge.MEAN:
        logs += np.log(np.array(chunks, np.float64)).reshape(2, *(1,) * log_z1.ndim)
    most = np.where(present.any(0), logs.max(0), 0.0)
    weights = np.exp(logs - most)
    total = weights.sum(0)
    whole = np.where(total > 0, total, 1.0)
    states = (weights[0] / whole)[..., None] * a1 + (weights[1] / whole)[..., None] * a2
    with np.errstate(divide="ignore"):  # log of 0 is -inf, what an entry without samples has
        log_z = most + np.log(total)
    if how is ChunkMerge.MEAN:
        counted = (present * np.array(chunks).reshape(2, *(1,) * log_z1.ndim)).sum(0)
        log_z -= np.log(np.where(counted > 0, counted, 1))
    return states.astype(np.float32), log_z.astype(np.float32)


def at_rest(rows: Array, dtype: RowDtype) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
    """fp32 rows as they lie in a file: fp32; bf16 bits, rounded to the nearest even; int8 with a scale for each row, number * scale being the value.

    rows: [..., D]; the scales: fp16 [...]. Raises InvalidArgument where a scale is beyond fp16's range.
    """
    if dtype is RowDtype.F32:
        return np.ascontiguousarray(rows), None
    if dtype is RowDtype.BF16:
        bits = np.ascontiguousarray(rows).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), None
    wanted = np.abs(rows).max(axis=-1) / I8_MAX
    with np.errstate(over="ignore"):
        scales = wanted.astype("<f2")
        # Rounded down, a scale would push the row's largest number beyond 127.
        scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales)
    if not np.isfinite(scales).all():
        raise InvalidArgument("states are too large for int8 rows with fp16 scales: build with --dtype BF16")
    wide = scales.astype(np.float32)[..., None]
    numbers = np.divide(rows, wide, out=np.zeros_like(rows), where=wide > 0)
    return np.rint(numbers).clip(-I8_MAX, I8_MAX).astype(np.int8), scales
