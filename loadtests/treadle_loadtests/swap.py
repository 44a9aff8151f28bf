"""Versions are swapped under load: every row is right, no request fails, nobody keeps an old version for long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.client import Fabric
from treadle_bench.report import Goal
from treadle_loadtests.counters import version_head
from treadle_loadtests.report import Report
from treadle_loadtests.rows import Truth, seeds_of, template, token_map
from treadle_loadtests.stage import ScenarioFailed, Stage

VERSIONS = 3
OWNERS = ("a", "b", "c")
GATHERS_GOAL = 1_000_000
FOLLOW_SECONDS_MAX = 10.0  # how long clients may take to go over to a new version


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, and at least how many swaps. transports: one client each; pause_seconds: between two swaps."""

    seconds: float = 240.0
    gathers: int = GATHERS_GOAL
    swaps: int = 20
    transports: Sequence[str] = ("mapped", "socket", "rpc")
    tokens: int = 4
    prime_base: int = 3_000
    pause_seconds: float = 1.0


def run(plan: Plan) -> Report:
    """Swap until enough gathers were compared, or the time is over."""
    stage = Stage(plan.prime_base, tuple(seeds_of(VERSIONS)))
    report = Report("swap", {"seconds": plan.seconds, "tokens": plan.tokens, "owners": len(OWNERS), "versions": VERSIONS})
    try:
        pools = [stage.pool_spec(name, OWNERS) for name in OWNERS]
        everywhere = "ipv4:" + ",".join(stage.pools[name] for name in OWNERS)
        clients = [
            stage.client_spec(number, stage.pools["a"] if transport == "mapped" else everywhere, transport, plan.tokens)
            for number, transport in enumerate(plan.transports)
        ]
        swaps = report.times.setdefault("swap at all owners", [])
        stage.play(pools, lambda: load_everywhere(stage, OWNERS, 1), clients, lambda: _swap(stage, plan, swaps))
        _judge(stage, plan, report)
        return report
    finally:
        stage.clear()


def load_everywhere(stage: Stage, owners: Sequence[str], seed: int) -> None:
    """Make the version of `seed` current at every owner."""
    for owner in owners:
        with Fabric(engram=stage.pools[owner]) as fabric:
            fabric.engram.load_random(template(stage.prime_base), token_map(), seed=seed)


def _swap(stage: Stage, plan: Plan, took: list[float]) -> None:
    heads = {seed: version_head(Truth(seed, stage.prime_base).version) for seed in stage.seeds}
    until, number = time.monotonic() + plan.seconds, 1
    while time.monotonic() < until and (stage.seen()["gathers"] < plan.gathers or number <= plan.swaps):
        number += 1
        begun, seed = time.monotonic(), stage.seeds[(number - 1) % len(stage.seeds)]
        load_everywhere(stage, OWNERS, seed)
        took.append(time.monotonic() - begun)
        _wait_for_followers(stage, heads[seed])
        stage.pause(plan.pause_seconds)


def _wait_for_followers(stage: Stage, head: int) -> None:
    def left_behind() -> list[str]:
        return [name for name, counters in stage.clients.items() if counters.read()["version_head"] != head]

    try:
        stage.wait(lambda: not left_behind(), "every client uses the new version", FOLLOW_SECONDS_MAX)
    except ScenarioFailed as error:
        raise ScenarioFailed(f"{error}; left behind: {', '.join(left_behind())}; {stage.reasons()[:3]}") from error


def _judge(stage: Stage, plan: Plan, report: Report) -> None:
    seen = stage.seen()
    report.counts |= {
        "checked_gathers": seen["gathers"],
        "checked_rows": seen["rows"],
        "swaps": len(report.times["swap at all owners"]),
    }
    report.counts |= {f"gathers_{transport}": stage.seen(transport)["gathers"] for transport in plan.transports}
    report.counts |= {name: seen[name] for name in ("wrong_rows", "failed", "late", "open_failed")}
    report.times["slowest call of a client"] = [counters.read()["slowest_call_us"] / 1e6 for counters in stage.clients.values()]
    report.reasons = stage.reasons()
    report.goals += [
        Goal("gathers compared row by row", seen["gathers"], plan.gathers, at_least=True),
        Goal("wrong rows", seen["wrong_rows"], 0),
        Goal("failed requests", seen["failed"] + seen["open_failed"], 0),
        Goal("versions swapped", report.counts["swaps"], plan.swaps, at_least=True),
        Goal("clients that died", len([name for name in stage.restarts if name in stage.clients]), 0),
    ]
