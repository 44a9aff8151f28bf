"""Clients leave at random moments, waiting, in the prefill and in the middle of their answers: how soon does the worker stop?"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle_bench.report import Goal
from treadle_loadtests.calls import CHAT, MODEL, HttpCaller, Seen, chat_body
from treadle_loadtests.pacing import at_rate, bar, no_collection
from treadle_loadtests.report import Report
from treadle_loadtests.services import POLL_SECONDS, Running, Services, cores_apart, on_cores

P99_SECONDS_GOAL = 0.25
SETTLE_SECONDS_MAX = 10.0  # after the last client left; what is not stopped by then counts as never
TOKENS = 4000  # more than come before anybody leaves
STAY_SECONDS = (0.002, 1.2)


@dataclass(frozen=True, slots=True)
class Plan:
    """disconnects: so many that a worker knew of. With `slots` and the rate some wait, some are in the prefill, some answer."""

    disconnects: int = 1000
    rate: float = 60.0
    workers: int = 2
    slots: int = 14
    prefill_seconds_per_token: float = 0.0006
    model: str = MODEL


def run(plan: Plan) -> Report:
    """Clients come at random moments, stay for a while, and leave."""
    report = Report("cancel", {"rate": plan.rate, "workers": plan.workers, "slots": plan.slots})
    asyncio.run(_play(plan, report))
    return report


async def _play(plan: Plan, report: Report) -> None:
    mine, rest, report.caveat = cores_apart()
    with on_cores(rest):
        async with Services() as services:
            stubs = [
                await services.stub(f"worker-{number}", rest, _flags(plan, services, number)) for number in range(plan.workers)
            ]
            # The line is the workers' here: whoever leaves the gateway's own line never was anybody's work.
            gateway = await services.gateway(stubs, mine, {"calls_max": 4096, "connections_max": 4096, "queue_headroom": 1000})
            http, chance, seen = HttpCaller(gateway.listen), random.Random(7), list[Seen]()
            lines: dict[str, list[dict[str, Any]]] = {}

            async def leave(number: int) -> Seen:
                streams, name = number % 2 == 0, f"{len(seen)}-{number}"
                request = http.request(CHAT, chat_body(TOKENS, stream=streams), name)
                return await http.call(request, TOKENS, request_id=name, leave_after_seconds=chance.uniform(*STAY_SECONDS))

            while (missing := plan.disconnects - len(lines)) > 0 and len(seen) < 4 * plan.disconnects:
                seconds = (missing + 20) / plan.rate
                async with bar(f"{missing} clients leave", seconds):
                    with no_collection():
                        seen += await at_rate(leave, plan.rate, seconds, len(seen))
                lines = await _settled(services, stubs)
            _judge(plan, report, seen, lines)
            http.close()


def _flags(plan: Plan, services: Services, number: int) -> dict[str, object]:
    return {
        "slots": plan.slots, "waiting_max": 4096, "tokens_per_second": 20.0, "prefill_seconds_per_token": plan.prefill_seconds_per_token,
        "model": plan.model, "served_model_name": MODEL, "journal": services.folder / f"journal-{number}", "log_level": "warning",
    }  # fmt: skip


async def _settled(services: Services, stubs: Sequence[Running]) -> dict[str, list[dict[str, Any]]]:
    """What the workers noted, by request, once everything that came has ended, or will not any more."""
    until = asyncio.get_running_loop().time() + SETTLE_SECONDS_MAX
    while True:
        noted: dict[str, list[dict[str, Any]]] = {}
        for number in range(len(stubs)):
            for text in (services.folder / f"journal-{number}").read_text().splitlines():
                line = json.loads(text)
                noted.setdefault(line["id"], []).append(line)
        if all(len(lines) % 2 == 0 for lines in noted.values()) or asyncio.get_running_loop().time() > until:
            return noted
        await asyncio.sleep(POLL_SECONDS)


def _judge(plan: Plan, report: Report, seen: Sequence[Seen], lines: dict[str, list[dict[str, Any]]]) -> None:
    left = {call.request_id: call for call in seen if call.left_ns}
    report.counts |= {"disconnects": len(left), "known to a worker": len(lines), "never a worker's": len(left) - len(lines)}
    report.counts["answers that came before"] = len(seen) - len(left)
    took: dict[str, list[float]] = {"streaming": [], "not streaming": []}
    states: Counter[str] = Counter()
    for name, noted in lines.items():
        ends = [line for line in noted if line["event"] == "aborted"]
        if name not in left or len(ends) != 1 or len(noted) != 2:
            continue
        states[ends[0]["state"]] += 1
        form = "streaming" if int(name.split("-")[1]) % 2 == 0 else "not streaming"
        took[form].append((ends[0]["ns"] - left[name].left_ns) / 1e9)
    report.counts |= {f"left while {state}": states[state] for state in ("waiting", "prefill", "decode")}
    report.times |= {f"disconnect to abort, {form}": seconds for form, seconds in took.items()}
    aborted = sum(len(seconds) for seconds in took.values())
    report.reasons = [f"{call.request_id}: {call.why}" for call in seen if not call.left_ns]
    for form, seconds in took.items():
        p99 = float(np.percentile(seconds, 99)) if seconds else float("inf")
        report.goals.append(Goal(f"disconnect to abort, {form}, p99, s", p99, P99_SECONDS_GOAL))
    report.goals += [
        Goal("disconnects that a worker knew of", len(lines), plan.disconnects, at_least=True),
        Goal("of these not aborted", len(lines) - aborted, 0),
    ]
