"""Every worker, and the pool behind them, is restarted under load, as an update would: not one request may fail.

First workers without a model, many and quick; then, where asked for, two real ones with a memory of a real pool.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from treadle.cli.memories import shipped_memory
from treadle.client import AsyncFabric, Endpoint
from treadle.client.worker import AsyncWorker
from treadle.contract.errors import NotFound, TreadleError
from treadle.nn.model_fetch import fetch
from treadle_bench.report import Goal
from treadle_loadtests.calls import ANY_NUMBER, CHAT, MODEL, HttpCaller, Seen, chat_body, count_calls
from treadle_loadtests.pacing import at_rate, bar
from treadle_loadtests.report import Report
from treadle_loadtests.services import Running, Services, cores_apart, on_cores, until, written

TOKENS = 16
SECONDS_MAX = 600.0  # of one part
REST_SECONDS = 0.5  # of load between two restarts
ANYWHERE = {"metrics_listen": "127.0.0.1:0"}
REAL_RATE, REAL_TOKENS = 4.0, 8  # 32 tokens a second: half of what one worker makes on one core while the other is restarted
REAL_REQUESTS = 50  # at least: restarts that are quick are followed by requests, too
DRAIN_SECONDS = 35.0  # of a worker: less than the time after which it is killed, and enough for a batch on a busy machine
PATIENCE_SECONDS = 60.0  # for a place at the one worker that is left: it is not its speed that is asked for


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: how often each worker is restarted; real: also workers with a model, and their pool, once each."""

    workers: int = 3
    rounds: int = 3
    rate: float = 60.0
    real: bool = True
    model: str = MODEL


def run(plan: Plan) -> Report:
    """Restart everything, one after the other."""
    report = Report("rolling", {"workers": plan.workers, "rounds": plan.rounds, "rate": plan.rate})
    asyncio.run(_play(plan, report))
    return report


async def _play(plan: Plan, report: Report) -> None:
    mine, rest, report.caveat = cores_apart()
    with on_cores(rest):
        async with Services() as services:
            await _stubs(plan, report, services, mine, rest)
    report.goals += [
        Goal("requests that failed", report.counts["requests_failed"], 0),
        Goal("restarts of workers", report.counts["restarts"], plan.rounds * plan.workers, at_least=True),
    ]
    if not plan.real:
        return
    async with Services() as services:
        await _real(report, services)
    report.goals += [
        Goal("requests to real workers that failed", report.counts["requests to real workers_failed"], 0),
        Goal("requests to real workers", report.counts["requests to real workers"], REAL_REQUESTS, at_least=True),
        Goal("restarts of real workers and their pool", report.counts["restarts, real"], 3, at_least=True),
    ]


async def _stubs(plan: Plan, report: Report, services: Services, mine: frozenset[int], rest: frozenset[int]) -> None:
    flags = {"tokens_per_second": 40.0, "slots": 64, "model": plan.model, "served_model_name": MODEL, "log_level": "warning"}
    stubs = [await services.stub(f"worker-{number}", rest, flags) for number in range(plan.workers)]
    gateway = await services.gateway(stubs, mine, {"calls_max": 2048})
    http, took = HttpCaller(gateway.listen), report.times.setdefault("restart of a worker", [])

    async def call(number: int) -> Seen:
        return await http.call(http.request(CHAT, chat_body(TOKENS, stream=number % 4 != 0)), TOKENS)

    async def restarts() -> None:
        for _ in range(plan.rounds):
            for stub in stubs:
                await _restarted(services, stub.name, took, _worker_answers)

    async with bar(f"{plan.workers} workers, {plan.rounds} times", 4.0 * plan.rounds * plan.workers):
        seen = await _under_load(call, plan.rate, restarts())
    http.close()
    count_calls(report, "requests", seen)
    report.counts["restarts"] = len(took)
    report.times["first token, under restarts"] = [each.first_token_seconds() for each in seen if each.whole]


async def _real(report: Report, services: Services) -> None:
    """Two workers with a model and a memory, and the pool that has it."""
    memory = shipped_memory()
    if memory is None:
        raise NotFound("no memory is shipped with the installed engram-pool: pip install --force-reinstall treadle-engram-pool")
    folder, segments = fetch(MODEL), Path(tempfile.mkdtemp(prefix="treadle-loadtest-", dir="/dev/shm"))
    try:
        pool = await services.start(
            "pool", [sys.executable, "-m", "engram_pool", *written({"segment_dir": segments / "pool", **ANYWHERE})]
        )
        async with AsyncFabric(engram=pool.listen) as fabric:
            await fabric.engram.load_grown(memory.folder)
        worker = written(
            {
                "model": folder,
                "served_model_name": MODEL,
                "engram_pool": pool.listen,
                "threads": 1,
                "log_level": "warning",
                "drain_seconds": DRAIN_SECONDS,
                **ANYWHERE,
            }
        )
        workers = [
            await services.start(f"real-{number}", [sys.executable, "-m", "inference_worker", *worker]) for number in range(2)
        ]
        gateway = await services.gateway(
            workers, frozenset(), {"routing": "least-loaded", "queue_wait_seconds_max": PATIENCE_SECONDS}
        )
        http, took = HttpCaller(gateway.listen), report.times.setdefault("restart, real", [])

        async def call(number: int) -> Seen:
            body = chat_body(REAL_TOKENS, stream=number % 2 == 0) | {"treadle": {"engram": memory.name}}
            return await http.call(http.request(CHAT, body), ANY_NUMBER)

        async def restarts() -> None:
            await _restarted(services, workers[0].name, took, _worker_answers)
            await _restarted(services, pool.name, took, _pool_answers)
            await _restarted(services, workers[1].name, took, _worker_answers)

        async with bar("two real workers and a pool", 60.0):
            seen = await _under_load(call, REAL_RATE, restarts(), REAL_REQUESTS)
        http.close()
        count_calls(report, "requests to real workers", seen)
        report.counts |= {"restarts, real": len(took), "degraded, real": sum(each.degraded for each in seen)}
    finally:
        for running in reversed(list(services.running)):
            await services.stop(running)  # before what they have mapped goes
        shutil.rmtree(segments, ignore_errors=True)


async def _under_load(call: Callable[[int], Awaitable[Seen]], rate: float, work: Awaitable[None], calls_min: int = 0) -> list[Seen]:
    """Calls until `work` is done and there were so many, and a little longer."""
    working, calls = asyncio.ensure_future(work), 0

    def counted(number: int) -> Awaitable[Seen]:
        nonlocal calls
        calls = number + 1
        return call(number)

    try:
        return await at_rate(counted, rate, SECONDS_MAX, enough=lambda: working.done() and calls >= calls_min)
    finally:
        await asyncio.wait_for(working, SECONDS_MAX)


async def _restarted(services: Services, name: str, took: list[float], answers: Callable[[Running], Awaitable[bool]]) -> None:
    begun = time.monotonic()
    await services.restart(name)
    await until(lambda: answers(services.running[name]), True, f"{name} answers")
    took.append(time.monotonic() - begun)
    await asyncio.sleep(REST_SECONDS)


async def _worker_answers(service: Running) -> bool:
    try:
        async with AsyncWorker(Endpoint(service.listen)) as worker:
            return not (await worker.status()).draining
    except TreadleError:
        return False


async def _pool_answers(service: Running) -> bool:
    try:
        async with AsyncFabric(engram=service.listen) as fabric:
            return bool(await fabric.engram.list_models())
    except TreadleError:
        return False
