"""Writing rows: how near they read back, what becomes of extremes, and what is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, RowLayout, Scale
from treadle.contract.row_layout import PRECISIONS, row_layout
from treadle.kernels import dequantise, quantise
from treadle.kernels.quantise import LARGEST, SCALE_MAX

Values = NDArray[np.float32]
FP8, INT4, BF16 = row_layout("fp8", 32), row_layout("int4", 32), row_layout("bf16", 32)
ROW = st.lists(st.floats(-(2.0**18), 2.0**18, width=32), min_size=32, max_size=32)


def scales_of(rows: NDArray[np.uint8], layout: RowLayout) -> NDArray[np.float32]:
    return np.ascontiguousarray(rows[:, layout.value_bytes :]).view("<f2").astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4), layout=st.sampled_from([FP8, INT4, BF16]))
def test_values_come_back_as_near_as_the_format_can(rows: list[list[float]], layout: RowLayout) -> None:
    values = np.array(rows, dtype=np.float32)
    packed = quantise(values, layout)
    error = np.abs(dequantise(packed, layout).astype(np.float64) - values)
    if layout is BF16:
        assert (error <= np.maximum(np.abs(values) * 2.0**-8, 2.0**-134)).all()
        return
    scales = scales_of(packed, layout)
    assert (scales > 0).all()
    assert np.isfinite(scales).all()
    half_step = 0.5 if layout is INT4 else np.maximum(np.abs(values) / scales * 2.0**-4, 2.0**-10)
    assert (error <= half_step * scales * (1 + 1e-6)).all()


@settings(max_examples=100, deadline=None)
@given(row=ROW, layout=st.sampled_from([FP8, INT4, BF16]))
def test_what_was_read_back_is_written_the_same_again(row: list[float], layout: RowLayout) -> None:
    once = dequantise(quantise(np.array([row], dtype=np.float32), layout), layout)
    twice = dequantise(quantise(once, layout), layout)
    step = 0.0 if layout is BF16 else np.abs(once).max() * 2.0**-10  # the scale is made again from what was read, rounded up
    assert np.allclose(
        twice, once, rtol=2.0**-9 if layout is not BF16 else 0.0, atol=step + (layout is FP8) * np.abs(once).max() / 448 / 512
    )


@pytest.mark.parametrize("layout", [FP8, INT4, BF16], ids=PRECISIONS[1:] + PRECISIONS[:1])
def test_a_row_of_zeros_stays_exactly_zero(layout: RowLayout) -> None:
    values = np.zeros((3, 32), dtype=np.float32)
    values[1] = np.linspace(-1, 1, 32)
    read = dequantise(quantise(values, layout), layout)
    assert not read[0].any()
    assert not read[2].any()
    assert read[1].any()


@pytest.mark.parametrize("layout", [FP8, INT4], ids=["fp8", "int4"])
def test_the_largest_value_of_a_row_is_never_clipped(layout: RowLayout) -> None:
    values = np.exp(np.random.default_rng(0).uniform(-25, 12, (5_000, 32))).astype(np.float32)
    packed = quantise(values, layout)
    assert (scales_of(packed, layout)[:, 0] * LARGEST[layout.dtype] >= values.max(axis=1) * (1 - 1e-7)).all()


def test_fp8_rounds_to_the_nearest_and_ties_to_even() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :8] = [448, 17, 19, 21, 2.0**-10, 3 * 2.0**-10, 2.0**-6 - 2.0**-10, -0.3]  # the scale is 1
    assert dequantise(quantise(values, FP8), FP8)[0, :8].tolist() == [448, 16, 20, 20, 0, 2.0**-8, 2.0**-6, -0.3125]


def test_int4_and_bf16_round_to_the_nearest_and_ties_to_even() -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :6] = [7, -7, 0.5, 1.5, -2.5, 2.6]
    assert dequantise(quantise(values, INT4), INT4)[0, :6].tolist() == [7, -7, 0, 2, -2, 3]
    values[0, :3] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-9]
    assert dequantise(quantise(values, BF16), BF16)[0, :3].tolist() == [1, 1 + 2.0**-6, -1]


@pytest.mark.parametrize("layout", [FP8, INT4], ids=["fp8", "int4"])
def test_very_small_rows_keep_a_scale_above_zero_and_lose_only_precision(layout: RowLayout) -> None:
    values = np.full((1, 32), 1e-12, dtype=np.float32)
    packed = quantise(values, layout)
    assert scales_of(packed, layout)[0, 0] == 2.0**-24
    assert np.abs(dequantise(packed, layout) - values).max() <= 2.0**-25


@pytest.mark.parametrize(
    ("layout", "most"), [(FP8, 448 * SCALE_MAX), (INT4, 7 * SCALE_MAX), (BF16, 3.3895313892515355e38)], ids=["fp8", "int4", "bf16"]
)
def test_the_largest_rows_fit_and_larger_ones_are_refused_by_number(layout: RowLayout, most: float) -> None:
    values = np.zeros((40_000, 32), dtype=np.float32)
    values[39_000, 5] = -most
    assert dequantise(quantise(values, layout), layout)[39_000, 5] == np.float32(-most)
    for bad in (np.nextafter(np.float32(most), np.float32(np.inf)), np.float32(np.inf), np.float32(np.nan)):
        values[39_000, 5] = bad
        with pytest.raises(InvalidArgument, match="row 39000"):
            quantise(values, layout)


def test_other_layouts_shapes_and_dtypes_are_refused() -> None:
    values = np.zeros((4, 32), dtype=np.float32)
    for layout in (
        RowLayout(64, 32, "fp16"),
        RowLayout(33, 32, "fp8_e4m3", Scale("ue8m0", 32)),
        RowLayout(20, 32, "int4", Scale("fp16", 16)),
    ):
        with pytest.raises(InvalidArgument, match="layout"):
            quantise(values, layout)
    wrong: list[tuple[object, object]] = [
        (values[:, :31], None), (values.astype(np.float64), None), (values[:, ::-1], None), (values[0], None),
        (values, np.zeros((3, 34), np.uint8)), (values, np.zeros((4, 34), np.int8)),
    ]  # fmt: skip
    for given_values, out in wrong:
        with pytest.raises(InvalidArgument, match="values" if out is None else "out"):
            quantise(given_values, FP8, out)  # type: ignore[arg-type]


def test_memory_does_not_grow_with_the_rows() -> None:
    def peak(rows: int) -> int:
        values, out = np.ones((rows, 32), dtype=np.float32), np.empty((rows, 34), dtype=np.uint8)
        tracemalloc.start()
        quantise(values, FP8, out)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(200_000) < 1.2 * peak(20_000) + (1 << 20) < 20 << 20
