"""Opaque table rows to numbers, as the row layout says: by the kernel for rows in host memory, by torch elsewhere.

Owns the step from tensors to either, and the torch form. Does not gather rows (`treadle.kernels`) or use them (`fusion`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle import kernels
from treadle.contract.errors import InvalidArgument
from treadle.contract.row_layout import RowLayout
from treadle.kernels.dequantise_reference import NF4_LEVELS

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn, "u8": torch.uint8}
_SCALE_DTYPES = {"ue8m0": torch.float8_e8m0fnu, "fp16": torch.float16, "fp32": torch.float32}
_NF4 = torch.from_numpy(NF4_LEVELS)


def dequantise(rows: Tensor, layout: RowLayout) -> Tensor:
    """Read rows as numbers; a new tensor on the same device, exact in fp32.

    rows: [T, C, layout.bytes] uint8, borrowed: values little-endian (int4: the low nibble first, nf4: the high one), then one scale
          for each `scale.block` values, unless all rows have the same. A ue8m0 byte b means 2^(b - 127), that is b << 23 read as
          fp32; b = 0 is 2^-127 and b = 255 is NaN.
    Returns [T, C, layout.dim] fp32. Raises InvalidArgument for another shape or dtype.
    """
    if rows.dtype != torch.uint8 or rows.ndim != 3 or rows.shape[2] != layout.bytes:
        raise InvalidArgument(f"rows: uint8 [T, C, {layout.bytes}] expected, got {rows.dtype} {list(rows.shape)}")
    if rows.device.type != "cpu" or kernels.IMPLEMENTATION != "native":
        return dequantise_torch(rows, layout)
    out = torch.empty((*rows.shape[:2], layout.dim), dtype=torch.float32)
    kernels.dequantise(rows.contiguous().numpy(), layout, out.numpy())
    return out


def dequantise_torch(rows: Tensor, layout: RowLayout) -> Tensor:
    """The torch form of `dequantise`, for rows on any device; the same bits as the kernel gives. Trusts the shape."""
    part = rows[..., : layout.value_bytes]
    if layout.dtype == "int4":
        nibbles = torch.stack((part & 15, part >> 4), dim=-1).flatten(-2)
        values = (nibbles ^ 8).to(torch.float32).sub_(8)
    elif layout.dtype == "nf4":
        codes = torch.stack((part >> 4, part & 15), dim=-1).flatten(-2)
        values = _NF4.to(part.device)[codes.to(torch.int32)]
    else:
        values = _as(part, _DTYPES[layout.dtype]).to(torch.float32, copy=True)
    if layout.scale is None:
        return values
    if layout.inline_scale is None:
        return values.mul_(layout.scale.value)
    scales = _as(rows[..., layout.value_bytes :], _SCALE_DTYPES[layout.scale.dtype]).to(torch.float32)
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
