"""A host agent: what other pools hold, by the ring of this host, whatever becomes of those pools."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import numpy as np
import pytest

from engram_pool.commands.load_options import share
from treadle.client import Endpoint
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.pool import EngramPool
from treadle.contract import DataLoss, Deadline, EngramModel, InvalidArgument, Late, TreadleError, WaitPolicy, Windows
from treadle.dataplane import IMPLEMENTATION
from treadle.kernels.segment import Segment

if TYPE_CHECKING:
    from tests.freezing import freeze
else:
    from freezing import freeze

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")

READY_SECONDS_MAX = 60.0
IDS = np.arange(64).reshape(8, 8)
Until = Callable[[Callable[[], bool], str], None]


class Running:
    """A pool in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, str]) -> None:
        self.process, self.address, self.metrics = process, ready["listen"], ready["metrics"]
        self.pool = EngramPool(Endpoint(self.address))

    def metric(self, line: str) -> float:
        with urlopen(f"http://{self.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(line))


@pytest.fixture
def folder() -> Iterator[Callable[[str], Path]]:
    """`folder(name)`: in memory, with a short name: a Unix socket's path takes 107 bytes."""
    root = Path(f"/dev/shm/treadle-agent-{secrets.token_hex(4)}")
    root.mkdir(0o750)
    yield lambda name: root / name
    shutil.rmtree(root)


@contextmanager
def start(folder: Path, *settings: str, listen: str = "127.0.0.1:0") -> Iterator[Running]:
    command = [sys.executable, "-m", "engram_pool", "--listen", listen, "--metrics-listen", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--segment-dir", str(folder), *settings], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], READY_SECONDS_MAX)[0], "the pool is not ready"
        running = Running(process, json.loads(process.stdout.readline()))
        yield running
        running.pool.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.wait(READY_SECONDS_MAX)
        process.stdout.close()


def owner(folder: Path, *settings: str, listen: str = "127.0.0.1:0") -> AbstractContextManager[Running]:
    return start(folder, "--socket-listen", "127.0.0.1:0", *settings, listen=listen)


def reads(handle: EngramHandle) -> bool:
    try:
        handle.gather(handle.layers[0], IDS)
    except TreadleError:
        return False
    return True


def refusal(*settings: str) -> str:
    """What a process that does not start says."""
    command = [sys.executable, "-m", "engram_pool", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS_MAX, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_hot_rows_of_a_table_that_was_repaired_are_those_of_the_repair(
    folder: Callable[[str], Path], ple: EngramModel, until: Until
) -> None:
    with owner(folder("owner"), "--scrub-bytes-per-second", "0") as upstream:  # the damage stays until somebody looks
        upstream.pool.load_random(ple, None, seed=1)
        settings = ("--upstream", upstream.address, "--hot-rows-bytes", str(16 << 20))
        with start(folder("agent"), *settings) as agent, upstream.pool.open("ple", transport="socket") as direct:
            layer = direct.layers[0]
            right = direct.gather(layer, IDS)
            with agent.pool.open("ple", transport="ring") as ring:
                until(lambda: reads(ring), "the agent serves")
                (segment,) = folder("owner").glob("ple/*/layer-*.safetensors")
                with Segment(segment) as open_segment:
                    rows_at = open_segment.rows_offset_bytes
                damaged_ids = IDS + 64  # not hot yet
                wanted = direct.gather(layer, damaged_ids)
                descriptor = os.open(segment, os.O_RDWR)
                os.pwrite(descriptor, b"\xff" * 320 * 64, rows_at + 320 * 64)
                os.close(descriptor)
                ring_saw = ring.gather(layer, damaged_ids)
                assert not np.array_equal(ring_saw, wanted), "the damage was not seen: nothing is tested"
                with pytest.raises(DataLoss):
                    upstream.pool.verify("ple")
                assert upstream.metric('treadle_engram_scrub_chunks_total{outcome="repaired"}') > 0
                until(lambda: reads(direct), "the owner serves again")

                def healed() -> bool:
                    try:
                        return np.array_equal(ring.gather(layer, damaged_ids), wanted)
                    except TreadleError:
                        return False

                until(healed, "the agent's hot rows are those of the repair")
                np.testing.assert_array_equal(ring.gather(layer, IDS), right)


def test_a_hint_reaches_the_pools_that_hold_the_tables(folder: Callable[[str], Path], ple: EngramModel, until: Until) -> None:
    with owner(folder("owner"), "--tier", "disk") as upstream, owner(folder("gone")) as gone:
        upstream.pool.load_random(ple)
        with start(folder("agent"), "--upstream", f"{gone.address},{upstream.address}") as agent:
            gone.process.kill()
            assert agent.pool.hint_tokens("ple", list(range(100))) == 100
            brought = 'treadle_engram_hint_tokens_total{outcome="brought"}'
            until(lambda: upstream.metric(brought) == 100, "the owner brought the rows near")


def test_an_owner_that_comes_late_and_one_that_moves_are_asked(
    folder: Callable[[str], Path], ple: EngramModel, until: Until, free_port: Callable[[], int]
) -> None:
    first, second = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with start(folder("agent"), "--upstream", f"{first},{second}") as agent:
        with owner(folder("first"), listen=first) as upstream:
            upstream.pool.load_random(ple, None, seed=1)

            def opened() -> bool:
                try:
                    agent.pool.describe("ple")
                except TreadleError:
                    return False
                return True

            until(opened, "the agent has heard of the version")
            ring = agent.pool.open("ple", transport="ring")
            until(lambda: reads(ring), "the agent serves")
            with owner(folder("second"), listen=second) as late:
                late.pool.load_random(ple, None, seed=1)
                upstream.process.kill()
                upstream.process.wait()
                until(lambda: reads(ring), "the owner that came late is asked")
        with owner(folder("first"), listen=first):  # its door is at another port now
            until(lambda: reads(ring), "the owner that moved is asked")
        ring.close()


def test_a_frozen_owner_keeps_nobody_longer_than_he_waits(folder: Callable[[str], Path], ple: EngramModel, until: Until) -> None:
    with owner(folder("owner")) as upstream:
        upstream.pool.load_random(ple, None, seed=1)
        settings = ("--upstream", upstream.address, "--hot-rows-bytes", str(16 << 20), "--door-threads", "1")
        with start(folder("agent"), *settings) as agent, agent.pool.open("ple", transport="ring") as ring:
            until(lambda: reads(ring), "the agent serves")
            lookback = np.full((1, ring.model.order_max - 1), -1)

            def windows(first: int) -> Windows:
                return Windows(tokens=np.arange(first, first + 8), starts=np.array([0, 8], np.int32), lookback=lookback)

            ring.lookup(windows(0))
            freeze(upstream.process.pid)
            deadlines = {layer: Deadline.after(0.01) for layer in ring.layers}
            cold = [ring.prefetch(windows(100 * k), deadlines) for k in range(1, 5)]
            hot = ring.prefetch(windows(0), {layer: Deadline.after(1.5) for layer in ring.layers})
            assert all(came.missing is None for came in hot.wait(WaitPolicy(1.5, Late.MASK)).values())
            begun = time.monotonic()
            for lookup in cold:
                assert all(came.missing is not None for came in lookup.wait(WaitPolicy(0.02, Late.MASK)).values())
            assert time.monotonic() - begun < 1.5  # a fetch lasts 2 s where nobody gives it up
            os.kill(upstream.process.pid, signal.SIGCONT)
            until(lambda: reads(ring), "the agent serves again")


def test_a_version_of_which_owners_hold_parts_is_refused_and_they_are_named(
    folder: Callable[[str], Path], ple: EngramModel, until: Until
) -> None:
    with owner(folder("a")) as a, owner(folder("b")) as b:
        for name, upstream in (("a", a), ("b", b)):
            upstream.pool.load_random(ple, None, placement=share("a,b", name, 1, 0))
        with start(folder("agent"), "--upstream", f"{a.address},{b.address}") as agent:

            def refused() -> bool:
                try:
                    agent.pool.open("ple", transport="ring").close()
                except InvalidArgument as error:
                    return a.address in str(error) and b.address in str(error)
                return False

            until(refused, "the agent refuses the version")


def test_settings_without_effect_on_an_agent_are_refused() -> None:
    said = refusal("--upstream", "127.0.0.1:1", "--socket-listen", "127.0.0.1:0", "--verify-on-start", "full")
    assert "socket_listen" in said
    assert "verify_on_start" in said
    assert "upstream" in said
    assert "hot_rows_bytes" not in said


def test_an_agent_refuses_a_folder_that_others_may_write_to(folder: Callable[[str], Path]) -> None:
    folder("open").mkdir()
    folder("open").chmod(0o777)
    assert "writable by others" in refusal("--upstream", "127.0.0.1:1", "--segment-dir", str(folder("open")))
