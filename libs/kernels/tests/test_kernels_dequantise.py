"""Reading rows: native against numpy, numpy against what the formats say, and what is refused."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, RowLayout, Scale
from treadle.contract.row_layout import SCALE_BYTES, VALUE_BITS
from treadle.kernels import dequantise_reference as reference

native = pytest.importorskip("treadle.kernels.native")

Rows = NDArray[np.uint8]


ALL_ROWS = Scale.of_all_rows(0.000199)  # as in the FP8 checkpoint of Qwen's PLE


def layout_of(dtype: str, dim: int, scale: str | None = None, block: int = 1) -> RowLayout:
    if scale == "all rows":
        return RowLayout(dim * VALUE_BITS[dtype] // 8, dim, dtype, ALL_ROWS)
    scales = 0 if scale is None else dim // block * SCALE_BYTES[scale]
    return RowLayout(dim * VALUE_BITS[dtype] // 8 + scales, dim, dtype, None if scale is None else Scale(scale, block))


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    dtype, scale = draw(st.sampled_from(sorted(VALUE_BITS))), draw(st.sampled_from([None, "all rows", *SCALE_BYTES]))
    block = draw(st.integers(1, 33))
    fewest = -(-128 // (VALUE_BITS[dtype] * block))  # a row has at least 16 bytes
    blocks = draw(st.integers(fewest, fewest + 5))
    if dtype in ("int4", "nf4") and block % 2:
        blocks += blocks % 2
    return layout_of(dtype, blocks * block, scale, block)


def same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """Equal bit for bit, signs of zeros included; which NaN a NaN is, is not defined."""
    nan = np.isnan(left)
    same: bool = np.array_equal(nan, np.isnan(right)) and np.array_equal(left.view(np.uint32)[~nan], right.view(np.uint32)[~nan])
    return same


@settings(max_examples=300, deadline=None)
@given(layout=layouts(), count=st.integers(0, 20), seed=st.integers(0, 1 << 30), offset=st.integers(0, 3))
def test_native_and_numpy_read_the_same_bits_at_any_address(layout: RowLayout, count: int, seed: int, offset: int) -> None:
    flat = np.random.default_rng(seed).integers(0, 256, offset + count * layout.bytes, dtype=np.uint8)
    rows = flat[offset:].reshape(count, layout.bytes)
    before = flat.copy()
    out = np.full((count, layout.dim), 9.0, dtype=np.float32)
    assert native.dequantise(rows, layout, out) is out
    assert same_bits(out, reference.dequantise(rows, layout))
    assert same_bits(native.dequantise(rows, layout), out)
    assert np.array_equal(flat, before)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8_e4m3", "u8", "int4", "nf4"])
def test_every_code_of_a_short_format_means_the_same_in_both_forms(dtype: str) -> None:
    codes = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    rows = np.ascontiguousarray(codes.reshape(-1, 64))
    layout = layout_of(dtype, 64 * 8 // VALUE_BITS[dtype])
    expected = reference.dequantise(rows, layout)
    assert same_bits(native.dequantise(rows, layout), expected)
    if dtype == "fp16":
        assert same_bits(expected.reshape(-1), codes.view("<f2").astype(np.float32))


def test_fp8_values_are_those_of_the_format() -> None:
    codes = {
        0x00: 0.0,
        0x01: 2.0**-9,
        0x07: 7 * 2.0**-9,
        0x08: 2.0**-6,
        0x38: 1.0,
        0x3C: 1.5,
        0x7E: 448.0,
        0xB8: -1.0,
        0xFE: -448.0,
    }
    for code, value in codes.items():
        assert reference.FP8_E4M3[code] == value
    assert math.copysign(1.0, reference.FP8_E4M3[0x80]) == -1.0
    assert np.flatnonzero(np.isnan(reference.FP8_E4M3)).tolist() == [0x7F, 0xFF]
    assert len(np.unique(reference.FP8_E4M3[:127])) == 127


@pytest.mark.parametrize("form", [native, reference])
def test_int4_takes_the_low_nibble_first_in_twos_complement(form: object) -> None:
    rows = np.zeros((1, 18), dtype=np.uint8)
    rows[0, :4] = [0x10, 0x87, 0xF9, 0x23]
    rows[0, 16:] = np.array([0.5], dtype="<f2").view(np.uint8)
    read = form.dequantise(rows, layout_of("int4", 32, "fp16", 32))  # type: ignore[attr-defined]
    assert read[0, :8].tolist() == [0.0, 0.5, 3.5, -4.0, -3.5, -0.5, 1.5, 1.0]
    assert not read[0, 8:].any()


def test_nf4_levels_are_quantiles_of_the_normal_distribution() -> None:
    # Dettmers et al., QLoRA, appendix E, as bitsandbytes computes it: 8 levels above 0, 7 below, scaled to 1
    quantile, edge = statistics.NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(edge, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(edge, 0.5, 8)[:-1]]
    levels = np.sort(np.array([*above, 0.0, *below]) / above[0])
    assert np.abs(reference.NF4_LEVELS - levels).max() < 1e-6


@pytest.mark.parametrize("form", [native, reference])
def test_nf4_takes_the_high_nibble_first_and_its_fp32_scale_behind_the_values(form: object) -> None:
    rows = np.full((1, 84), 0x77, dtype=np.uint8)
    rows[0, :3] = [0x0F, 0x7E, 0x81]
    rows[0, 80:] = np.array([0.25], dtype="<f4").view(np.uint8)
    layout = layout_of("nf4", 160, "fp32", 160)
    assert layout.bytes == 84
    read = form.dequantise(rows, layout)  # type: ignore[attr-defined]
    levels = reference.NF4_LEVELS * np.float32(0.25)
    assert read[0, :6].tolist() == [-0.25, 0.25, 0.0, levels[14], levels[8], levels[1]]
    assert not read[0, 6:].any()


@pytest.mark.parametrize("form", [native, reference])
def test_one_scale_of_all_rows_multiplies_every_value(form: object) -> None:
    rows = np.arange(320, dtype=np.uint8).reshape(2, 160)
    read = form.dequantise(rows, layout_of("fp8_e4m3", 160, "all rows"))  # type: ignore[attr-defined]
    assert same_bits(read, np.take(reference.FP8_E4M3, rows) * np.float32(0.000199))


@pytest.mark.parametrize("form", [native, reference])
def test_each_block_has_its_own_scale(form: object) -> None:
    rows = np.full((2, 20), 0x11, dtype=np.uint8)
    rows[:, 16:] = np.array([[2.0, -0.25], [2.0**-24, 65504.0]], dtype="<f2").view(np.uint8)
    read = form.dequantise(rows, layout_of("int4", 32, "fp16", 16))  # type: ignore[attr-defined]
    assert read[:, ::16].tolist() == [[2.0, -0.25], [2.0**-24, 65504.0]]
    rows = np.full((256, 17), 1, dtype=np.uint8)
    rows[:, 16] = np.arange(256)
    powers = form.dequantise(rows, layout_of("u8", 16, "ue8m0", 16))[:, 0]  # type: ignore[attr-defined]
    assert powers[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert np.isnan(powers[255])


@pytest.mark.parametrize("form", [native, reference])
def test_rows_of_a_step_keep_their_shape(form: object) -> None:
    layout = layout_of("bf16", 32)
    rows = np.zeros((3, 5, 64), dtype=np.uint8)
    assert form.dequantise(rows, layout).shape == (3, 5, 32)  # type: ignore[attr-defined]
    assert form.dequantise(rows[:, :0], layout).shape == (3, 0, 32)  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", [native, reference])
def test_what_does_not_fit_is_refused_by_name(form: object) -> None:
    layout, rows = layout_of("bf16", 32), np.zeros((4, 64), dtype=np.uint8)
    read_only = np.zeros((4, 32), dtype=np.float32)
    read_only.flags.writeable = False
    wrong: list[tuple[object, object]] = [
        (rows[:, :63], None), (rows[:, ::2], None), (rows.view(np.int8), None), (rows[::2], None), ("rows", None),
        (rows, np.zeros((4, 31), np.float32)), (rows, np.zeros((4, 32), np.float64)), (rows, np.zeros((4, 64), np.float32)[:, ::2]),
        (rows, read_only),
    ]  # fmt: skip
    for given_rows, out in wrong:
        with pytest.raises(InvalidArgument, match="rows" if out is None else "out"):
            form.dequantise(given_rows, layout, out)  # type: ignore[attr-defined]
