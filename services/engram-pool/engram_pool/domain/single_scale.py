"""The one scale that a checkpoint may have for all rows: a tensor of one number."""

from __future__ import annotations

import math

import numpy as np

from engram_pool.domain.sources import Checkpoint
from engram_pool.domain.tensor_names import Shards
from treadle.contract import InvalidArgument, Scale


def is_single(scale: Shards) -> bool:
    """Whether a scale is one number."""
    return len(scale) == 1 and math.prod(scale[0].shape) == 1


def read_single(checkpoint: Checkpoint, scale: Shards) -> Scale:
    """The scale of all rows, widened to fp32 exactly. Raises InvalidArgument for a number that cannot be one, DataLoss."""
    tensor = scale[0]
    data = np.empty((1, tensor.row_bytes), dtype=np.uint8)
    checkpoint.read(tensor, 0, data)
    if tensor.dtype == "BF16":
        value = float((data.view("<u2").astype(np.uint32) << 16).view(np.float32)[0, 0])
    elif tensor.dtype in ("F16", "F32"):
        value = float(data.view("<f2" if tensor.dtype == "F16" else "<f4")[0, 0])
    else:
        raise InvalidArgument(f"{tensor}: the scale of all rows is BF16, F16 or F32")
    try:
        return Scale.of_all_rows(value)
    except InvalidArgument as error:
        raise InvalidArgument(f"{tensor}: {error}") from error
