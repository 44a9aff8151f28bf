"""Keys and states as they lie at rest: fp32, bf16 bits, or int8 with a scale for each row.

Rounding is that of `asm_store.domain.merging`, for dictionaries are rounded again where a chunk is added. Source of the layout: treadle.contract.dictionary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asm_store.domain.merging import at_rest
from treadle.contract.dictionary import RowDtype

Stored = tuple[str, NDArray[Any]]  # dtype as safetensors has it, and the array


def stored(rows: NDArray[np.float32], dtype: RowDtype) -> tuple[Stored, Stored | None]:
    """fp32 [..., D] as `dtype`; for I8 also its scales fp16 [...]. Raises InvalidArgument beyond fp16's range."""
    numbers, scales = at_rest(rows, dtype)
    return (str(dtype), numbers), None if scales is None else ("F16", scales)
