"""Each measurement once, on small sizes: that it runs, measures what it says and leaves nothing behind. No figure is judged."""

from pathlib import Path

import pytest

from treadle import dataplane, kernels
from treadle_bench import gather, hashing, loading, tickets

SMALL_BYTES = 12_000_000


def left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("treadle-bench*")} | {
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if "treadle-bench" in line
    }


def test_gather_measures_both_page_sizes_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(gather, "IDS_KEPT", 100_000)
    before = left_behind()
    rows, goals = gather.measure(quick=True, table_bytes=SMALL_BYTES)
    assert {row.name for row in rows} >= {"listing1 4KiB", "np.take 4KiB", "mapped 4KiB", "read-only 4KiB"}
    assert len(rows) == 6
    assert all(row.median > 0 and row.n == 60 for row in rows)
    assert goals
    assert left_behind() == before


def test_hash_measures_every_family() -> None:
    rows, _ = hashing.measure(quick=True)
    assert {row.params["family"] for row in rows} == {"engram-demo", "deepseek-v4.1", "qwen-ple"}
    assert {row.name for row in rows} == {"numpy", kernels.IMPLEMENTATION}


def test_load_measures_a_real_pool_and_its_memory() -> None:
    before = left_behind()
    rows, goals = loading.measure(quick=True, table_bytes=SMALL_BYTES)
    assert {row.name for row in rows} == {"copy to tmpfs", "random", "checkpoint"}
    memory = next(goal for goal in goals if "memory" in goal.text)
    assert memory.met
    assert left_behind() == before


def test_tickets_measure_the_native_queue_where_there_is_one() -> None:
    rows, _ = tickets.measure(quick=True)
    assert {row.name for row in rows} == {"python", dataplane.IMPLEMENTATION}
