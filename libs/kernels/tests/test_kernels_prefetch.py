"""The prefetch distance: chosen by measurement, only where it gains more than the noise, one for the whole process."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from treadle.contract import InvalidArgument
from treadle.kernels import calibrate_prefetch, gather_rows, prefetch

TABLE = np.random.default_rng(0).integers(0, 256, (20_000, 320), dtype=np.uint8)
DEFAULT = 16


@pytest.fixture
def native() -> Iterator[ModuleType]:
    module = pytest.importorskip("treadle.kernels._native", reason="the extension was not built", exc_type=ImportError)
    yield module
    module.set_prefetch_rows(module.PREFETCH_ROWS)


def rounds(microseconds: dict[int, float], *, noise: float = 0.01, count: int = 30) -> list[dict[int, float]]:
    """Rounds on a machine that is busy now and then, for all distances alike."""
    rng = np.random.default_rng(1)
    return [
        {d: microseconds.get(d, 100.0) * busy * rng.normal(1, noise) for d in prefetch.DISTANCES}
        for busy in rng.uniform(1, 20, count)
    ]


def test_a_distance_that_gains_is_chosen_and_the_gain_is_told() -> None:
    found = prefetch.chosen(rounds({32: 88.0, 48: 93.0}), DEFAULT, 1000)
    assert (found.distance, found.default_distance, found.rounds, found.rows) == (32, DEFAULT, 30, 1000)
    assert found.gain == pytest.approx(0.12, abs=0.02)
    assert set(found.microseconds_by_distance) == set(prefetch.DISTANCES)
    assert "32 rows ahead: saves 1" in found.reason


@pytest.mark.parametrize(
    ("microseconds", "noise"), [({32: 99.0}, 0.001), ({8: 95.0}, 0.3), ({}, 0.01), ({4: 120.0}, 0.01)],
    ids=["too little", "within the noise", "nothing", "worse"],
)  # fmt: skip
def test_the_default_stays_without_a_gain(microseconds: dict[int, float], noise: float) -> None:
    found = prefetch.chosen(rounds(microseconds, noise=noise), DEFAULT, 1000)
    assert found.distance == DEFAULT
    assert found.gain == 0
    assert "the default" in found.reason


def test_too_few_rounds_decide_nothing() -> None:
    found = prefetch.chosen(rounds({32: 10.0}, count=prefetch.ROUNDS_MIN - 1), DEFAULT, 1000)
    assert found.distance == DEFAULT
    assert not found.microseconds_by_distance


def test_a_calibration_is_bounded_and_is_what_gathers_use_from_then_on(native: ModuleType) -> None:
    native.set_prefetch_rows(3)
    begun = time.perf_counter()
    found = calibrate_prefetch(TABLE, seconds=0.02)
    assert time.perf_counter() - begun < 5  # a busy machine; the bound itself is for the rounds
    assert found.default_distance == DEFAULT
    assert found.rounds <= prefetch.ROUNDS_MAX
    assert found.distance in prefetch.DISTANCES
    assert native.prefetch_rows() == found.distance
    rows, out = np.arange(0, 20_000, 7), np.zeros((2_858, 320), dtype=np.uint8)
    gather_rows(TABLE, rows, out)
    assert (out == TABLE[rows]).all()


def test_a_calibration_may_only_tell(native: ModuleType) -> None:
    native.set_prefetch_rows(3)
    assert calibrate_prefetch(TABLE, seconds=0.01, use=False).distance in prefetch.DISTANCES
    assert native.prefetch_rows() == 3


def test_no_time_leaves_the_default(native: ModuleType) -> None:
    native.set_prefetch_rows(3)
    assert calibrate_prefetch(TABLE, seconds=0.0).distance == DEFAULT == native.prefetch_rows()


def test_the_dataplane_sees_the_same_distance(native: ModuleType) -> None:
    dataplane = pytest.importorskip("treadle.dataplane._native", reason="the extension was not built", exc_type=ImportError)
    native.set_prefetch_rows(23)
    symbol = "_ZN7treadle7kernels13prefetch_rowsE"
    for module in (native, dataplane):
        assert ctypes.c_int64.in_dll(ctypes.CDLL(str(module.__file__)), symbol).value == 23


@pytest.mark.parametrize("distance", [0, -1, 65])
def test_a_distance_outside_the_limits_is_refused(native: ModuleType, distance: int) -> None:
    with pytest.raises(ValueError, match="ahead"):
        native.set_prefetch_rows(distance)


def test_a_table_without_rows_or_of_another_kind_is_refused(native: ModuleType) -> None:
    with pytest.raises(InvalidArgument, match=r"^table: "):
        calibrate_prefetch(TABLE[:0])
    with pytest.raises(InvalidArgument, match=r"^table: "):
        calibrate_prefetch(TABLE[:, ::2])


def test_numpy_kernels_have_no_distance() -> None:
    script = (
        "import sys, numpy; sys.modules['treadle.kernels._native'] = None\n"
        "from treadle.contract import Unavailable\nfrom treadle.kernels import calibrate_prefetch\n"
        "try:\n    calibrate_prefetch(numpy.zeros((9, 64), dtype=numpy.uint8))\nexcept Unavailable as error:\n    print(error)"
    )
    environment = os.environ | {"TREADLE_KERNELS": "numpy"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert "only the native kernels" in done.stdout, done.stderr
