"""A real pool with its ring: the rows of its tables, from memory and from a disk, for processes that may not map them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.client import Endpoint, Fabric
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.pool import EngramPool
from treadle.contract import (
    Deadline,
    EngramModel,
    InvalidArgument,
    Late,
    NotFound,
    RowOutOfRange,
    Transport,
    Unavailable,
    WaitPolicy,
    Windows,
)
from treadle.dataplane import IMPLEMENTATION

if TYPE_CHECKING:
    from tests.conftest import Process, StartPool
    from tests.freezing import freeze
else:
    from freezing import freeze

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")

TokenMap = NDArray[np.int32]
SERVED_SECONDS_MAX = 60.0
Start = Callable[..., AbstractContextManager["Running"]]


@dataclass(frozen=True)
class Running:
    """A pool in a process of its own."""

    process: Process
    pool: EngramPool

    @property
    def address(self) -> str:
        return self.process.address

    def metric(self, name: str) -> float:
        with urlopen(f"http://{self.process.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@pytest.fixture
def start(start_pool: StartPool) -> Start:
    """`with start(folder, "--setting", "value", ...) as running:`, stopped at the end, not killed."""

    @contextmanager
    def run(folder: Path, *arguments: str) -> Iterator[Running]:
        with start_pool(folder, *arguments) as process, EngramPool(Endpoint(process.address)) as pool:
            yield Running(process, pool)
            if process.child.poll() is None:
                process.stop()

    return run


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory with a short name: a Unix socket's path takes 107 bytes."""
    folder = Path(f"/dev/shm/treadle-ringtest-{os.getpid()}")
    yield folder
    if folder.exists():
        subprocess.run(["rm", "-r", str(folder)], check=True)


def some_windows(model: EngramModel, tokens: int) -> Windows:
    chance = np.random.default_rng(tokens)
    lookback = np.full((1, model.order_max - 1), -1)
    return Windows(tokens=chance.integers(0, 400, tokens), starts=np.array([0, tokens], np.int32), lookback=lookback)


def check_equal(one: EngramHandle, other: EngramHandle, tokens: int) -> None:
    windows = some_windows(one.model, tokens)
    expected = one.lookup(windows)
    outs = {layer: other.buffer(rows.shape) for layer, rows in expected.items()}
    for found in (other.lookup(windows), other.lookup(windows, out=outs)):
        for layer, rows in expected.items():
            np.testing.assert_array_equal(found[layer], rows)
    tickets = other.prefetch(windows, {layer: Deadline.after(1.0) for layer in other.layers})
    for layer, came in tickets.wait(WaitPolicy(10.0, Late.FAIL)).items():
        np.testing.assert_array_equal(came.rows, expected[layer])
    ids = np.random.default_rng(tokens).integers(0, one.model.table(one.layers[0]).rows, (tokens, 3))
    np.testing.assert_array_equal(one.gather(one.layers[0], ids), other.gather(one.layers[0], ids))


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_the_ring_gives_the_rows_of_mapped_and_rpc(
    start: Start, memory: Path, tmp_path: Path, demo: EngramModel, token_map: TokenMap, tier: str
) -> None:
    folder = memory if tier == "memory" else tmp_path / "s"
    settings = ("--ring-listen", f"unix:{memory}.sock", "--tier", tier)
    with start(folder, *settings, *(("--hot-rows-bytes", "1048576") if tier == "disk" else ())) as running:
        running.pool.load_random(demo, token_map)
        with (
            running.pool.open("demo", transport="ring") as ring,
            running.pool.open("demo", transport="mapped") as mapped,
            running.pool.open("demo", transport="rpc") as rpc,
        ):
            assert ring.transport is Transport.RING
            for tokens in (0, 1, 300):
                check_equal(mapped, ring, tokens)
                check_equal(rpc, ring, tokens)
            for bad in (-1, ring.model.table(1).rows):
                out = np.full((1, 1, demo.row.bytes), 7, np.uint8)
                with pytest.raises(RowOutOfRange):
                    ring.gather(1, np.array([[bad]]), out)
                assert (out == 7).all()
            assert running.pool.list_models()[0].readers >= 2  # the ring's handle holds its version too
        assert running.metric("treadle_engram_ring_rows_total") > 0
        if tier == "disk":
            assert running.metric("treadle_engram_hot_rows_hits_total") > 0
            assert running.metric('treadle_engram_dedup_nanoseconds{tier="disk",way="plain"}') > 0
    assert not Path(f"{memory}.sock").exists()


def test_a_handle_outlives_its_pool(start: Start, memory: Path, demo: EngramModel, token_map: TokenMap) -> None:
    settings = ("--ring-listen", f"unix:{memory}.sock")
    with start(memory, *settings) as running:
        loaded = running.pool.load_random(demo, token_map)
        port = running.address
        handle = running.pool.open("demo", transport="ring")
        kept = handle.buffer((4, 2, demo.row.bytes))
        handle.gather(1, np.arange(8).reshape(4, 2), kept)
        before = kept.copy()
        running.process.kill()
        with pytest.raises(Unavailable):
            handle.gather(1, np.arange(8).reshape(4, 2), kept)
    with start(memory, *settings, "--listen", port) as again:
        assert again.pool.list_models()[0].version == loaded.version
        np.testing.assert_array_equal(handle.gather(1, np.arange(8).reshape(4, 2)), before)
        handle.close()
        np.testing.assert_array_equal(kept, before)


def test_a_stopped_pool_costs_the_policy_and_no_more(start: Start, memory: Path, demo: EngramModel, token_map: TokenMap) -> None:
    with start(memory, "--ring-listen", f"unix:{memory}.sock") as running:
        running.pool.load_random(demo, token_map)
        with running.pool.open("demo", transport="ring") as handle:
            windows = some_windows(demo, 8)
            expected = handle.lookup(windows)
            freeze(running.process.child.pid)
            try:
                for _ in range(3):
                    before = time.monotonic()
                    ticket = handle.prefetch(windows, dict.fromkeys(handle.layers, Deadline.after(0.01)))
                    for rows in ticket.wait(WaitPolicy(0.02, Late.MASK)).values():
                        assert rows.missing is not None
                        assert not rows.rows.any()
                    assert time.monotonic() < before + 2.5
            finally:
                running.process.child.send_signal(signal.SIGCONT)
            for layer, rows_again in handle.lookup(windows).items():
                np.testing.assert_array_equal(rows_again, expected[layer])


def test_a_lookup_larger_than_the_shared_memory_is_cut_and_such_a_prefetch_names_the_limit(
    start: Start, memory: Path, demo: EngramModel, token_map: TokenMap
) -> None:
    with start(memory, "--ring-listen", f"unix:{memory}.sock", "--ring-arena-bytes-max", "65536") as running:
        running.pool.load_random(demo, token_map)
        windows = some_windows(demo, 2_000)
        with running.pool.open("demo", transport="ring") as ring, running.pool.open("demo", transport="mapped") as mapped:
            expected = mapped.lookup(windows)
            for layer, rows in ring.lookup(windows).items():
                np.testing.assert_array_equal(rows, expected[layer])
            with pytest.raises(InvalidArgument, match="ring_arena_bytes_max"):
                ring.prefetch(windows)


A_STRANGER = """
import os, sys
import numpy as np
from treadle.client import Endpoint
from treadle.client.engram.pool import EngramPool
from treadle.contract import AccessDenied, NotFound
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with EngramPool(Endpoint(sys.argv[1])) as pool:
    try:
        pool.open("demo", transport="mapped")
    except (NotFound, PermissionError):
        print("cannot map", flush=True)
    with pool.open("demo", transport="ring") as handle:
        sys.stdout.write(handle.gather(1, np.arange(40).reshape(10, 4)).tobytes().hex())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user: run the tests as root, or in a container")
def test_who_may_not_map_the_table_reads_it_by_ring(start: Start, memory: Path, demo: EngramModel, token_map: TokenMap) -> None:
    with start(memory, "--ring-listen", f"unix:{memory}.sock", "--ring-users", "65534") as running:
        running.pool.load_random(demo, token_map)
        with running.pool.open("demo") as mapped:
            expected = mapped.gather(1, np.arange(40).reshape(10, 4))
        done = subprocess.run(
            [sys.executable, "-c", A_STRANGER, running.address], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "cannot map\n" + expected.tobytes().hex()


def test_a_version_that_a_ring_handle_holds_is_not_freed(
    start: Start, memory: Path, demo: EngramModel, token_map: TokenMap
) -> None:
    with start(
        memory, "--ring-listen", f"unix:{memory}.sock", "--reap-interval-seconds", "0.05", "--reap-grace-seconds", "0"
    ) as running:
        running.pool.load_random(demo, token_map, seed=1)
        with running.pool.open("demo", transport="ring") as handle:
            before = handle.gather(1, np.arange(8).reshape(4, 2))
            running.pool.load_random(demo, token_map, seed=2)
            _, awaiting = running.pool.remove("demo", handle.version)
            assert awaiting == 1
            np.testing.assert_array_equal(handle.gather(1, np.arange(8).reshape(4, 2)), before)


def test_a_pool_without_a_ring_says_so(start: Start, memory: Path, demo: EngramModel, token_map: TokenMap) -> None:
    with start(memory, "--ring-listen", "off") as running:
        running.pool.load_random(demo, token_map)
        with pytest.raises(NotFound, match="ring_listen"):
            running.pool.open("demo", transport="ring")


async def test_a_ring_ticket_is_awaited_on_an_event_loop(
    start: Start, memory: Path, demo: EngramModel, token_map: TokenMap
) -> None:
    with start(memory) as running:
        await asyncio.to_thread(running.pool.load_random, demo, token_map)
        with await asyncio.to_thread(running.pool.open, "demo", transport="ring") as handle:
            ticket = handle.prefetch(some_windows(demo, 50), {1: Deadline.after(1.0)})
            await asyncio.wait_for(ticket.arrived(1), 20)
            assert ticket.wait_layer(1).missing is None


@pytest.mark.parametrize("setting", [("--ring-listen", "tcp:1"), ("--ring-users", "nobody"), ("--hot-rows-bytes", "5")])
def test_a_wrong_setting_stops_the_start(memory: Path, setting: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engram_pool", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--segment-dir", str(memory), *setting],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert setting[0].removeprefix("--").replace("-", "_") in done.stderr


def test_a_wrong_transport_is_named(start: Start, memory: Path, demo: EngramModel, token_map: TokenMap) -> None:
    with start(memory) as running, Fabric(running.address) as fabric:
        running.pool.load_random(demo, token_map)
        with pytest.raises(InvalidArgument, match="ring"):
            fabric.engram.open("demo", transport="pigeon")


@pytest.mark.parametrize("hot_bytes", ["0", "1048576"])
def test_a_host_without_tables_serves_those_of_others(
    start: Start, memory: Path, tmp_path: Path, demo: EngramModel, token_map: TokenMap, hot_bytes: str
) -> None:
    with start(memory) as owner:
        owner.pool.load_random(demo, token_map)
        settings = ("--ring-listen", f"unix:{memory}.sock", "--upstream", owner.address, "--hot-rows-bytes", hot_bytes)
        with start(tmp_path / "agent", *settings) as agent, owner.pool.open("demo", transport="mapped") as mapped:
            assert [model.version for model in agent.pool.list_models()] == [mapped.version]
            with pytest.raises((NotFound, InvalidArgument)):
                agent.pool.open("demo", transport="mapped")
            with agent.pool.open("demo") as ring:
                assert ring.transport is Transport.RING
                with pytest.raises(InvalidArgument, match=owner.address):
                    agent.pool.load_random(demo, token_map)
                wait_served(ring)
                for tokens in (1, 100):
                    check_equal(mapped, ring, tokens)
            second = owner.pool.load_random(demo, token_map, seed=9)
            with agent.pool.open("demo", second.version) as ring, owner.pool.open("demo", second.version) as mapped_second:
                wait_served(ring)
                check_equal(mapped_second, ring, 40)
            assert agent.metric("treadle_engram_ring_rows_total") > 0
            if hot_bytes != "0":
                assert agent.metric("treadle_engram_hot_rows_hits_total") > 0


def wait_served(handle: EngramHandle) -> None:
    """The agent hears of a version a moment after its pool has it."""
    until = time.monotonic() + SERVED_SECONDS_MAX
    while True:
        try:
            handle.gather(handle.layers[0], np.zeros((1, 1), np.int64))
            return
        except NotFound:
            assert time.monotonic() < until, "the agent does not serve the version"
            time.sleep(0.02)
