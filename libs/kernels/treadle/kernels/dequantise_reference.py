"""Opaque rows to numbers in numpy: the specification of the native form, and what runs where that was not built.

Owns what the values of a row and its inline scales mean. Formats: bfloat16, IEEE 754 binary16 and binary32; FP8 E4M3 without
infinities and UE8M0 scales as in the OCP specifications of 8-bit and microscaling formats; int4 and u8 are plain integers; NF4 is
QLoRA's NormalFloat4 (arXiv 2305.14314, appendix E), packed as bitsandbytes packs it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import RowLayout
from treadle.kernels import arguments

__all__ = ["FP8_E4M3", "NF4_LEVELS", "dequantise"]


def dequantise(rows: NDArray[np.uint8], layout: RowLayout, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Read rows as numbers: each value times the scale of its block or of all rows, one fp32 product, rounded to the nearest.

    rows: [..., layout.bytes] uint8, C-contiguous, at any address
    out:  [..., layout.dim] fp32, owned by the caller, overwritten and returned, apart from `rows`; None: a new array
    A ue8m0 byte b means 2^(b - 127), 255 is NaN; a NaN stays one, whatever its bits. Raises InvalidArgument for shapes and dtypes.
    """
    out = arguments.dequantise_out(rows, layout, out)
    values = _values(rows[..., : layout.value_bytes], layout.dtype)
    if layout.scale is None:
        out[...] = values
        return out
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):  # NaN, infinity and 0 are answers here
        if layout.inline_scale is None:
            return np.multiply(values, np.float32(layout.scale.value), out=out)
        scales = _scales(np.ascontiguousarray(rows[..., layout.value_bytes :]), layout.scale.dtype)
        blocks = values.reshape(*scales.shape, layout.scale.block) * scales[..., None]
    out[...] = blocks.reshape(out.shape)
    return out


def _values(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """[..., value_bytes] to [..., dim]."""
    if dtype == "u8":
        return data.astype(np.float32)
    if dtype == "fp8_e4m3":
        return np.take(FP8_E4M3, data)
    if dtype == "nf4":
        return np.take(NF4_LEVELS, np.stack((data >> 4, data & 15), axis=-1)).reshape(*data.shape[:-1], 2 * data.shape[-1])
    if dtype == "int4":
        nibbles = np.stack((data & 15, data >> 4), axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])
        return (nibbles ^ 8).astype(np.float32) - np.float32(8)
    words = np.ascontiguousarray(data)
    if dtype == "bf16":
        return (words.view("<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return words.view("<f2" if dtype == "fp16" else "<f4").astype(np.float32)


def _scales(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    if dtype == "ue8m0":
        return np.take(_UE8M0, data)
    with np.errstate(invalid="ignore"):
        return data.view("<f2" if dtype == "fp16" else "<f4").astype(np.float32)


def _fp8_e4m3() -> NDArray[np.float32]:
    """Value of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; exponent and mantissa all ones is NaN."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    magnitudes[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)


def _ue8m0() -> NDArray[np.float32]:
    powers: NDArray[np.float64] = np.exp2(np.arange(256) - 127.0)
    powers[255] = np.nan
    return powers.astype(np.float32)


FP8_E4M3, _UE8M0 = _fp8_e4m3(), _ue8m0()
NF4_LEVELS: NDArray[np.float32] = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], dtype=np.float32)  # fmt: skip
