"""Numbers to opaque rows in the layouts of grown memories: written once, offline; reading them back is `dequantise`.

Owns the choice of scales and the rounding. Reference quality in numpy, a bounded stretch of rows at a time; no native form.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, RowLayout
from treadle.contract.row_layout import PRECISIONS, row_layout
from treadle.kernels import arguments

__all__ = ["quantise"]

STRETCH_VALUES = 1 << 18  # values in work at once: about 8 MiB of temporary arrays
SCALE_MAX, SCALE_MIN = float(np.finfo(np.float16).max), 2.0**-24  # the largest and the smallest fp16 above 0
LARGEST = {"fp8_e4m3": 448.0, "int4": 7.0}  # what the largest value of a row becomes; int4's -8 stays unused
BF16_MAX = float.fromhex("0x1.fep127")


def quantise(values: NDArray[np.float32], layout: RowLayout, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Rows of a preset layout (`row_layout`: bf16, fp8, int4) that read back as near to `values` as they can.

    values: [n, layout.dim] fp32, C-contiguous, finite
    out:    [n, layout.bytes] uint8, owned by the caller, overwritten and returned; None: a new array

    Values are rounded to the nearest, ties to even. The scale of a row is its largest magnitude / 448 (fp8) or / 7 (int4), rounded
    up to fp16, so nothing is clipped; it is at least 2^-24, and so never 0. A row of zeros reads back as zeros; below a magnitude
    of about 2^-24 x 448 or x 7 rows lose precision, with an error of at most half a step of that smallest scale.
    Raises InvalidArgument naming the row for a value that is not finite, or too large: beyond bf16's range, or a magnitude that
    needs a scale above 65,504 (29.3 million for fp8, 458,528 for int4). `out` may then be partly written.
    """
    _check_layout(layout)
    arguments.check_array("values", values, np.dtype(np.float32), None)
    if values.ndim != 2 or values.shape[1] != layout.dim:
        raise InvalidArgument(f"values: float32 [n, {layout.dim}] expected, got {list(values.shape)}")
    if out is None:
        out = np.empty((values.shape[0], layout.bytes), dtype=np.uint8)
    else:
        arguments.check_array("out", out, np.dtype(np.uint8), (values.shape[0], layout.bytes), writeable=True)
    step = max(1, STRETCH_VALUES // layout.dim)
    for first in range(0, values.shape[0], step):
        _write(values[first : first + step], layout, out[first : first + step], first)
    return out


def _check_layout(layout: RowLayout) -> None:
    for precision in PRECISIONS:
        if (layout.dtype == "int4") == (precision == "int4") and layout == row_layout(precision, layout.dim):
            return
    raise InvalidArgument(f"layout: one of row_layout({', '.join(PRECISIONS)}) expected, got {layout}")


def _write(values: NDArray[np.float32], layout: RowLayout, out: NDArray[np.uint8], first: int) -> None:
    largest = np.abs(values).max(axis=1, initial=0.0)
    limit = BF16_MAX if layout.scale is None else LARGEST[layout.dtype] * SCALE_MAX
    bad = ~(largest <= limit)  # also where it is NaN
    if bad.any():
        row = int(np.argmax(bad))
        raise InvalidArgument(
            f"values: row {first + row} reaches {largest[row]}; {layout.dtype} rows hold finite numbers up to {limit:.4g}"
        )
    if layout.scale is None:
        out.view("<u2")[...] = _bf16(values)
        return
    scales = _scales(largest, LARGEST[layout.dtype])
    out[:, layout.value_bytes :] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    scaled = values / scales.astype(np.float32)[:, None]
    out[:, : layout.value_bytes] = _int4(scaled) if layout.dtype == "int4" else _fp8_e4m3(scaled)


def _scales(largest: NDArray[np.float32], top: float) -> NDArray[np.float16]:
    """largest / top, rounded up to fp16 and at least SCALE_MIN."""
    wanted = np.clip(largest.astype(np.float64) / top, SCALE_MIN, SCALE_MAX)
    scales = wanted.astype(np.float16)
    short = scales < wanted
    scales[short] = np.nextafter(scales[short], np.float16(np.inf))
    return scales


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _int4(scaled: NDArray[np.float32]) -> NDArray[np.uint8]:
    nibbles = np.rint(np.clip(scaled, -7, 7)).astype(np.int8).view(np.uint8) & np.uint8(15)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)


def _fp8_e4m3(scaled: NDArray[np.float32]) -> NDArray[np.uint8]:
    magnitudes = np.minimum(np.abs(scaled), np.float32(448))
    bits = magnitudes.view(np.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)  # exponent bias 127 to 7
    denormal = np.rint(magnitudes * np.float32(512)).astype(np.uint32)  # steps of 2^-9; 8 of them are the smallest normal
    codes = np.where(magnitudes < np.float32(2.0**-6), denormal, normal)
    signs: NDArray[np.uint8] = np.signbit(scaled).astype(np.uint8) << np.uint8(7)
    return np.bitwise_or(codes.astype(np.uint8), signs, dtype=np.uint8)
