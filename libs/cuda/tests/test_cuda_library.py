"""The compiled library: it compiles for every architecture that is named, loads without a GPU, and says in our words what it lacks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from treadle.contract import InvalidArgument, ResourceExhausted, RowOutOfRange, Unavailable
from treadle.cuda.device_rows import DeviceRows, checked_ids
from treadle.cuda.library import CudaLibrary, DeviceFailure, error_of


@pytest.mark.slow
def test_it_compiles_for_ampere_to_hopper_and_whatever_comes_later(compiled: Path, build_script: ModuleType) -> None:
    asked = build_script.command(Path("library"))
    assert build_script.ARCHITECTURES == (80, 86, 89, 90)
    assert all(f"-gencode=arch=compute_{each},code=sm_{each}" in asked for each in build_script.ARCHITECTURES)
    assert "-gencode=arch=compute_90,code=compute_90" in asked
    assert b".nv_fatbin" in compiled.read_bytes(), "it holds code for devices"


@pytest.mark.slow
def test_without_a_device_it_loads_and_says_so(compiled: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    native = CudaLibrary(compiled)
    with pytest.raises(Unavailable, match="CUDA error"):
        native.device_count()
    page = np.zeros(8192, np.uint8)
    with pytest.raises(Unavailable):
        native.register(page.ctypes.data // 4096 * 4096, 4096, read_only=False)


def test_a_library_that_was_not_built_says_how(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="make cuda"):
        CudaLibrary(tmp_path / "libtreadle_cuda.so")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, InvalidArgument),
        (2, ResourceExhausted),
        (35, Unavailable),
        (100, Unavailable),
        (712, InvalidArgument),
        (801, Unavailable),
        (700, DeviceFailure),
    ],
)
def test_every_status_becomes_an_error_that_says_what_to_do(status: int, error: type[Exception]) -> None:
    made = error_of(status, "cudaHostRegister", "said")
    assert type(made) is error
    assert "cudaHostRegister" in str(made)
    assert f"CUDA error {status}" in str(made)


def test_ids_of_the_host_are_checked_before_anything_is_sent() -> None:
    ids = np.array([[0, 9], [3, 4]], dtype=np.int64)
    np.testing.assert_array_equal(checked_ids(ids.T, 10), ids.T)
    assert checked_ids(ids.T, 10).flags.c_contiguous
    with pytest.raises(RowOutOfRange, match=r"rows\[1\] is 9; the table has rows 0 to 8"):
        checked_ids(ids, 9)
    with pytest.raises(RowOutOfRange, match="is -1"):
        checked_ids(ids - 1, 10)
    wrong: Any
    for wrong in (ids.astype(np.int32), ids[0]):
        with pytest.raises(InvalidArgument, match="int64"):
            checked_ids(wrong, 10)


class Nothing:
    """A handle without tables."""

    model = None

    def tables(self) -> dict[int, object]:
        raise Unavailable("by rpc no row lies in this process")


def test_a_device_that_is_none_is_refused(compiled: Path) -> None:
    native = CudaLibrary(compiled)
    with pytest.raises(InvalidArgument, match="CUDA device"):
        DeviceRows(Nothing(), "cpu", native=native)  # type: ignore[arg-type]  # refused before it is used
    with pytest.raises(Unavailable, match="rpc"):
        DeviceRows(Nothing(), "cuda", native=native)  # type: ignore[arg-type]  # refused before it is used


def test_without_a_gpu_nothing_is_registered_and_the_way_out_is_named(compiled: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    class Empty(Nothing):
        def tables(self) -> dict[int, object]:
            return {}

    with pytest.raises(Unavailable, match="use the transport mapped"):
        DeviceRows(Empty(), native=CudaLibrary(compiled))  # type: ignore[arg-type]  # refused before it is used
