"""Rows on a disk: the rows of the file, each read once, and damage is an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import DataLoss, Deadline, InvalidArgument, RowLayout, RowOutOfRange
from treadle.contract.families import qwen_ple_model
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue
from treadle.dataplane.disk import DiskReaders, disk_rows
from treadle.dataplane.hot_rows import HotRows
from treadle.kernels import HashPlan, lookup

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")

ROWS, ROW_BYTES, OFFSET = 20_000, 264, 8192


@pytest.fixture
def table() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path, table: NDArray[np.uint8]) -> Iterator[int]:
    path = tmp_path / "table"
    path.write_bytes(bytes(OFFSET) + table.tobytes())
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def queue() -> Iterator[DeadlineQueue]:
    with DeadlineQueue(workers=2, implementation="native") as queue:
        yield queue


def drop_pages(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("count", [0, 1, 300, 9_000])
def test_a_gather_gives_the_rows_of_the_file(
    file: int, table: NDArray[np.uint8], queue: DeadlineQueue, count: int, threads: int
) -> None:
    store = disk_rows(file, OFFSET, ROWS, ROW_BYTES, DiskReaders(threads))
    chance = np.random.default_rng(count)
    for spread in (ROWS, 50):  # far apart, and many times the same
        ids = chance.integers(0, spread, count)
        drop_pages(file)
        out = np.zeros((count, ROW_BYTES), np.uint8)
        assert queue.submit_gather(store, ids, out, Deadline.after(1)).wait(30)
        np.testing.assert_array_equal(out, table[ids])
    with pytest.raises(RowOutOfRange):
        queue.submit_gather(store, np.array([ROWS]), np.zeros((1, ROW_BYTES), np.uint8), Deadline.after(1))


def test_a_row_is_read_once_a_batch_and_neighbours_together(file: int, queue: DeadlineQueue) -> None:
    store = disk_rows(file, OFFSET, ROWS, ROW_BYTES, DiskReaders(2))
    ids = np.repeat(np.array([7, 9_000, 8, 9, 15_000]), 10)
    out = np.zeros((ids.size, ROW_BYTES), np.uint8)
    assert queue.submit_gather(store, ids, out, Deadline.after(1)).wait(30)
    stats = store.stats()
    assert (stats["rows_total"], stats["reads_total"], stats["bytes_total"]) == (5, 3, 5 * ROW_BYTES)


def test_a_lookup_reads_from_the_disk(file: int, table: NDArray[np.uint8], queue: DeadlineQueue) -> None:
    from treadle.contract import Windows

    model = qwen_ple_model("ple", prime_base=ROWS // 32, row=RowLayout(ROW_BYTES, 132, "bf16"))
    plan = HashPlan.from_model(model, model.layers[0], None)
    windows = Windows(tokens=np.arange(100), starts=np.array([0, 100], np.int32), lookback=np.full((1, 2), -1))
    expected, out = np.empty((100, plan.columns, ROW_BYTES), np.uint8), np.empty((100, plan.columns, ROW_BYTES), np.uint8)
    lookup(plan, table, windows, expected)
    store = disk_rows(file, OFFSET, ROWS, ROW_BYTES, DiskReaders(2))
    assert queue.submit_lookup(plan, store, windows, out, Deadline.after(1)).wait(30)
    np.testing.assert_array_equal(out, expected)


def test_a_truncated_file_is_data_loss_and_not_zeros(file: int, queue: DeadlineQueue) -> None:
    store = disk_rows(file, OFFSET, ROWS, ROW_BYTES, DiskReaders(2))
    out = np.zeros((2, ROW_BYTES), np.uint8)
    os.ftruncate(file, OFFSET + 100 * ROW_BYTES + 5)
    assert queue.submit_gather(store, np.array([0, 99]), out, Deadline.after(1)).wait(30)
    for bad in (100, ROWS - 1):
        with pytest.raises(DataLoss):
            queue.submit_gather(store, np.array([0, bad]), out, Deadline.after(1)).wait(30)


def test_a_cache_before_a_disk_reads_a_row_once(file: int, table: NDArray[np.uint8], queue: DeadlineQueue) -> None:
    store = disk_rows(file, OFFSET, ROWS, ROW_BYTES, DiskReaders(2))
    cached = HotRows(ROW_BYTES, 1 << 20).behind("ab" * 32, 1, store)
    ids = np.arange(0, 2_000, 2)
    for _ in range(3):
        out = np.zeros((ids.size, ROW_BYTES), np.uint8)
        assert queue.submit_gather(cached, ids, out, Deadline.after(1)).wait(30)
        np.testing.assert_array_equal(out, table[ids])
    assert store.stats()["rows_total"] < 1.1 * ids.size


def test_limits_are_named(file: int) -> None:
    for threads in (0, 257):
        with pytest.raises(InvalidArgument):
            DiskReaders(threads)
    with pytest.raises(InvalidArgument, match="the file has"):
        disk_rows(file, OFFSET, ROWS + 1, ROW_BYTES, DiskReaders(1))
