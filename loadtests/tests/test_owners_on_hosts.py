"""Two owners on hosts of their own, a client on a third: one that vanishes from the network is missed by nobody."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from treadle.dataplane import IMPLEMENTATION
from treadle_loadtests.hosts import Host, hosts, why_not

PORT, DOOR = 7401, 7421
LOOK_SECONDS = 0.05
CLIENT = """
import json, sys, time
import numpy as np
from treadle.client import Fabric
from treadle_loadtests.rows import MODEL, Truth, template, token_map
first, second, key = sys.argv[1:]
for address in (first, second):
    with Fabric(engram=address, key=key) as fabric:
        fabric.engram.load_random(template(200), token_map(), seed=1)
truth, chance = Truth(1, 200), np.random.default_rng(0)
with Fabric(engram=first, key=key) as fabric:
    until = time.monotonic() + 20
    while len(fabric.engram.owners(MODEL, truth.version).holding(MODEL, truth.version)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    with fabric.engram.open(MODEL, transport="socket") as handle:
        print(json.dumps({"owners": len(handle.replicas)}), flush=True)
        for line in sys.stdin:
            wrong, failed, slowest, until = 0, 0, 0.0, time.monotonic() + float(line)
            while time.monotonic() < until:
                ids, begun = chance.integers(0, 2_000, (4, 16)), time.monotonic()
                try:
                    wrong += truth.wrong(1, ids, handle.gather(1, ids))
                except Exception:
                    failed += 1
                slowest = max(slowest, time.monotonic() - begun)
            print(json.dumps({"wrong": wrong, "failed": failed, "slowest": slowest}), flush=True)
"""

pytestmark = [
    pytest.mark.skipif((reason := why_not()) is not None, reason=reason or ""),
    pytest.mark.skipif(IMPLEMENTATION != "native", reason="spread tables need the native data plane: build libs/dataplane"),
]


def start(stack: ExitStack, command: list[str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdout is not None
    assert child.stdin is not None
    stack.callback(child.stdout.close)
    stack.callback(child.stdin.close)
    assert json.loads(child.stdout.readline())
    return child


def stood_still(pipe: IO[str]) -> float:
    """Until there is something to read: for how long at most this machine did nothing, seconds; no owner's fault."""
    longest, looked, there = 0.0, time.monotonic(), False
    while not there:
        there = bool(select.select([pipe], [], [], LOOK_SECONDS)[0])
        longest, looked = max(longest, time.monotonic() - looked - LOOK_SECONDS), time.monotonic()
    return longest


def pool_on(host: Host, name: str, owners: str, folder: Path, keys: Path) -> list[str]:
    return host.command(
        sys.executable, "-m", "engram_pool", "--listen", f"{host.address}:{PORT}", "--metrics-listen", "127.0.0.1:0", "--owner", name,
        "--owners", owners, "--segment-dir", str(folder / name), "--socket-listen", f"{host.address}:{DOOR}",
        "--api-key-file", str(keys), "--peer-key-file", str(keys), "--log-level", "error",
    )  # fmt: skip


def test_an_owner_behind_a_black_hole_or_a_cut_link_is_missed_by_nobody(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    with hosts(3) as (a, b, c), ExitStack() as stack:
        owners = f"a={a.address}:{PORT},b={b.address}:{PORT}"
        for host, name in ((a, "a"), (b, "b")):
            start(stack, pool_on(host, name, owners, tmp_path, keys))
        client = start(stack, c.command(sys.executable, "-c", CLIENT, f"{a.address}:{PORT}", f"{b.address}:{PORT}", "a-key"))

        def work(seconds: float) -> dict[str, float]:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(f"{seconds}\n")
            client.stdin.flush()
            still = stood_still(client.stdout)
            seen: dict[str, float] = json.loads(client.stdout.readline())
            return seen | {"slowest": seen["slowest"] - still}

        quiet = work(0.5)
        assert (quiet["wrong"], quiet["failed"]) == (0, 0)
        with a.swallowed():
            swallowed = work(4)
        assert (swallowed["wrong"], swallowed["failed"]) == (0, 0), swallowed
        assert swallowed["slowest"] < 2
        work(1)
        with b.cut_off():
            cut = work(2)
        assert (cut["wrong"], cut["failed"]) == (0, 0), cut
        assert cut["slowest"] < 2
