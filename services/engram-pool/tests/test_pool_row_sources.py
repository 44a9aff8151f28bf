"""Random rows: reproducible and finite."""

from __future__ import annotations

import numpy as np
import pytest

from engram_pool.domain.row_sources import BLOCK_ROWS, RandomRows, make_sane
from treadle.contract import EngramModel, RowLayout, Scale
from treadle.contract.row_layout import row_layout


def rows_of(model: EngramModel, seed: int, first: int, count: int, layer: int = 0) -> np.ndarray:
    out = np.empty((count, model.row.bytes), dtype=np.uint8)
    RandomRows(model, None, seed).read(layer, first, out)
    return out


def test_a_random_row_is_the_same_however_the_table_is_cut(ple: EngramModel) -> None:
    whole = rows_of(ple, 5, 0, 2 * BLOCK_ROWS + 100)
    pieces = [rows_of(ple, 5, first, count) for first, count in ((0, 1), (1, 4000), (4001, 4191), (8192, 100))]
    assert np.array_equal(whole, np.vstack(pieces))


def test_another_seed_or_layer_makes_other_rows(ple: EngramModel) -> None:
    assert not np.array_equal(rows_of(ple, 0, 0, 8), rows_of(ple, 1, 0, 8))
    assert not np.array_equal(rows_of(ple, 0, 0, 8, layer=0), rows_of(ple, 0, 0, 8, layer=1))


def test_the_rows_of_a_seed_never_change(ple: EngramModel) -> None:
    assert rows_of(ple, 0, 0, 1)[0, :8].tobytes().hex() == "5fbcc2bdcfbd0fbd"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_random_floats_are_small_normal_numbers_of_both_signs(dtype: str) -> None:
    value_bytes = 4 if dtype == "fp32" else 2
    rows = np.random.default_rng(0).integers(0, 256, (4096, 64), dtype=np.uint8)
    make_sane(rows, RowLayout(64, 64 // value_bytes, dtype))
    if dtype == "bf16":
        values = (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = rows.view("<f2" if dtype == "fp16" else "<f4").astype(np.float32)
    assert np.isfinite(values).all()
    assert np.abs(values).min() >= 2**-7
    assert np.abs(values).max() < 2**-3
    assert 0.45 < (values < 0).mean() < 0.55


def test_random_fp8_rows_hold_no_nan_and_scales_near_one() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (4096, 264), dtype=np.uint8)
    make_sane(rows, RowLayout(264, 256, "fp8_e4m3", Scale("ue8m0", 32)))
    assert not np.isin(rows[:, :256], (0x7F, 0xFF)).any()
    assert len(np.unique(rows[:, :256])) == 128
    assert (rows[:, 256:].min(), rows[:, 256:].max()) == (120, 127)


def test_random_int4_rows_have_fp16_scales_above_zero() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (4096, 18), dtype=np.uint8)
    values = rows[:, :16].copy()
    make_sane(rows, row_layout("int4", 32))
    assert np.array_equal(rows[:, :16], values)
    scales = np.ascontiguousarray(rows[:, 16:]).view("<f2")
    assert (scales.min() >= 2**-7, scales.max() < 2**-3) == (True, True)


def test_random_nf4_rows_have_fp32_scales_above_zero_and_one_scale_of_all_rows_takes_no_bytes() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (4096, 84), dtype=np.uint8)
    values = rows[:, :80].copy()
    make_sane(rows, RowLayout(84, 160, "nf4", Scale("fp32", 160)))
    assert np.array_equal(rows[:, :80], values)
    scales = np.ascontiguousarray(rows[:, 80:]).view("<f4")
    assert (scales.min() >= 2**-7, scales.max() < 2**-3) == (True, True)
    make_sane(rows[:, :80], RowLayout(80, 80, "fp8_e4m3", Scale.of_all_rows(0.5)))
    assert not np.isin(rows[:, :80], (0x7F, 0xFF)).any()


def test_opaque_bytes_stay_as_they_are() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (16, 64), dtype=np.uint8)
    before = rows.copy()
    make_sane(rows, RowLayout(64, 64, "u8"))
    assert np.array_equal(rows, before)
