"""Each measurement once, on small sizes: that it runs, measures what it says and leaves nothing behind. No figure is judged."""

import os
from pathlib import Path

import psutil
import pytest

from treadle import dataplane, kernels
from treadle.contract import Unavailable
from treadle_bench import attach, gather, gather_tables, hashing, loading, tickets
from treadle_bench.busy_core import busy_core
from treadle_bench.gather_goals import BUSY
from treadle_bench.own_venv import interpreter_with

SMALL_BYTES = 12_000_000


def left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("treadle-bench*")} | {
        line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if "treadle-bench" in line
    }


def test_gather_measures_both_page_sizes_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_tables, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(gather, "IDS_KEPT", 100_000)
    monkeypatch.setattr(gather, "BUSY_ROUNDS_QUICK", 10)
    before = left_behind()
    rows, goals, notes = gather.measure(quick=True, table_bytes=SMALL_BYTES)
    idle, busy = ([row for row in rows if row.name.startswith(BUSY) is beside] for beside in (False, True))
    of_both = ("mapped", "mapped", "read-only", "np.take", "torch.index_select")  # mapped also by two threads
    peers = [row.name for row in idle if row.name.startswith("engramdb")]
    assert len(idle) == 1 + 2 * len(of_both) + len(peers)
    assert {row.name for row in idle} >= {f"{name} 4KiB" for name in (*of_both, "listing1")}
    assert {row.params["threads"] for row in idle if row.name.startswith("mapped")} == {1, 2}
    assert len(busy) == 4 or any("one core busy" in note for note in notes)
    assert len(peers) == 1 or any("skipped: engramdb" in note for note in notes)
    assert all(row.median > 0 and row.n == (10 if row in busy else 60) for row in rows)
    assert {goal.limit for goal in goals} >= {0.60, 0.88, 0.36, 1.4, 1.5, 1.1}
    assert sum("prefetch" in note for note in notes) == 2
    assert left_behind() == before


def test_a_busy_core_is_busy_and_then_no_more() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core only: nothing could be measured beside a busy one")
    with busy_core() as core:
        spinning = next(child for child in psutil.Process().children() if child.cpu_affinity() == [core])
        assert spinning.is_running()
    assert not spinning.is_running()


def test_a_package_that_cannot_be_installed_is_unavailable_and_tried_again_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"false -m venv .* failed"):
            interpreter_with("some-package==1", home=tmp_path)


def test_attach_measures_real_clients_of_a_real_pool() -> None:
    before = left_behind()
    rows, goals, notes = attach.measure(quick=True, table_bytes=SMALL_BYTES)
    assert {row.name for row in rows} >= {"attach", "warm in the background", "added by a client, warm", "of that, page tables"}
    assert all(row.n == attach.CLIENTS for row in rows)
    by_name = {row.name: row.median for row in rows}
    assert by_name["pss of a client"] > by_name["added by a client, warm"] >= by_name["of that, page tables"] >= 0
    assert len(goals) == 3
    assert any("warm state at the end: warm" in note for note in notes)
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
