"""What the gateway costs on one core: added latency at 200 answers a second, a thousand streams at once, and where it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle_bench.report import Goal
from treadle_loadtests.calls import CHAT, MODEL, GrpcCaller, HttpCaller, Seen, chat_body, count_calls
from treadle_loadtests.latency import Ways, added_ms
from treadle_loadtests.pacing import at_once, at_rate, bar, no_collection
from treadle_loadtests.report import Report
from treadle_loadtests.services import CpuShare, Running, Services, cores_apart, on_cores

TOKENS_PER_SECOND = 50.0  # of each stream while latency is measured
STREAM_TOKENS_PER_SECOND = 2.0  # while there are many of them
P50_MS_GOAL, P99_MS_GOAL = 2.0, 10.0
GROWTH_MIB_GOAL = 2.0  # a minute: an allocator's noise; a leak of one kilobyte a chunk would be a hundred
ROUNDS = 3  # through the gateway and straight, in turns: a busy moment of the machine is one for both
CEILING_STEP = 1.25
CEILING_SECONDS = 8.0
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """How much. streams: at once, each with `stream_tokens` tokens and then the next; ceiling_max: answers a second, 0: not looked for."""

    rate: float = 200.0
    tokens: int = 16
    seconds: float = 30.0
    workers: int = 2
    streams: int = 1000
    streams_seconds: float = 75.0
    stream_tokens: int = 40
    ceiling_max: float = 1600.0
    model: str = MODEL


def run(plan: Plan) -> Report:
    """All three parts, one after the other."""
    report = Report("chat", {"rate": plan.rate, "tokens": plan.tokens, "workers": plan.workers, "streams": plan.streams})
    asyncio.run(_Chat(plan, report).play())
    return report


class _Chat:
    def __init__(self, plan: Plan, report: Report) -> None:
        self._plan, self._report = plan, report
        self._mine, self._rest, self._report.caveat = cores_apart()

    async def play(self) -> None:
        with on_cores(self._rest):
            async with Services() as services:
                await self._latency(services)
                await self._streams(services)
                if self._plan.ceiling_max:
                    await self._ceiling(services)

    # -- latency ------------------------------------------------------------------------------------------------------------

    async def _latency(self, services: Services) -> None:
        plan, report = self._plan, self._report
        stubs = await self._stubs(services, "quick", TOKENS_PER_SECOND)
        gateway = await services.gateway(stubs, self._mine, {"calls_max": 8192, "connections_max": 8192})
        http, straight = HttpCaller(gateway.listen), GrpcCaller([stub.listen for stub in stubs])
        ways, bare = Ways(), Ways()
        seconds = plan.seconds / ROUNDS
        await self._at(http, 20.0, 1.0)  # the first calls open connections
        await at_rate(lambda _: straight.call(range(1, 31), plan.tokens), 20.0, 1.0)
        for number in range(ROUNDS):
            async with bar(f"latency, round {number + 1} of {ROUNDS}", 2 * seconds):
                share = CpuShare([gateway, *stubs])
                seen = await self._at(http, plan.rate, seconds, number)
                self._shares(share, f"{plan.rate:g} a second")
                with no_collection():
                    bare_seen = await at_rate(lambda _: straight.call(range(1, 31), plan.tokens), plan.rate, seconds, number)
            count_calls(report, "answers", [*seen, *bare_seen])
            ways.add(seen)
            bare.add(bare_seen)
        http.close()
        await straight.close()
        report.times |= {
            "first token, gateway": ways.first, "first token, straight": bare.first,
            "chunk, gateway": ways.later, "chunk, straight": bare.later,
        }  # fmt: skip
        for what, through, without in (("first token", ways.first, bare.first), ("chunk", ways.later, bare.later)):
            for percentile, goal in ((50, P50_MS_GOAL), (99, P99_MS_GOAL)):
                added = added_ms(through, without, percentile)
                report.goals.append(Goal(f"added to a {what}, p{percentile}, ms", added, goal))
        report.goals.append(Goal("answers that failed", report.counts["answers_failed"], 0))
        await services.stop("gateway")

    # -- many streams ---------------------------------------------------------------------------------------------------------

    async def _streams(self, services: Services) -> None:
        plan, report = self._plan, self._report
        stubs = await self._stubs(services, "slow", STREAM_TOKENS_PER_SECOND)
        gateway = await services.gateway(stubs, self._mine, {"calls_max": 8192, "connections_max": 8192})
        http, share = HttpCaller(gateway.listen), CpuShare([gateway, *stubs])
        request = http.request(CHAT, chat_body(plan.stream_tokens))
        ramp_seconds = plan.stream_tokens / STREAM_TOKENS_PER_SECOND
        memory = asyncio.ensure_future(_memory(gateway, ramp_seconds, plan.streams_seconds))
        async with bar(f"{plan.streams} streams", plan.streams_seconds + 2 * ramp_seconds):
            with no_collection():
                seen = await at_once(
                    lambda _: http.call(request, plan.stream_tokens),
                    plan.streams,
                    plan.streams_seconds + ramp_seconds,
                    ramp_seconds,
                )
        http.close()
        self._shares(share, f"{plan.streams} streams")
        count_calls(report, "streams", seen)
        ways = Ways()
        ways.add(seen)
        report.times["chunk, many streams"] = ways.later
        moments, resident = await memory
        growth = float(np.polyfit(moments, resident, 1)[0]) * 60 / (1 << 20) if len(moments) > 1 else float("inf")
        report.counts["gateway_resident_kib"] = int(np.median(resident)) >> 10 if resident else 0
        report.counts["streams_at_once"] = _most_at_once(seen)
        report.goals += [
            Goal("streams at once", report.counts["streams_at_once"], plan.streams, at_least=True),
            Goal("streams that failed", report.counts["streams_failed"], 0),
            Goal("growth of the gateway, MiB a minute", growth, GROWTH_MIB_GOAL),
        ]
        await services.stop("gateway")

    # -- the ceiling -------------------------------------------------------------------------------------------------------------

    async def _ceiling(self, services: Services) -> None:
        """Faster and faster until a chunk's p99 is above the goal, or an answer fails. A figure, no goal."""
        plan, report = self._plan, self._report
        stubs = [services.running[f"quick-{number}"] for number in range(plan.workers)]
        gateway = await services.gateway(stubs, self._mine, {"calls_max": 8192, "connections_max": 8192})
        http, rate, ways = HttpCaller(gateway.listen), plan.rate / CEILING_STEP, Ways()
        while rate < plan.ceiling_max:
            share = CpuShare([gateway, *stubs])
            async with bar(f"the ceiling: {rate:.0f} answers a second", CEILING_SECONDS):
                seen = await self._at(http, rate, CEILING_SECONDS)
            tried = Ways()
            tried.add(seen)
            self._shares(share, f"{rate:.0f} a second, looking for the ceiling")
            if not all(call.whole for call in seen) or np.percentile(tried.later, 99) * 1e3 > P99_MS_GOAL:
                break
            report.counts["ceiling_answers_a_second"], report.counts["ceiling_chunks_a_second"] = int(rate), int(rate * plan.tokens)
            ways, rate = tried, rate * CEILING_STEP
        report.times["chunk, at the ceiling"] = ways.later
        http.close()
        await services.stop("gateway")

    # -- parts -------------------------------------------------------------------------------------------------------------------

    async def _stubs(self, services: Services, name: str, pace: float) -> list[Running]:
        flags = {
            "tokens_per_second": pace,
            "slots": 8192,
            "model": self._plan.model,
            "served_model_name": MODEL,
            "log_level": "warning",
        }
        return [await services.stub(f"{name}-{number}", self._rest, flags) for number in range(self._plan.workers)]

    async def _at(self, http: HttpCaller, rate: float, seconds: float, seed: int = 0) -> list[Seen]:
        request = http.request(CHAT, chat_body(self._plan.tokens))
        with no_collection():
            return await at_rate(lambda _: http.call(request, self._plan.tokens), rate, seconds, seed)

    def _shares(self, share: CpuShare, what: str) -> None:
        told = ", ".join(f"{name} {used:.0%}" for name, used in share.shares().items())
        self._report.notes.append(f"of a core at {what}: {told}")


async def _memory(gateway: Running, after_seconds: float, seconds: float) -> tuple[list[float], list[int]]:
    """Moments and resident bytes, once all streams are there."""
    begun, moments, resident = time.monotonic(), list[float](), list[int]()
    while (now := time.monotonic() - begun) < after_seconds + seconds:
        if now > after_seconds:
            moments.append(now)
            resident.append(gateway.resident_bytes())
        await asyncio.sleep(SAMPLE_SECONDS)
    return moments, resident


def _most_at_once(seen: Sequence[Seen]) -> int:
    changes = sorted([(call.sent_ns, 1) for call in seen] + [(call.ended_ns, -1) for call in seen])
    return int(np.max(np.cumsum([change for _, change in changes]), initial=0))
