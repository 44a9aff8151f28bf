"""Opaque table rows to numbers, as the row layout says.

Owns the reading of values and inline scales. Does not gather rows (`treadle.kernels`) or use them (`fusion`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.contract.engram_model import VALUE_BYTES, RowLayout
from treadle.contract.errors import InvalidArgument

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn, "u8": torch.uint8}


def dequantise(rows: Tensor, layout: RowLayout) -> Tensor:
    """Read rows as numbers; a new tensor, exact in fp32.

    rows: [T, C, layout.bytes] uint8, borrowed: values little-endian, then one scale byte for each `scale.block` values.
          A ue8m0 byte b means 2^(b - 127), that is b << 23 read as fp32; b = 0 is 2^-127 and b = 255 is NaN.
    Returns [T, C, layout.dim] fp32. Raises InvalidArgument for another shape or dtype.
    """
    if rows.dtype != torch.uint8 or rows.ndim != 3 or rows.shape[2] != layout.bytes:
        raise InvalidArgument(f"rows: uint8 [T, C, {layout.bytes}] expected, got {rows.dtype} {list(rows.shape)}")
    value_bytes = layout.dim * VALUE_BYTES[layout.dtype]
    values = _as(rows[..., :value_bytes], _DTYPES[layout.dtype]).to(torch.float32, copy=True)
    if layout.scale is None:
        return values
    scales = _as(rows[..., value_bytes:], torch.float8_e8m0fnu).to(torch.float32)
    blocks = values.view(*scales.shape, layout.scale.block)
    return blocks.mul_(scales.unsqueeze(-1)).flatten(-2)


def _as(part: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as `dtype`; copied first where the rows' stride or offset is no multiple of its size."""
    size = dtype.itemsize
    aligned = (
        part.storage_offset() % size == 0
        and part.data_ptr() % size == 0
        and all(stride % size == 0 for stride in part.stride()[:-1])
    )
    return (part if aligned and part.stride(-1) == 1 else part.contiguous().clone()).view(dtype)
