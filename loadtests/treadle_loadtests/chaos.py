"""Whoever is killed half way, no row is wrong and no request fails where a replica lives: kill -9 of owners, pools, clients, loaders.

Three owners hold a model twice over between them, for clients that ask by socket; a fourth pool holds all of it, for a client that
maps. Blows come one at a time, as two replicas bear one loss; in between versions are swapped.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from treadle.client import Fabric
from treadle.client.engram.pool_types import OwnerShare
from treadle.contract import NotFound, TreadleError
from treadle.contract.placement import Spread
from treadle_bench.report import Goal
from treadle_loadtests.counters import version_head
from treadle_loadtests.report import Report
from treadle_loadtests.rows import MODEL, Truth, seeds_of, template, token_map
from treadle_loadtests.stage import ScenarioFailed, Stage

OWNERS, WHOLE = ("a", "b", "c"), "whole"
REPLICAS = 2
VERSIONS = 3
HALF_LOADED, HALF_LOADED_PRIME_BASE = "half-loaded", 60_000  # a load of about 120 MB: long enough to be cut short
KILLS_GOAL = 100
OPEN_SECONDS_GOAL, LOOKUP_SECONDS_GOAL = 1.0, 2.0
REST_SECONDS = 0.002  # between two steps of a client: a start is measured, not how busy the machine can be made
BACK_SECONDS = 30.0  # within which everything must be as before a blow
LOADER = (
    "import sys;"
    "from treadle.client import Fabric;"
    "from treadle_loadtests.chaos import half_loaded;"
    "half_loaded(Fabric(engram=sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much. swap_every: blows between two swaps; socket_clients: beside one that maps."""

    kills: int = KILLS_GOAL
    seconds: float = 600.0
    tokens: int = 4
    prime_base: int = 3_000
    swap_every: int = 10
    socket_clients: int = 2
    seed: int = 0


def run(plan: Plan) -> Report:
    """Strike until the kills are done, or the time is over."""
    stage = Stage(plan.prime_base, tuple(seeds_of(VERSIONS)))
    report = Report("chaos", {"kills": plan.kills, "owners": len(OWNERS), "replicas": REPLICAS, "tokens": plan.tokens})
    blows = Blows(stage, plan, report)
    try:
        pools = [*(stage.pool_spec(name, OWNERS) for name in OWNERS), stage.pool_spec(WHOLE, (WHOLE,))]
        everywhere = "ipv4:" + ",".join(stage.pools[name] for name in OWNERS)
        clients = [stage.client_spec(0, stage.pools[WHOLE], "mapped", plan.tokens, REST_SECONDS)]
        clients += [
            stage.client_spec(number, everywhere, "socket", plan.tokens, REST_SECONDS)
            for number in range(1, plan.socket_clients + 1)
        ]
        stage.play(pools, lambda: blows.swap(1), clients, blows.run)
        _judge(stage, plan, report, blows)
        return report
    finally:
        stage.clear()


@dataclass(slots=True)
class Blows:
    """One after another; each waits until all is well again."""

    stage: Stage
    plan: Plan
    report: Report
    struck: Counter[str] = field(default_factory=Counter)
    swaps: int = 0
    seed: int = 0

    def run(self) -> None:
        """Strike everybody in turn, in an order drawn from the seed."""
        chance, until = random.Random(self.plan.seed), time.monotonic() + self.plan.seconds
        self._all_well()
        targets: list[Callable[[random.Random], None]] = []
        while self.struck.total() < self.plan.kills and time.monotonic() < until:
            if not targets:
                targets = [self._owner, self._owner, self._owner, self._whole, self._client, self._loader, self._loading_owner]
                chance.shuffle(targets)
            targets.pop()(chance)
            self._all_well()
            if self.struck.total() >= (self.swaps + 1) * self.plan.swap_every:
                self.swap(self.seed % VERSIONS + 1)
                self.swaps += 1
                self._all_well()

    def swap(self, seed: int) -> None:
        """The version of `seed` becomes current everywhere; each owner loads its share."""
        for name in (*OWNERS, WHOLE):
            self._load(name, seed)
        self.seed = seed

    # -- who is struck ----------------------------------------------------------------------------------------------------------

    def _owner(self, chance: random.Random) -> None:
        self._kill_pool(chance.choice(OWNERS), "owner")

    def _whole(self, chance: random.Random) -> None:
        self._kill_pool(WHOLE, "pool")

    def _client(self, chance: random.Random) -> None:
        name = chance.choice(sorted(self.stage.clients))
        starts = self.stage.clients[name].read()["starts"]
        self._strike(name, "client")
        self.stage.wait(lambda: self.stage.clients[name].read()["starts"] > starts, f"{name} starts again", BACK_SECONDS)

    def _loader(self, chance: random.Random) -> None:
        """The process that asks for a load goes half way through; nothing of the load stays."""
        loader = subprocess.Popen([sys.executable, "-c", LOADER, self.stage.pools[WHOLE]], stderr=subprocess.DEVNULL)
        try:
            self.stage.wait(self._is_loading, "a load is in progress", BACK_SECONDS)
            time.sleep(chance.uniform(0.0, 0.1))
            loader.send_signal(signal.SIGKILL)
            self.struck["loader"] += 1
        finally:
            loader.kill()
            loader.wait()
        self.stage.wait(lambda: not self._staged(), "nothing of the load is left", BACK_SECONDS)
        self._forget_half_loaded()

    def _loading_owner(self, chance: random.Random) -> None:
        """An owner goes half way through a load; the next start sweeps what it had written."""
        thread = threading.Thread(target=self._load_and_fail, name="load")
        thread.start()
        self.stage.wait(self._is_loading, "a load is in progress", BACK_SECONDS)
        self._kill_pool(WHOLE, "pool while it loads")
        thread.join(BACK_SECONDS)
        self.stage.wait(lambda: not self._staged(), "nothing of the load is left", BACK_SECONDS)
        self._forget_half_loaded()

    # -- how --------------------------------------------------------------------------------------------------------------------

    def _kill_pool(self, name: str, kind: str) -> None:
        """Kill it; measure when it can be opened again, and how long lookups stood still meanwhile."""
        remote = [counters for client, counters in self.stage.clients.items() if client.endswith("socket")]
        for counters in remote:
            counters.reset("slowest_call_us")
        begun = time.monotonic()  # whoever asks waits from the blow on, not from when its death is noticed
        self._strike(name, kind)
        if name in OWNERS:
            others = "ipv4:" + ",".join(self.stage.pools[owner] for owner in OWNERS)
            self.stage.wait(lambda: self._opens(others, "socket"), "an open at any owner", BACK_SECONDS)
            self.report.times.setdefault("open at the owners", []).append(time.monotonic() - begun)
        self.stage.wait(lambda: self.stage.ready(name), f"{name} is ready", BACK_SECONDS)
        self.report.times.setdefault("killed pool ready again", []).append(time.monotonic() - begun)
        self.stage.wait(lambda: self._opens(self.stage.pools[name], "rpc"), f"an open at {name}", BACK_SECONDS)
        self.report.times.setdefault("open at the killed pool", []).append(time.monotonic() - begun)
        if name in OWNERS:
            self._all_well()
            slowest = max((counters.read()["slowest_call_us"] for counters in remote), default=0) / 1e6
            self.report.times.setdefault("slowest lookup of a kill", []).append(slowest)

    def _strike(self, name: str, kind: str) -> None:
        self.stage.kill(name)
        self.struck[kind] += 1
        self.stage.wait(lambda: not self.stage.ready(name), f"{name} is dead", BACK_SECONDS)

    def _opens(self, address: str, transport: str) -> bool:
        try:
            with Fabric(engram=address, timeout_seconds=0.5) as fabric:
                fabric.engram.open(MODEL, transport=transport).close()
        except TreadleError:
            return False
        return True

    def _all_well(self) -> None:
        """Every process serves, owners hear of each other, clients are on the current version and get rows."""
        stage, head = self.stage, version_head(Truth(self.seed, self.stage.prime_base).version)
        for name in stage.pools:
            stage.wait(partial(self._serves, name), f"{name} serves and hears of all others", BACK_SECONDS)
        before = {name: counters.read()["gathers"] for name, counters in stage.clients.items()}

        def behind() -> list[str]:
            now = {name: counters.read() for name, counters in stage.clients.items()}
            return [name for name in now if now[name]["gathers"] <= before[name] or now[name]["version_head"] != head]

        try:
            stage.wait(lambda: not behind(), "every client gets rows of the current version", BACK_SECONDS)
        except ScenarioFailed as error:
            raise ScenarioFailed(f"{error}; not so: {behind()}; {stage.reasons()[-3:]}") from error

    def _serves(self, name: str) -> bool:
        wanted = set(OWNERS) if name in OWNERS else {WHOLE}

        def look(fabric: Fabric) -> None:
            up = {owner.name for owner in fabric.engram.owners().owners if owner.reachable and owner.holdings}
            if up != wanted:
                raise NotFound(f"{name} sees {up}")

        return self.stage.ready(name) and self.stage.answers(name, look)

    # -- loads --------------------------------------------------------------------------------------------------------------------

    def _load(self, name: str, seed: int) -> None:
        share = OwnerShare(name, Spread(OWNERS, REPLICAS, 1024)) if name in OWNERS else None
        with Fabric(engram=self.stage.pools[name]) as fabric:
            fabric.engram.load_random(template(self.stage.prime_base), token_map(), seed=seed, placement=share)

    def _load_and_fail(self) -> None:
        with suppress(TreadleError), Fabric(engram=self.stage.pools[WHOLE]) as fabric:
            half_loaded(fabric)

    def _staged(self) -> list[str]:
        """What loads in progress have written."""
        return [str(path) for path in (self.stage.folder / WHOLE).glob(".loading-*")]

    def _is_loading(self) -> bool:
        return bool(self._staged())

    def _forget_half_loaded(self) -> None:
        """A blow may have come too late, behind the end of the load."""
        with suppress(NotFound), Fabric(engram=self.stage.pools[WHOLE]) as fabric:
            fabric.engram.remove(HALF_LOADED)


def half_loaded(fabric: Fabric) -> None:
    """Begin a load that takes a while."""
    fabric.engram.load_random(replace(template(HALF_LOADED_PRIME_BASE), name=HALF_LOADED), token_map(), seed=9)


def _judge(stage: Stage, plan: Plan, report: Report, blows: Blows) -> None:
    seen = stage.seen()
    report.counts |= {f"kills_of_{kind.replace(' ', '_')}": count for kind, count in sorted(blows.struck.items())}
    report.counts |= {"kills": blows.struck.total(), "swaps": blows.swaps}
    report.counts |= {"checked_gathers": seen["gathers"], "checked_rows": seen["rows"]}
    report.counts |= {f"gathers_{transport}": stage.seen(transport)["gathers"] for transport in ("mapped", "socket")}
    report.counts |= {name: seen[name] for name in ("wrong_rows", "failed", "late", "open_failed")}
    report.reasons = stage.reasons()
    died = sum(name in stage.clients for name in stage.restarts) - blows.struck["client"]

    def longest(name: str) -> float:
        return max(report.times.get(name, []), default=float("inf"))

    report.goals += [
        Goal("kills", blows.struck.total(), plan.kills, at_least=True),
        Goal("wrong rows", seen["wrong_rows"], 0),
        Goal("failed requests", seen["failed"] + seen["open_failed"], 0),
        Goal("clients that died by themselves", died, 0),
        Goal("longest time to an open at the owners, s", longest("open at the owners"), OPEN_SECONDS_GOAL),
        Goal("longest time to an open at the killed pool, s", longest("open at the killed pool"), OPEN_SECONDS_GOAL),
        Goal("slowest remote lookup over a kill, s", longest("slowest lookup of a kill"), LOOKUP_SECONDS_GOAL),
    ]
