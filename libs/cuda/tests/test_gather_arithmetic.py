"""What each thread of the device's gather does, run thread by thread on the host, gives the rows that numpy gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

ROW_COUNT = 97


@pytest.fixture(scope="module")
def gather_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++: install a C++17 compiler")
    program = tmp_path_factory.mktemp("gather") / "gather_host"
    source = Path(__file__).with_name("gather_host.cpp")
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    subprocess.run([compiler, *flags, "-o", str(program), str(source)], check=True)
    return program


def gathered(program: Path, table: NDArray[np.uint8], ids: NDArray[np.int64], threads: int) -> tuple[NDArray[np.uint8], int, int]:
    command = [str(program), str(table.shape[1]), str(len(table)), str(len(ids)), str(threads)]
    ran = subprocess.run(command, input=table.tobytes() + ids.tobytes(), capture_output=True, check=True)
    width, bad = ran.stderr.split()
    return np.frombuffer(ran.stdout, np.uint8).reshape(len(ids), table.shape[1]), int(width), int(bad)


@pytest.mark.parametrize(("row_bytes", "width"), [(320, 16), (264, 8), (84, 4), (162, 2), (5, 1)])
@pytest.mark.parametrize("threads", [1, 7, 256, 100_000])
def test_rows_of_every_size_come_whole_whatever_the_grid(gather_host: Path, row_bytes: int, width: int, threads: int) -> None:
    chance = np.random.default_rng(row_bytes)
    table = chance.integers(0, 256, (ROW_COUNT, row_bytes), dtype=np.uint8)
    ids = chance.integers(0, ROW_COUNT, 64)
    ids[:2] = 0, ROW_COUNT - 1
    rows, used, bad = gathered(gather_host, table, ids, threads)
    np.testing.assert_array_equal(rows, table[ids])
    assert (used, bad) == (width, -1)


def test_an_id_outside_the_table_reads_nothing_gives_zeros_and_is_told(gather_host: Path) -> None:
    table = np.random.default_rng(0).integers(1, 256, (ROW_COUNT, 320), dtype=np.uint8)
    ids = np.array([3, ROW_COUNT, 5, -1, (1 << 62)], dtype=np.int64)
    rows, _, bad = gathered(gather_host, table, ids, threads=9)
    assert bad == 1, "the first of them"
    np.testing.assert_array_equal(rows[[0, 2]], table[[3, 5]])
    assert not rows[[1, 3, 4]].any()
