"""Rows read by the kernel and rows read by torch are the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.contract import RowLayout, Scale
from treadle.contract.row_layout import row_layout
from treadle.kernels import quantise
from treadle.kernels.dequantise_reference import dequantise as dequantise_reference
from treadle.nn.dequantise import dequantise, dequantise_torch

LAYOUTS = [
    RowLayout(64, 32, "bf16"), RowLayout(64, 32, "fp16"), RowLayout(64, 16, "fp32"), RowLayout(32, 32, "fp8_e4m3"),
    RowLayout(32, 32, "u8"), RowLayout(16, 32, "int4"), row_layout("fp8", 32), row_layout("int4", 32),
    RowLayout(66, 64, "fp8_e4m3", Scale("ue8m0", 32)), RowLayout(34, 16, "bf16", Scale("ue8m0", 8)),
    RowLayout(20, 32, "int4", Scale("fp16", 16)), RowLayout(21, 30, "int4", Scale("ue8m0", 5)), RowLayout(40, 16, "fp16", Scale("fp16", 4)),
    RowLayout(84, 160, "nf4", Scale("fp32", 160)), RowLayout(21, 30, "nf4", Scale("ue8m0", 5)),
    RowLayout(160, 160, "fp8_e4m3", Scale.of_all_rows(0.000199)), RowLayout(20, 40, "nf4", Scale.of_all_rows(3.0)),
    RowLayout(164, 160, "fp8_e4m3", Scale("fp32", 160)),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_kernel_and_torch_read_the_same_bits(layout: RowLayout) -> None:
    data = np.random.default_rng(0).integers(0, 256, (300, 16, layout.bytes), dtype=np.uint8)
    rows = torch.from_numpy(data)
    expected = dequantise_reference(data, layout)
    for read in (dequantise(rows, layout), dequantise_torch(rows, layout), dequantise(rows[::2], layout)):
        wanted = torch.from_numpy(expected[:: 300 // len(read)].copy())
        assert torch.equal(read.isnan(), wanted.isnan())
        assert torch.equal(read.nan_to_num(nan=7.0).view(torch.int32), wanted.nan_to_num(nan=7.0).view(torch.int32))


@pytest.mark.parametrize(("precision", "step"), [("bf16", 2**-8), ("fp8", 2**-4), ("int4", 1 / 14)])
def test_quantised_values_come_back_near(precision: str, step: float) -> None:
    values = np.random.default_rng(1).standard_normal((500, 32)).astype(np.float32)
    layout = row_layout(precision, 32)
    read = dequantise(torch.from_numpy(quantise(values, layout)).unsqueeze(1), layout)[:, 0].numpy()
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (
        np.abs(read - values) <= step * 1.001 * (largest if precision == "int4" else np.abs(values) + largest / 448 / 128)
    ).all()
    assert torch.equal(
        torch.from_numpy(read[0]), dequantise_torch(torch.from_numpy(quantise(values[:1], layout)).unsqueeze(1), layout)[0, 0]
    )
