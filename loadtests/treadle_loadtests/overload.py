"""Three times what the workers can do: how much still comes out, and how long do those wait who are let in?"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treadle_bench.report import Goal
from treadle_loadtests.calls import CHAT, MODEL, HttpCaller, chat_body
from treadle_loadtests.pacing import at_rate, bar, no_collection
from treadle_loadtests.report import Report
from treadle_loadtests.services import Running, Services, cores_apart, on_cores

GOODPUT_GOAL, FIRST_TOKEN_GOAL = 0.9, 1.3
WAIT_SECONDS_MIN = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """What the workers can do, and how long is looked. The first `settle_seconds` of a load do not count: the line fills.

    loads: of what the workers' slots could do at best, where the peak is looked for
    """

    workers: int = 2
    slots: int = 8
    tokens: int = 16
    tokens_per_second: float = 40.0
    prefill_seconds_per_token: float = 0.0004
    seconds: float = 20.0
    settle_seconds: float = 3.0
    loads: Sequence[float] = (0.8, 0.9, 1.0, 1.1, 1.25)
    model: str = MODEL

    @property
    def best_rate(self) -> float:
        """Answers a second if every slot were always busy with tokens."""
        return self.workers * self.slots * self.tokens_per_second / self.tokens


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one load. goodput: whole answers a second; first: seconds to the first token of each."""

    rate: float
    goodput: float
    first: Sequence[float]
    refused: int
    failed: int

    @property
    def first_p99(self) -> float:
        """Seconds; infinite where nobody was answered."""
        return float(np.percentile(self.first, 99)) if self.first else float("inf")


def run(plan: Plan) -> Report:
    """The peak, four fifths of it, three times it: with a wait set by what was seen, and with the gateway's own."""
    report = Report("overload", {"workers": plan.workers, "slots": plan.slots, "best_rate": plan.best_rate})
    asyncio.run(_play(plan, report))
    return report


async def _play(plan: Plan, report: Report) -> None:
    mine, rest, report.caveat = cores_apart()
    flags = {
        "slots": plan.slots, "tokens_per_second": plan.tokens_per_second, "prefill_seconds_per_token": plan.prefill_seconds_per_token,
        "model": plan.model, "served_model_name": MODEL, "log_level": "warning",
    }  # fmt: skip
    with on_cores(rest):
        async with Services() as services:
            stubs = [await services.stub(f"worker-{number}", rest, flags) for number in range(plan.workers)]
            gateway = await _gateway(services, stubs, mine, _waits(0.5))
            loads = [await _load(plan, gateway, plan.best_rate * load, report) for load in plan.loads]
            peak = max(loads, key=lambda load: load.goodput)
            calm = await _load(plan, gateway, 0.8 * peak.goodput, report)
            await services.stop("gateway")
            # What an operator does with such figures: nobody is to wait longer than the slowest do on a good day.
            wait = max(WAIT_SECONDS_MIN, calm.first_p99 - float(np.median(calm.first)))
            gateway = await _gateway(services, stubs, mine, _waits(wait))
            flood = await _load(plan, gateway, 3 * peak.goodput, report)
            await services.stop("gateway")
            gateway = await _gateway(services, stubs, mine, {})
            untuned = await _load(plan, gateway, 3 * peak.goodput, report, "defaults")
    report.notes.append(f"queue_wait_seconds_max: {wait:.3f}, the p99 less the median of the time to a first token at 80 %")
    report.times |= {"first token, 80 %": list(calm.first), "first token, 3x": list(flood.first)}
    report.times["first token, 3x, defaults"] = list(untuned.first)
    report.counts |= {"refused, 80 %": calm.refused, "refused, 3x": flood.refused, "answered, 3x": len(flood.first)}
    report.counts |= {"refused, 3x, defaults": untuned.refused, "answered, 3x, defaults": len(untuned.first)}
    report.goals += [
        *_goals(flood, peak, calm, ""),
        *_goals(untuned, peak, calm, ", gateway's defaults"),
        Goal("neither answered nor told to come back", sum(load.failed for load in (*loads, calm, flood, untuned)), 0),
    ]


def _goals(flood: Load, peak: Load, calm: Load, how: str) -> list[Goal]:
    return [
        Goal(f"goodput at 3x / peak{how}", flood.goodput / peak.goodput, GOODPUT_GOAL, at_least=True),
        Goal(f"p99 of the time to a first token at 3x / at 80 %{how}", flood.first_p99 / calm.first_p99, FIRST_TOKEN_GOAL),
    ]


def _waits(seconds: float) -> dict[str, object]:
    """Settings of a gateway that lets nobody wait longer, and gives workers no more than they have places for."""
    return {"queue_wait_seconds_max": f"{seconds:.4f}", "queue_headroom": 0}


async def _gateway(services: Services, stubs: Sequence[Running], cores: frozenset[int], waits: Mapping[str, object]) -> Running:
    """A gateway that takes every connection. waits: its settings of the line before the workers; empty: its own."""
    flags: dict[str, object] = {"calls_max": 4096, "connections_max": os.sysconf("SC_OPEN_MAX") // 2}
    flags |= {"routing": "least-loaded", "worker_poll_seconds": 0.2}
    return await services.gateway(stubs, cores, flags | dict(waits))


async def _load(plan: Plan, gateway: Running, rate: float, report: Report, how: str = "") -> Load:
    """One load, open loop: nobody who comes waits for those before. how: the gateway was set, in the report."""
    http = HttpCaller(gateway.listen)
    request = http.request(CHAT, chat_body(plan.tokens))
    begun_ns = int(asyncio.get_running_loop().time() * 1e9)
    async with bar(f"{rate:.0f} answers a second", plan.seconds):
        with no_collection():
            seen = await at_rate(lambda _: http.call(request, plan.tokens), rate, plan.seconds)
    http.close()
    from_ns, until_ns = begun_ns + int(plan.settle_seconds * 1e9), begun_ns + int(plan.seconds * 1e9)
    good = [call for call in seen if call.whole and from_ns <= call.ended_ns <= until_ns]
    first = [call.first_token_seconds() for call in seen if call.whole and from_ns <= call.sent_ns <= until_ns]
    wrong = [call.why for call in seen if not call.whole and not call.refused]
    report.reasons = sorted({*report.reasons, *wrong})
    load = Load(rate, len(good) / (plan.seconds - plan.settle_seconds), first, sum(call.refused for call in seen), len(wrong))
    report.notes.append(
        f"{rate:7.1f} asked, {load.goodput:7.1f} answered a second, {load.refused} of {len(seen)} refused, "
        f"first token {1e3 * float(np.median(first)) if first else 0:.0f} ms median, {1e3 * load.first_p99:.0f} ms p99"
        + (f", {how}" if how else "")
    )
    return load
