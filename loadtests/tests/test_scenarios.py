"""The scenarios in small: real pools and clients, swapped and killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from treadle.dataplane import IMPLEMENTATION
from treadle_loadtests.chaos import WHOLE, Blows, Plan
from treadle_loadtests.report import Report

pytestmark = pytest.mark.skipif(
    IMPLEMENTATION != "native", reason="the socket transport needs the native data plane: build libs/dataplane"
)
LEFT = "treadle-loadtest-*"
RUN = (
    "import json,sys;from treadle_loadtests.{name} import Plan, run;report = run(Plan({plan}));print(json.dumps(report.document()))"
)


def play(name: str, plan: str) -> dict[str, dict[str, int]]:
    """In a process of its own: the supervisor wants the main thread."""
    before = set(Path("/dev/shm").glob(LEFT))
    run = subprocess.run(
        [sys.executable, "-c", RUN.format(name=name, plan=plan)], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    assert set(Path("/dev/shm").glob(LEFT)) <= before  # nothing is left behind
    document: dict[str, dict[str, int]] = json.loads(run.stdout.splitlines()[-1])
    return document


class Noticed:
    """Of a stage: a pool whose death is noticed `late` seconds after the blow, and which is back at once."""

    def __init__(self, late: float) -> None:
        self.clients: dict[str, Any] = {}
        self.pools, self.late, self.struck_at, self.died = {WHOLE: "nowhere"}, late, 0.0, False

    def kill(self, _: str) -> None:
        self.struck_at = time.monotonic()

    def ready(self, _: str) -> bool:
        before, self.died = self.died, self.died or time.monotonic() - self.struck_at > self.late
        return before == self.died

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> float:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, what
        return 0.0


def test_a_blow_counts_from_the_kill_on_not_from_when_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blows, "_opens", lambda *_: True)
    report = Report("chaos", {})
    Blows(cast("Any", Noticed(0.05)), Plan(), report)._kill_pool(WHOLE, "pool")
    assert report.times["killed pool ready again"][0] >= 0.05
    assert report.times["open at the killed pool"][0] >= 0.05


@pytest.mark.slow
def test_versions_are_swapped_and_every_row_is_right() -> None:
    seen = play("swap", "seconds=30, gathers=2000, swaps=2, pause_seconds=0.2")
    counts = seen["counts"]
    assert counts["checked_gathers"] >= 2_000
    assert counts["swaps"] >= 2
    assert all(counts[f"gathers_{transport}"] > 0 for transport in ("mapped", "socket", "rpc"))
    assert (counts["wrong_rows"], counts["failed"], counts["open_failed"]) == (0, 0, 0), seen["reasons"]


@pytest.mark.slow
def test_dictionaries_are_swapped_and_every_request_keeps_its_version() -> None:
    seen = play("prefix_swap", "seconds=30, lookups=300, swaps=4, version_bytes=2 << 20, pause_seconds=0.1")
    counts = seen["counts"]
    assert counts["swaps"] >= 4  # the first version comes back after it was deleted
    assert counts["lookups_mapped"] > 0
    assert counts["lookups_rpc"] > 0
    assert counts["files_deleted_while_read"] > 0
    assert (counts["wrong_after_delete"], counts["wrong_states"], counts["failed"], counts["open_failed"]) == (0, 0, 0, 0), seen[
        "reasons"
    ]


@pytest.mark.slow
def test_whoever_is_killed_every_row_is_right_and_no_request_fails() -> None:
    seen = play("chaos", "kills=4, seconds=60, swap_every=3, socket_clients=1")
    counts = seen["counts"]
    assert counts["kills"] == 4
    assert (counts["wrong_rows"], counts["failed"], counts["open_failed"]) == (0, 0, 0), seen["reasons"]
    assert counts["gathers_socket"] > 0
