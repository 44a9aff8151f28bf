"""One model over several owners, asked by one handle: owners are killed, join and leave, and no request fails."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from engram_pool.commands import app
from treadle.client.engram import EngramHandle
from treadle.client.engram.pool_types import OwnerShare
from treadle.contract import Deadline, EngramModel, TreadleError, Unavailable, Windows
from treadle.contract.placement import Spread
from treadle.dataplane import IMPLEMENTATION
from treadle.kernels import HashPlan, reference

if TYPE_CHECKING:
    from tests.conftest import Process, StartPool

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="spread tables need the native data plane: build libs/dataplane")
Until = Callable[[Callable[[], bool], str], None]
NAMES = ("a", "b", "c")


@dataclass
class Owners:
    """Up to three pools that know each other, started by name."""

    start: Callable[[str], Any]
    stack: ExitStack
    ports: dict[str, int]
    up: dict[str, Process] = field(default_factory=dict)

    def begin(self, name: str) -> Process:
        self.up[name] = self.stack.enter_context(self.start(name))
        return self.up[name]

    def load(self, name: str, model: EngramModel, token_map: NDArray[np.int32], spread: Spread | None) -> None:
        share = None if spread is None else OwnerShare(name, spread)
        self.up[name].fabric.engram.load_random(model, token_map, seed=5, placement=share)

    def see(self, *names: str) -> bool:
        """Each of those that run hears of these holding something."""
        with suppress(Unavailable):  # one that has just started
            return all(
                {owner.name for owner in pool.fabric.engram.owners().owners if owner.reachable and owner.holdings} == set(names)
                for pool in self.up.values()
                if pool.child.poll() is None
            )
        return False


@pytest.fixture
def owners(start_pool: StartPool, shm_folder: Path, free_port: Callable[[], int]) -> Iterator[Owners]:
    ports = {name: free_port() for name in NAMES}
    listed = ",".join(f"{name}=127.0.0.1:{port}" for name, port in ports.items())

    def start(name: str) -> Any:
        flags = ("--listen", f"127.0.0.1:{ports[name]}", "--owner", name, "--owners", listed, "--reap-interval-seconds", "0.1")
        return start_pool(shm_folder / name, *flags)

    with ExitStack() as stack:
        yield Owners(start, stack, ports)


@pytest.fixture
def windows(demo: EngramModel) -> Windows:
    chance = np.random.default_rng(3)
    return Windows(
        tokens=chance.integers(0, 500, 12), starts=np.array([0, 12], dtype=np.int32),
        lookback=chance.integers(0, 500, (1, demo.order_max - 1)),
    )  # fmt: skip


def truth(process: Process, model: EngramModel) -> dict[int, NDArray[np.uint8]]:
    """All rows of a version, from a pool that has all of them."""
    with process.fabric.engram.open(model.name, transport="mapped") as whole:
        ids = {layer: np.arange(whole.model.table(layer).rows, dtype=np.int64)[:, None] for layer in model.layers}
        return {layer: whole.gather(layer, ids[layer])[:, 0] for layer in model.layers}


@dataclass
class Load:
    """Asks without a pause and compares every row."""

    handle: EngramHandle
    tables: dict[int, NDArray[np.uint8]]
    gathers: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        chance = np.random.default_rng(1)
        while not self.over.is_set():
            layer = int(chance.choice(self.handle.layers))
            ids = chance.integers(0, len(self.tables[layer]), (4, 8))
            begun = time.monotonic()
            try:
                rows = self.handle.gather(layer, ids)
                if not np.array_equal(rows, self.tables[layer][ids]):
                    self.failures.append(f"wrong rows of layer {layer}")
            except TreadleError as error:
                self.failures.append(repr(error))
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - begun)
            self.gathers += 1


@contextmanager
def under_load(handle: EngramHandle, tables: dict[int, NDArray[np.uint8]]) -> Iterator[Load]:
    load = Load(handle, tables)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield load
    finally:
        load.over.set()
        thread.join(30)
    assert load.failures == []
    assert load.gathers > 0


def more(load: Load, until: Until, count: int = 50) -> None:
    before = load.gathers
    until(lambda: load.gathers > before + count, "the load goes on")


def asked(handle: EngramHandle) -> dict[str, bool]:
    """Owner -> it is the first to be asked for some rows."""
    return {replica.name: replica.asked_for > 0 for replica in handle.replicas}


def test_a_handle_on_one_owner_asks_all_and_a_killed_one_is_missed_by_nobody(
    owners: Owners,
    demo: EngramModel,
    token_map: NDArray[np.int32],
    windows: Windows,
    until: Until,
    start_pool: StartPool,
    shm_folder: Path,
) -> None:
    spread = Spread(NAMES, 2, 1024)
    for name in NAMES:
        owners.begin(name)
        owners.load(name, demo, token_map, spread)
    until(lambda: owners.see(*NAMES), "all see all")
    with start_pool(shm_folder / "whole") as whole:
        loaded = whole.fabric.engram.load_random(demo, token_map, seed=5)
        tables = truth(whole, demo)
    with owners.up["a"].fabric.engram.open("demo") as handle:
        assert (str(handle.transport), handle.version) == ("socket", loaded.version)
        assert asked(handle) == dict.fromkeys(NAMES, True)
        assert all(replica.held and replica.reachable for replica in handle.replicas)
        assert sum(replica.asked_for for replica in handle.replicas) == sum(map(len, tables.values()))
        plans = {layer: HashPlan.from_model(demo, layer, token_map) for layer in demo.layers}
        ids = {layer: reference.row_ids(plan, windows) for layer, plan in plans.items()}
        for layer, rows in handle.lookup(windows).items():
            assert np.array_equal(rows, tables[layer][ids[layer]])
        ticket = handle.prefetch(windows, {layer: Deadline.after(5) for layer in handle.layers})
        assert all(np.array_equal(rows.rows, tables[layer][ids[layer]]) for layer, rows in ticket.wait().items())
        with under_load(handle, tables) as load:
            more(load, until)
            owners.up["b"].kill()
            until(lambda: any(not replica.reachable for replica in handle.replicas), "the handle hears that b is away")
            more(load, until)
            owners.begin("b")
            until(lambda: owners.see(*NAMES), "b is back")
            until(lambda: all(replica.reachable and replica.held for replica in handle.replicas), "it is asked and held again")
            more(load, until)
            owners.up["c"].kill()  # what b could not bear alone
            more(load, until)
        assert load.slowest_seconds < 4


def test_an_owner_joins_and_another_leaves_under_load_and_no_request_is_lost(
    owners: Owners, demo: EngramModel, token_map: NDArray[np.int32], until: Until
) -> None:
    for name in ("a", "b"):
        owners.begin(name)
        owners.load(name, demo, token_map, None)
    until(lambda: owners.see("a", "b"), "the two see each other")
    tables = truth(owners.up["a"], demo)
    with owners.up["b"].fabric.engram.open("demo", transport="socket") as handle, under_load(handle, tables) as load:
        assert asked(handle) == {"a": True, "b": True}
        joined = owners.begin("c")
        words = ["load", "demo", "--owners", "a,b,c", "--owner", "c", "--replicas", "2", "--pool", joined.address]
        peers = [word for name in ("a", "b") for word in ("--peer", owners.up[name].address)]
        run = CliRunner().invoke(app, [*words, *peers])
        assert run.exit_code == 0, run.output
        until(lambda: asked(handle) == {"a": True, "b": True, "c": True}, "c takes its part")
        more(load, until)
        owners.up["b"].child.send_signal(signal.SIGTERM)  # the very pool that told the handle of all others
        until(lambda: asked(handle) == {"a": True, "c": True}, "nobody asks b any more")
        assert owners.up["b"].child.wait(20) == 0
        more(load, until)
        (c,) = [replica for replica in handle.replicas if replica.name == "c"]
        assert 0 < c.rows < sum(map(len, tables.values()))  # it holds its share, not all


def test_rows_that_nobody_holds_fail_the_open_and_are_named(
    owners: Owners, demo: EngramModel, token_map: NDArray[np.int32], until: Until
) -> None:
    spread = Spread(("a", "b", "c"), 1, 1024)
    for name in ("a", "b"):
        owners.begin(name)
        owners.load(name, demo, token_map, spread)
    until(lambda: owners.see("a", "b"), "the two see each other")
    with pytest.raises(Unavailable, match=r"nobody holds layer \d rows \d+ to \d+"):
        owners.up["a"].fabric.engram.open("demo", transport="socket")


def test_an_owner_that_just_started_does_not_make_a_handle_forget_the_others(
    owners: Owners, demo: EngramModel, token_map: NDArray[np.int32], until: Until
) -> None:
    """The pool that a handle watches restarts: at first it has heard of nobody."""
    for name in ("a", "b"):
        owners.begin(name)
        owners.load(name, demo, token_map, None)
    until(lambda: owners.see("a", "b"), "the two see each other")
    tables = truth(owners.up["b"], demo)
    with owners.up["a"].fabric.engram.open("demo", transport="socket") as handle, under_load(handle, tables) as load:
        for _ in range(3):
            owners.up["a"].kill()
            owners.begin("a")
            until(lambda: owners.see("a", "b"), "a is back")
            until(lambda: all(replica.reachable and replica.held for replica in handle.replicas), "both are asked")
            assert {replica.name for replica in handle.replicas} == {"a", "b"}
            more(load, until, 10)


def test_a_replaced_version_stays_at_every_owner_while_a_handle_reads_it(
    owners: Owners, demo: EngramModel, token_map: NDArray[np.int32], until: Until
) -> None:
    for name in ("a", "b"):
        owners.begin(name)
        owners.load(name, demo, token_map, None)
    until(lambda: owners.see("a", "b"), "the two see each other")
    tables = truth(owners.up["a"], demo)
    with owners.up["a"].fabric.engram.open("demo", transport="socket") as handle, under_load(handle, tables) as load:
        for name in ("a", "b"):
            owners.up[name].fabric.engram.load_random(demo, token_map, seed=6)
        time.sleep(0.5)  # several rounds of the reaper
        more(load, until)
        assert {model.version for model in owners.up["b"].fabric.engram.list_models()} > {handle.version}
    until(lambda: all(len(owners.up[name].fabric.engram.list_models()) == 1 for name in ("a", "b")), "it goes with its last reader")
