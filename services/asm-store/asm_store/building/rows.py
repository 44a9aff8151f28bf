"""Keys and states as they lie at rest: fp32, bf16 bits, or int8 with a scale for each row.

Owns rounding. Source of the layout: treadle.contract.dictionary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.contract.dictionary import RowDtype
from treadle.contract.errors import InvalidArgument

I8_MAX = 127
Stored = tuple[str, NDArray[Any]]  # dtype as safetensors has it, and the array


def stored(rows: NDArray[np.float32], dtype: RowDtype) -> tuple[Stored, Stored | None]:
    """fp32 [..., D] as `dtype`; for I8 also its scales fp16 [...], number * scale being the value. Raises InvalidArgument beyond fp16's range."""
    if dtype is RowDtype.F32:
        return ("F32", np.ascontiguousarray(rows)), None
    if dtype is RowDtype.BF16:
        return ("BF16", torch.from_numpy(rows).to(torch.bfloat16).view(torch.uint16).numpy()), None
    wanted = np.abs(rows).max(axis=-1) / I8_MAX
    with np.errstate(over="ignore"):
        scales = wanted.astype(np.float16)
        # Rounded down, a scale would push the row's largest number beyond 127.
        scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales)
    if not np.isfinite(scales).all():
        raise InvalidArgument("states are too large for int8 rows with fp16 scales: build with --dtype BF16")
    wide = scales.astype(np.float32)[..., None]
    numbers = np.divide(rows, wide, out=np.zeros_like(rows), where=wide > 0)
    return ("I8", np.rint(numbers).clip(-I8_MAX, I8_MAX).astype(np.int8)), ("F16", scales.astype("<f2"))


def restored(rows: NDArray[Any], scales: NDArray[Any] | None) -> NDArray[np.float32]:
    """What `stored` stands for, fp32; rows may be a read-only map."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    wide = rows.astype(np.float32)
    return wide if scales is None else wide * scales.astype(np.float32)[..., None]
