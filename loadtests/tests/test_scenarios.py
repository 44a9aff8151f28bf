"""The scenarios in small: real pools and clients, swapped and killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.dataplane import IMPLEMENTATION

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


@pytest.mark.slow
def test_versions_are_swapped_and_every_row_is_right() -> None:
    seen = play("swap", "seconds=30, gathers=2000, swaps=2, pause_seconds=0.2")
    counts = seen["counts"]
    assert counts["checked_gathers"] >= 2_000
    assert counts["swaps"] >= 2
    assert all(counts[f"gathers_{transport}"] > 0 for transport in ("mapped", "socket", "rpc"))
    assert (counts["wrong_rows"], counts["failed"], counts["open_failed"]) == (0, 0, 0), seen["reasons"]


@pytest.mark.slow
def test_whoever_is_killed_every_row_is_right_and_no_request_fails() -> None:
    seen = play("chaos", "kills=4, seconds=60, swap_every=3, socket_clients=1")
    counts = seen["counts"]
    assert counts["kills"] == 4
    assert (counts["wrong_rows"], counts["failed"], counts["open_failed"]) == (0, 0, 0), seen["reasons"]
    assert counts["gathers_socket"] > 0
