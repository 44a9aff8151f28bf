"""Versions of a dictionary are published, promoted and deleted under load: no lookup fails, and a request keeps its version."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from treadle.cli.supervisor import ServiceSpec
from treadle.client import Fabric
from treadle_bench.report import Goal
from treadle_loadtests.counters import Counters, version_head
from treadle_loadtests.dictionaries import HEAD_DIM, HEADS, LAYERS, NAME, Truth, entries_of_bytes
from treadle_loadtests.prefix_reading import MappedVersion, Task
from treadle_loadtests.report import Report
from treadle_loadtests.stage import POOL_READY_SECONDS, STOP_SECONDS, Stage, child_environment, free_port

SEEDS = (1, 2, 3)
STORE = "asm-store"
FOLLOW_SECONDS_MAX = 10.0  # how long readers may take to go over to a new version
MAP_SECONDS_GOAL = 0.05  # of 100 MB: nothing is read, so that other sizes take no longer
LOOKUPS_GOAL = 200_000
CALL_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, and at least how many swaps. transports: one client each; pause_seconds: between two swaps."""

    seconds: float = 180.0
    lookups: int = LOOKUPS_GOAL
    swaps: int = 20
    version_bytes: int = 100 << 20
    transports: Sequence[str] = ("mapped", "mapped", "rpc")
    tokens: int = 4
    steps: int = 8
    pause_seconds: float = 1.0


def run(plan: Plan) -> Report:
    """Swap until enough lookups were compared, or the time is over."""
    stage = Stage()
    report = Report("prefix-swap", {"seconds": plan.seconds, "version_bytes": plan.version_bytes, "versions": len(SEEDS)})
    try:
        swapping = _Swapping(stage, plan, report)
        spec, clients = swapping.store_spec(), swapping.client_specs()
        stage.play([spec], swapping.prepare, clients, swapping.run)
        _judge(stage, plan, report)
        return report
    finally:
        stage.clear()


class _Swapping:
    """One run: the folders, the store, and what is done to it."""

    def __init__(self, stage: Stage, plan: Plan, report: Report) -> None:
        self._stage, self._plan, self._report = stage, plan, report
        self._address = f"127.0.0.1:{free_port()}"
        self._entries = entries_of_bytes(plan.version_bytes)
        self._folders = {seed: stage.folder / f"built-{seed}" for seed in SEEDS}
        self._versions = {seed: Truth(seed, self._entries).write(folder).version for seed, folder in self._folders.items()}

    def store_spec(self) -> ServiceSpec:
        """The store, on a port of its own."""
        argv = (sys.executable, "-m", "asm_store", "--data-dir", str(self._stage.folder / "kept"), "--log-level", "warning")
        return ServiceSpec(
            STORE, argv, listen=self._address, metrics="127.0.0.1:0", ready_seconds=POOL_READY_SECONDS, drain_seconds=STOP_SECONDS,
            environment=child_environment(),
        )  # fmt: skip

    def client_specs(self) -> list[ServiceSpec]:
        """Readers, of each transport as many as the plan names."""
        specs = []
        for number, transport in enumerate(self._plan.transports):
            name = f"client-{number}-{transport}"
            self._stage.clients[name] = Counters(self._stage.folder / f"{name}.counters")
            seeds = {version: seed for seed, version in self._versions.items()}
            task = Task(
                self._address, transport, seeds, self._entries, self._plan.tokens, self._plan.steps, number,
                str(self._stage.clients[name].path),
            )  # fmt: skip
            argv = (sys.executable, "-m", "treadle_loadtests.prefix_reading", task.to_json())
            specs.append(ServiceSpec(
                name, argv, ready_seconds=POOL_READY_SECONDS, drain_seconds=STOP_SECONDS, given_up=False, environment=child_environment(),
            ))  # fmt: skip
        return specs

    def prepare(self) -> None:
        """The first version."""
        self._publish(SEEDS[0])

    def run(self) -> None:
        """Publish the next, promote it, wait until it is used, delete the one before; again."""
        plan, stage, swaps = self._plan, self._stage, 0
        until = time.monotonic() + plan.seconds
        while time.monotonic() < until and (stage.seen()["gathers"] < plan.lookups or swaps < plan.swaps):
            before, seed = SEEDS[swaps % len(SEEDS)], SEEDS[(swaps + 1) % len(SEEDS)]
            swaps += 1
            self._publish(seed)
            with Fabric(asm=self._address, timeout_seconds=CALL_SECONDS_MAX) as fabric:
                with self._timed("open and map"):
                    old = MappedVersion(fabric.asm.open(NAME))
                with self._timed("promote"):
                    fabric.asm.promote(f"{NAME}@{self._versions[seed]}", self._versions[before])
                with self._timed("all readers on the new version"):
                    self._wait_for_followers(seed)
                self._wait_for_remote_readers(before)
                deleted = fabric.asm.delete(f"{NAME}@{self._versions[before]}")
                self._count("wrong_after_delete", self._wrong(old, before))
                old.close()
            self._count("files_deleted", len(deleted.files))
            self._count("files_deleted_while_read", sum(not file.freed for file in deleted.files))
            stage.pause(plan.pause_seconds)
        self._count("swaps", swaps)

    def _publish(self, seed: int) -> None:
        with Fabric(asm=self._address, timeout_seconds=CALL_SECONDS_MAX) as fabric:
            first = not fabric.asm.list(NAME)
            with self._timed("publish"):
                fabric.asm.publish(self._folders[seed], promote=first)

    def _wrong(self, version: MappedVersion, seed: int) -> int:
        """How many entries of a version that is deleted by now are not as they were."""
        truth, entries = Truth(seed, self._entries), np.arange(0, self._entries, max(1, self._entries // 64))
        found = [(layer, version.lookup(layer, truth.keys(layer, entries).reshape(-1, HEADS, HEAD_DIM))) for layer in range(LAYERS)]
        return sum(truth.wrong(layer, entries, states, log_z) for layer, (states, log_z) in found)

    def _wait_for_followers(self, seed: int) -> None:
        """Until every reader has begun a request on the version."""
        head = version_head(self._versions[seed])
        self._stage.wait(
            lambda: all(counters.read()["version_head"] == head for counters in self._stage.clients.values()),
            "every reader uses the new version", FOLLOW_SECONDS_MAX,
        )  # fmt: skip

    def _wait_for_remote_readers(self, seed: int) -> None:
        """Until no request is in progress that asks the store for the version: a delete takes it from them, and not from who maps it."""
        head = version_head(self._versions[seed])
        remote = [counters for name, counters in self._stage.clients.items() if name.endswith("rpc")]
        self._stage.wait(
            lambda: all(counters.read()["oldest_head"] != head for counters in remote),
            "no request asks for the old version", FOLLOW_SECONDS_MAX,
        )  # fmt: skip

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._report.times.setdefault(what, []).append(time.monotonic() - begun)

    def _count(self, what: str, count: int) -> None:
        self._report.counts[what] = self._report.counts.get(what, 0) + count


def _judge(stage: Stage, plan: Plan, report: Report) -> None:
    seen = stage.seen()
    report.counts |= {"checked_lookups": seen["gathers"], "checked_states": seen["rows"], "opens": seen["opens"]}
    report.counts |= {f"lookups_{transport}": stage.seen(transport)["gathers"] for transport in dict.fromkeys(plan.transports)}
    report.counts |= {"wrong_states": seen["wrong_rows"], "failed": seen["failed"], "open_failed": seen["open_failed"]}
    report.times["slowest lookup of a reader"] = [counters.read()["slowest_call_us"] / 1e6 for counters in stage.clients.values()]
    report.times["slowest open of a reader"] = [counters.read()["slowest_open_us"] / 1e6 for counters in stage.clients.values()]
    report.reasons = stage.reasons()
    report.goals += [
        Goal("lookups compared state by state", seen["gathers"], plan.lookups, at_least=True),
        Goal("states of another version, or wrong", seen["wrong_rows"] + report.counts["wrong_after_delete"], 0),
        Goal("failed lookups", seen["failed"] + seen["open_failed"], 0),
        Goal("open and map, median seconds", statistics.median(report.times["open and map"]), MAP_SECONDS_GOAL),
        Goal("versions swapped", report.counts["swaps"], plan.swaps, at_least=True),
        Goal("readers that died", len([name for name in stage.restarts if name in stage.clients]), 0),
    ]
