"""Rows of dictionaries as numbers: fp32, bf16 bits, or int8 with a scale for each row, the forms that `treadle.contract.dictionary` names."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_numbers"]


def as_numbers(rows: NDArray[Any], scales: NDArray[np.float16] | None) -> NDArray[np.float32]:
    """A copy of fp32, uint16 (bfloat16 bits) or int8 rows [..., D] as fp32, times `scales` [...] where there are any."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    wide = rows.astype(np.float32)
    if scales is not None:
        wide *= scales.astype(np.float32)[..., None]
    return wide
