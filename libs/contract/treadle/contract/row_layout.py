"""How the opaque bytes of a row are read as numbers: values, and what they are multiplied by.

One definition for the manifest, the kernels that read rows and those that write them. Reads no bytes itself.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass

from treadle.contract.checks import expect, is_int
from treadle.contract.errors import InvalidArgument

ROW_BYTES_MIN, ROW_BYTES_MAX = 16, 4096  # what the gather kernel takes
VALUE_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8_e4m3": 8, "u8": 8, "int4": 4, "nf4": 4}  # by RowLayout.dtype
SCALE_BYTES = {"ue8m0": 1, "fp16": 2, "fp32": 4}  # by Scale.dtype, where it is inline
PRECISIONS = ("bf16", "fp8", "int4")  # what `row_layout` knows
_BITS = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Scale:
    """What values are multiplied by: a scale for each `block` values, packed inline behind a row's values, or one for all rows.

    dtype: ue8m0 (1 byte, 2^(b-127)), fp16 (2 bytes) or fp32 (4 bytes), little-endian
    block: values that share an inline scale; 0: every value of the model has the one in `bits`, and rows hold none
    bits:  with block 0 only: the 32 bits of that fp32 scale, 8 hexadecimal digits, since a manifest holds no floats
    """

    dtype: str
    block: int
    bits: str | None = None

    def __post_init__(self) -> None:
        known = isinstance(self.dtype, str) and self.dtype in SCALE_BYTES
        expect(known, f"row.scale.dtype: one of {sorted(SCALE_BYTES)}, got {self.dtype!r}")
        expect(is_int(self.block, 0, ROW_BYTES_MAX), f"row.scale.block: 0 to {ROW_BYTES_MAX}, got {self.block!r}")
        if self.block:
            expect(self.bits is None, "row.scale.bits: only where block is 0, for one scale of all rows")
            return
        expect(self.dtype == "fp32", f"row.scale.dtype: one scale of all rows (block 0) is fp32, got {self.dtype!r}")
        written = isinstance(self.bits, str) and _BITS.fullmatch(self.bits)
        expect(bool(written), f"row.scale.bits: 8 hexadecimal digits, the fp32 scale of all rows, got {self.bits!r}")
        expect(0 < self.value < math.inf, f"row.scale.bits: a finite scale above 0, got {self.value}")

    @classmethod
    def of_all_rows(cls, value: float) -> Scale:
        """One scale for every value of a model. Raises InvalidArgument unless it is a finite fp32 above 0."""
        try:
            return cls("fp32", 0, struct.pack(">f", value).hex())
        except OverflowError as error:
            raise InvalidArgument(f"row.scale: {value} is beyond fp32") from error

    @property
    def value(self) -> float:
        """The scale of all rows, exactly. Raises InvalidArgument for inline scales, which stand in the rows."""
        if self.bits is None:
            raise InvalidArgument("row.scale: the scales stand in the rows, there is none for all of them")
        return float(struct.unpack(">f", bytes.fromhex(self.bits))[0])


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How `bytes` opaque bytes are read by the engine: `dim` values of `dtype`, little-endian, then inline scales if any.

    dtype: bf16, fp16, fp32, fp8_e4m3, u8; two values a byte: int4, the low nibble first, two's complement (-8 to 7), and
           nf4, the *high* nibble first as bitsandbytes packs it, 16 levels from -1 to 1
    """

    bytes: int
    dim: int
    dtype: str
    scale: Scale | None = None

    def __post_init__(self) -> None:
        expect(
            isinstance(self.dtype, str) and self.dtype in VALUE_BITS,
            f"row.dtype: one of {sorted(VALUE_BITS)}, got {self.dtype!r}",
        )
        expect(
            is_int(self.bytes, ROW_BYTES_MIN, ROW_BYTES_MAX), f"row.bytes: {ROW_BYTES_MIN} to {ROW_BYTES_MAX}, got {self.bytes!r}"
        )
        expect(is_int(self.dim, 1, ROW_BYTES_MAX), f"row.dim: 1 to {ROW_BYTES_MAX}, got {self.dim!r}")
        expect(self.dim * VALUE_BITS[self.dtype] % 8 == 0, f"row.dim: two {self.dtype} values share a byte: even, got {self.dim}")
        if self.scale is not None and self.scale.block:
            expect(self.dim % self.scale.block == 0, "row.scale.block: must divide row.dim")
        needed = self.value_bytes + self.scale_bytes
        expect(self.bytes == needed, f"row.bytes: {self.dim} x {self.dtype} with its scales is {needed} bytes, not {self.bytes}")

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of a row, its scales not counted."""
        return self.dim * VALUE_BITS[self.dtype] // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales inside a row; 0 without."""
        return 0 if self.inline_scale is None else self.dim // self.inline_scale.block * SCALE_BYTES[self.inline_scale.dtype]

    @property
    def inline_scale(self) -> Scale | None:
        """The scale, where it stands in the rows."""
        return self.scale if self.scale is not None and self.scale.block else None


def row_layout(precision: str, dim: int) -> RowLayout:
    """The layout of grown rows: bf16 (2 dim bytes), fp8 (e4m3) or int4 with one fp16 scale a row (dim + 2, dim / 2 + 2 bytes).

    Raises InvalidArgument for another precision, or a dim that makes no row.
    """
    expect(isinstance(precision, str) and precision in PRECISIONS, f"precision: one of {list(PRECISIONS)}, got {precision!r}")
    expect(is_int(dim, 1, ROW_BYTES_MAX), f"dim: 1 to {ROW_BYTES_MAX}, got {dim!r}")
    dtype = {"bf16": "bf16", "fp8": "fp8_e4m3", "int4": "int4"}[precision]
    scale = None if precision == "bf16" else Scale("fp16", dim)
    size = dim * VALUE_BITS[dtype] // 8 + (0 if scale is None else SCALE_BYTES[scale.dtype])
    expect(
        ROW_BYTES_MIN <= size <= ROW_BYTES_MAX,
        f"dim: {dim} values in {precision} make rows of {size} bytes; rows have {ROW_BYTES_MIN} to {ROW_BYTES_MAX}",
    )
    return RowLayout(size, dim, dtype, scale)
