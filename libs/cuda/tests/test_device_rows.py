"""Rows on a real device are the rows of the host. Needs a GPU: not run so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowOutOfRange, Windows
from treadle.contract.families import qwen_ple_model
from treadle.contract.row_layout import RowLayout
from treadle.cuda.device_rows import DeviceRows
from treadle.cuda.library import CudaLibrary
from treadle.kernels import HashPlan, row_ids


class Tables:
    """A handle on arrays."""

    def __init__(self, row_bytes: int) -> None:
        self.model: EngramModel = qwen_ple_model("ple", prime_base=800, row=RowLayout(row_bytes, row_bytes // 2, "bf16"))
        chance = np.random.default_rng(0)
        self.rows: dict[int, NDArray[np.uint8]] = {
            layer: chance.integers(0, 256, (self.model.rows_hashed(layer), row_bytes), dtype=np.uint8)
            for layer in self.model.layers
        }

    def tables(self) -> dict[int, tuple[HashPlan, NDArray[np.uint8]]]:
        return {layer: (HashPlan.from_model(self.model, layer, None), rows) for layer, rows in self.rows.items()}


@pytest.fixture(params=[320, 264])
def tables(request: pytest.FixtureRequest) -> Tables:
    return Tables(request.param)


@pytest.fixture
def device(gpu: str, compiled: Path, tables: Tables) -> Iterator[DeviceRows]:
    with DeviceRows(tables, gpu, native=CudaLibrary(compiled)) as rows:
        yield rows


def test_rows_by_ids_of_the_host_and_of_the_device_are_the_hosts(device: DeviceRows, tables: Tables) -> None:
    layer = tables.model.layers[0]
    ids = np.random.default_rng(1).integers(0, len(tables.rows[layer]), (300, 16))
    for given in (ids, torch.from_numpy(ids).to(device.device)):
        result = device.gather(layer, given)
        rows = result.wait()
        result.check()
        np.testing.assert_array_equal(rows.cpu().numpy(), tables.rows[layer][ids])


def test_a_step_is_hashed_and_gathered_beside_the_models_stream(device: DeviceRows, tables: Tables) -> None:
    windows = Windows.of_sequences([(list(range(200)), 0)], tables.model.order_max - 1)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    results = device.lookup(windows)
    for layer, result in results.items():
        ids = row_ids(HashPlan.from_model(tables.model, layer, None), windows)
        with torch.cuda.stream(stream):
            np.testing.assert_array_equal(result.wait(stream).cpu().numpy(), tables.rows[layer][ids])


def test_an_id_of_the_device_outside_the_table_is_told(device: DeviceRows, tables: Tables) -> None:
    layer = tables.model.layers[0]
    ids: Any = torch.tensor([[0, len(tables.rows[layer])]], device=device.device)
    result = device.gather(layer, ids)
    with pytest.raises(RowOutOfRange, match=r"rows\[1\]"):
        result.check()
