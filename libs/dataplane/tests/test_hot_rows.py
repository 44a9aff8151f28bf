"""The hot-row cache: a row that is found is the row asked for, whole, of that version; and there are never more than its bytes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import DataLoss, Deadline, InvalidArgument, ResourceExhausted, RowOutOfRange
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue
from treadle.dataplane.extension import native_module
from treadle.dataplane.hot_rows import HotCaches, HotRows, HotRowsReader

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")

VERSION, OTHER = "ab" * 32, "cd" * 32
ROW_BYTES, ROWS = 64, 5_000


@pytest.fixture
def table() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)


def found(hot: HotRows, version: str, layer: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Places that a reader misses, and what it has for the others."""
    reader, out = HotRowsReader(hot.descriptor), np.empty((rows.size, hot.row_bytes), np.uint8)
    place = reader.table(version, layer)
    return (np.arange(rows.size) if place is None else reader.probe(place, rows, out)), out


@pytest.mark.parametrize("row_bytes", [18, 64, 264, 320])
def test_what_was_put_in_is_found(row_bytes: int) -> None:
    chance = np.random.default_rng(row_bytes)
    hot, rows = HotRows(row_bytes, 8 << 20), chance.permutation(100_000)[:2_000]
    data = chance.integers(0, 256, (rows.size, row_bytes), dtype=np.uint8)
    hot.insert(VERSION, 2, rows, data)
    misses, out = found(hot, VERSION, 2, rows)
    here = np.ones(rows.size, np.bool_)
    here[misses] = False
    np.testing.assert_array_equal(out[here], data[here])
    assert misses.size < rows.size // 100
    assert hot.stats()["inserted_total"] == 2_000
    assert found(hot, VERSION, 2, rows + 100_000)[0].size == rows.size


def test_a_row_belongs_to_a_version_and_a_layer(table: NDArray[np.uint8]) -> None:
    hot, rows = HotRows(ROW_BYTES, 1 << 20), np.arange(100)
    hot.insert(VERSION, 2, rows, table[:100])
    for version, layer in ((OTHER, 2), (VERSION, 3)):
        assert found(hot, version, layer, rows)[0].size == 100
        hot.enter(version, layer)
        assert found(hot, version, layer, rows)[0].size == 100


def test_a_retired_version_is_found_no_more_and_its_places_are_free(table: NDArray[np.uint8]) -> None:
    hot, rows = HotRows(ROW_BYTES, 1 << 20), np.arange(1_000)
    hot.insert(VERSION, 2, rows, table[:1_000])
    reader = HotRowsReader(hot.descriptor)
    place = reader.table(VERSION, 2)
    assert place is not None
    assert reader.serves(place)
    hot.retire(VERSION, 2)
    assert not reader.serves(place)
    assert reader.table(VERSION, 2) is None
    assert reader.probe(place, rows, np.empty((1_000, ROW_BYTES), np.uint8)).size == 1_000
    evicted = hot.stats()["evicted_total"]
    hot.insert(OTHER, 2, rows, table[:1_000])
    assert hot.stats()["evicted_total"] == evicted
    hot.insert(VERSION, 2, rows, table[1_000:2_000])  # back with other rows: a tag of its own
    misses, out = found(hot, VERSION, 2, rows)
    assert 0 in set(range(1_000)) - set(misses.tolist())
    assert (out[0] == table[1_000]).all()


def test_memory_is_bounded_and_what_is_read_stays(table: NDArray[np.uint8]) -> None:
    hot = HotRows(ROW_BYTES, 1 << 16)
    stats = hot.stats()
    assert stats["bytes"] <= 1 << 16
    assert os.fstat(hot.descriptor).st_size == stats["bytes"]
    store = hot.behind(VERSION, 0, native_module().memory_rows(table, None))
    often, out = np.arange(40), np.empty((40, ROW_BYTES), np.uint8)
    with DeadlineQueue(implementation="native") as queue:
        for start in range(100, ROWS, 40):
            queue.submit_gather(store, often, out, Deadline.after(1)).wait(10)
            queue.submit_gather(
                store, np.arange(start, min(start + 40, ROWS)), out[: min(40, ROWS - start)], Deadline.after(1)
            ).wait(10)
        before = hot.stats()
        queue.submit_gather(store, often, out, Deadline.after(1)).wait(10)
        after = hot.stats()
    np.testing.assert_array_equal(out, table[:40])
    assert after["hits_total"] - before["hits_total"] > 30, "rows of every second batch outlive those that come once"
    assert after["evicted_total"] > ROWS // 2


def test_a_cached_table_gives_the_rows_of_the_table(table: NDArray[np.uint8]) -> None:
    chance, hot = np.random.default_rng(3), HotRows(ROW_BYTES, 1 << 17)
    store = hot.behind(VERSION, 0, native_module().memory_rows(table, None))
    with DeadlineQueue(workers=2, implementation="native") as queue:
        for _ in range(40):
            ids = np.minimum(chance.zipf(1.3, int(chance.integers(1, 6_000))), ROWS) - 1
            out = np.zeros((ids.size, ROW_BYTES), np.uint8)
            assert queue.submit_gather(store, ids, out, Deadline.after(1)).wait(10)
            np.testing.assert_array_equal(out, table[ids])
        with pytest.raises(RowOutOfRange):
            queue.submit_gather(store, np.array([ROWS]), out[:1], Deadline.after(1))
    stats = hot.stats()
    assert stats["hits_total"] > stats["misses_total"] > 0


CROWD = """
import sys
import numpy as np
from treadle.dataplane.hot_rows import HotRowsReader
reader, rounds, hits = HotRowsReader(int(sys.argv[1])), 0, 0
chance, out = np.random.default_rng(1), np.empty((64, 320), np.uint8)
print("in", flush=True)
while hits < 50_000:
    table = reader.table("ab" * 32, 0)
    if table is None:
        continue
    ids = chance.integers(0, 3_000, 64)
    here = np.ones(64, bool)
    here[reader.probe(table, ids, out)] = False
    words = out.view(np.int64)[here]
    assert (words == ids[here, None] * 1_000 + np.arange(40)).all(), "a torn row"
    hits += int(here.sum())
"""


def test_no_reader_of_another_process_sees_a_torn_row(table: NDArray[np.uint8]) -> None:
    hot, chance = HotRows(320, 1 << 19), np.random.default_rng(2)
    process = subprocess.Popen(
        [sys.executable, "-c", CROWD, str(hot.descriptor)], pass_fds=[hot.descriptor], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    while process.poll() is None:
        ids = chance.integers(0, 3_000, 500)
        hot.insert(VERSION, 0, ids, (ids[:, None] * 1_000 + np.arange(40)).view(np.uint8))
    process.stdout.close()
    assert process.returncode == 0
    assert hot.stats()["evicted_total"] > 0


def test_who_is_handed_the_memory_can_only_read_it() -> None:
    hot = HotRows(ROW_BYTES, 1 << 20)
    with pytest.raises(PermissionError):
        mmap.mmap(hot.descriptor, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(hot.descriptor, 0)
    with pytest.raises(PermissionError):
        os.pwrite(hot.descriptor, b"x", 0)


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    for size in (0, 100, 1 << 20):
        with (tmp_path / "file").open("wb+") as file:
            file.truncate(size)
            with pytest.raises(DataLoss):
                HotRowsReader(file.fileno())


def test_limits_are_named() -> None:
    with pytest.raises(InvalidArgument):
        HotRows(ROW_BYTES, 100)
    caches = HotCaches(1 << 16)
    for size in range(8, 72, 8):
        assert caches.of(size) is caches.of(size)
    with pytest.raises(ResourceExhausted, match="8 sizes"):
        caches.of(320)
    hot = caches.of(64)
    for layer in range(256):
        hot.enter(VERSION, layer)
    with pytest.raises(ResourceExhausted, match="256 tables"):
        hot.enter(VERSION, 256)
    caches.retire(VERSION, 7)
    hot.enter(VERSION, 256)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_readers_and_a_writer_do_not_race(run_sanitized: Callable[[str, str], None], sanitizer: str) -> None:
    run_sanitized("hot_stress", sanitizer)
