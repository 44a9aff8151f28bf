"""A trace of real requests over four workers with a prefix cache each: how near does routing come to one cache of their summed size?

The trace (kvcache-ai/Mooncake, FAST'25) tells of each request when it came and the hashes of its blocks of 512 tokens. Each block
becomes a block of `BLOCK_TOKENS` token ids made from its hash, so equal beginnings stay equal; times are divided by `speed`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.client import Endpoint
from treadle.client.worker import AsyncWorker
from treadle.contract.errors import NotFound
from treadle_bench.report import Goal
from treadle_loadtests.calls import COMPLETIONS, MODEL, HttpCaller, Seen, count_calls
from treadle_loadtests.pacing import at_moments, bar, no_collection
from treadle_loadtests.report import Report
from treadle_loadtests.services import Running, Services, cores_apart, on_cores
from treadle_loadtests.stub_blocks import BlockCache, chain

TRACE_FILE = "conversation_trace_first8000.jsonl"
TRACE_BLOCK_TOKENS, BLOCK_TOKENS = 512, 16
ROUTING_LOAD_TOKENS = 256 * BLOCK_TOKENS // TRACE_BLOCK_TOKENS  # the gateway's weight of a request, in tokens as short as ours
VOCABULARY = 40_000  # ids below it are ordinary tokens of the model
HIT_GOAL = 0.95
POLICIES = ("least-loaded", "session", "prefix")
JUDGED = "prefix"
SESSION = "X-Session-Id"


@dataclass(frozen=True, slots=True)
class Plan:
    """data: the folder of the trace, or the file. blocks_max: of each worker's cache."""

    data: Path
    requests: int = 8000
    speed: float = 30.0
    workers: int = 4
    blocks_max: int = 8192
    prefill_seconds_per_token: float = 0.00002
    policies: Sequence[str] = POLICIES
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the trace. at_seconds: after the first; blocks: hashes."""

    at_seconds: float
    blocks: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """Its prompt: a block for each hash, and one token behind them, as the last is always computed."""
        return [token for block in self.blocks for token in block_tokens(block)] + [1]

    @property
    def session(self) -> str:
        """Whose it probably is: the trace does not tell, but what differs first between two conversations is their first words."""
        return str(self.blocks[1] if len(self.blocks) > 1 else self.blocks[0])


def block_tokens(block: int) -> list[int]:
    """Token ids that no other block has."""
    return [
        100 + block % VOCABULARY,
        100 + block // VOCABULARY,
        *(100 + (block * 31 + at) % VOCABULARY for at in range(2, BLOCK_TOKENS)),
    ]


def read_trace(data: Path, requests: int, speed: float) -> list[Asked]:
    """The first requests. Raises NotFound where there is no trace."""
    path = data / TRACE_FILE if data.is_dir() else data
    if not path.is_file():
        raise NotFound(
            f"no trace at {path}: get FAST25-release/traces of github.com/kvcache-ai/Mooncake and name its folder by --data"
        )
    return list(_lines(path, requests, speed))


def _lines(path: Path, requests: int, speed: float) -> Iterator[Asked]:
    with path.open(encoding="utf-8") as file:
        for _, line in zip(range(requests), file, strict=False):
            asked = json.loads(line)
            if asked["hash_ids"]:
                yield Asked(asked["timestamp"] / 1e3 / speed, asked["hash_ids"])


def ideal_hit_rate(trace: Sequence[Asked], blocks_max: int) -> float:
    """Of the prompts' tokens those that one cache of so many blocks has, each request after the one before it is stored."""
    cache, hits, tokens = BlockCache(blocks_max), 0, 0
    for asked in trace:
        prompt = asked.tokens
        blocks = chain(prompt, BLOCK_TOKENS)
        hits += cache.match(blocks) * BLOCK_TOKENS
        tokens += len(prompt)
        cache.store(blocks)
    return hits / tokens


def run(plan: Plan) -> Report:
    """Each policy with the whole trace and empty caches."""
    trace = read_trace(plan.data, plan.requests, plan.speed)
    report = Report(
        "trace", {"requests": len(trace), "speed": plan.speed, "workers": plan.workers, "blocks": plan.workers * plan.blocks_max}
    )
    ideal = ideal_hit_rate(trace, plan.workers * plan.blocks_max)
    report.notes.append(f"one cache of {plan.workers * plan.blocks_max} blocks: hit rate {ideal:.4f}; without a limit: "
                        f"{ideal_hit_rate(trace, 1 << 30):.4f}")  # fmt: skip
    asyncio.run(_play(plan, trace, ideal, report))
    return report


async def _play(plan: Plan, trace: Sequence[Asked], ideal: float, report: Report) -> None:
    mine, rest, report.caveat = cores_apart()
    with on_cores(rest):
        for policy in plan.policies:
            async with Services() as services:
                rate, seen = await _replay(plan, trace, policy, services, mine, rest)
            count_calls(report, "requests", seen)
            report.times[f"first token, {policy}"] = [call.first_token_seconds() for call in seen if call.whole]
            report.notes.append(f"{policy}: hit rate {rate:.4f}, {rate / ideal:.1%} of one cache's")
            if policy == JUDGED:
                report.goals.append(
                    Goal(f"hit rate of {policy} / of one cache of the summed size", rate / ideal, HIT_GOAL, at_least=True)
                )
    report.goals.append(Goal("requests that failed", report.counts["requests_failed"], 0))


async def _replay(
    plan: Plan, trace: Sequence[Asked], policy: str, services: Services, mine: frozenset[int], rest: frozenset[int]
) -> tuple[float, list[Seen]]:
    """Hit rate, and what was seen."""
    flags = {
        "block_tokens": BLOCK_TOKENS, "blocks_max": plan.blocks_max, "slots": 1024, "waiting_max": 4096, "model": plan.model,
        "prefill_seconds_per_token": plan.prefill_seconds_per_token, "served_model_name": MODEL, "log_level": "warning",
    }  # fmt: skip
    stubs = [await services.stub(f"worker-{number}", rest, flags) for number in range(plan.workers)]
    gateway = await services.gateway(
        stubs, mine, {"routing": policy, "routing_load_tokens": ROUTING_LOAD_TOKENS, "calls_max": 4096, "connections_max": 4096}
    )
    http = HttpCaller(gateway.listen)

    async def call(number: int) -> Seen:
        asked = trace[number]
        body = {"model": MODEL, "prompt": asked.tokens, "max_tokens": 1, "stream": True}
        return await http.call(http.request(COMPLETIONS, body, headers={SESSION: asked.session}), 1)

    async with bar(f"the trace, {policy}", trace[-1].at_seconds):
        with no_collection():
            seen = await at_moments(call, [asked.at_seconds for asked in trace])
    http.close()
    return await _hit_rate(stubs), seen


async def _hit_rate(stubs: Sequence[Running]) -> float:
    cached = computed = 0
    for stub in stubs:
        async with AsyncWorker(Endpoint(stub.listen)) as worker:
            status = await worker.status()
        cached, computed = cached + status.cached_tokens, computed + status.prompt_tokens
    return cached / (cached + computed)
