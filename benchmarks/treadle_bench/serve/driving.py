"""Requests to workers, and what came back when: one round is a batch to each worker at once, all of it awaited.

Owns the clock on the client's side. Prompts are random tokens, so that no round finds another's prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.client import Endpoint
from treadle.client.worker import AsyncWorker
from treadle.inference.v1 import worker_pb2

TIMEOUT_SECONDS = 300.0
SETTLED_SECONDS_MAX, LOOK_SECONDS = 5.0, 0.05  # vLLM's worker hears of its tickets twice a second
FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a round: requests to each worker, tokens of each prompt, tokens of each answer."""

    batch: int
    prompt: int
    new: int


@dataclass(slots=True)
class Round:
    """What one round took. Seconds; `gaps` are between messages that bring tokens; `step_seconds`, `stall_seconds` and
    `gather_seconds` (of the slowest layer, median over the worker's last tickets) are the workers' own."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    step_seconds: float = 0.0
    stall_seconds: float = 0.0
    tickets: int = 0
    tickets_in_time: int = 0
    rows_missing: int = 0
    steps: int = 0
    degraded: int = 0
    gather_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated, over the time from the first request to the last token."""
        return self.tokens / self.seconds


class Fleet:
    """Some workers that take their rounds together. Use as a context manager, from plain code."""

    def __init__(self, addresses: Sequence[str], key: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._workers: list[AsyncWorker] = self._loop.run_until_complete(_connect(addresses, key))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.run_until_complete(_close(self._workers))
        self._loop.close()

    def round(self, shape: Shape, seed: int) -> Round:
        """Send `shape.batch` requests to each worker at once and read all answers. Raises what a worker raised."""
        return self._loop.run_until_complete(self._round(shape, seed))

    async def _round(self, shape: Shape, seed: int) -> Round:
        before = [await worker.status(TIMEOUT_SECONDS) for worker in self._workers]
        chance, result = np.random.default_rng(seed), Round()
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                for _ in range(shape.batch):
                    prompt = chance.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, size=shape.prompt).tolist()
                    tasks.create_task(_answer(worker, prompt, shape.new, result))
        result.seconds = time.perf_counter() - begun
        for worker, old in zip(self._workers, before, strict=True):
            _add_figures(result, old, await _settled(worker, old))
        return result


async def _connect(addresses: Sequence[str], key: str) -> list[AsyncWorker]:
    return [AsyncWorker(Endpoint(address, key)) for address in addresses]


async def _close(workers: Sequence[AsyncWorker]) -> None:
    for worker in workers:
        await worker.close()


async def _answer(worker: AsyncWorker, prompt: Sequence[int], new: int, result: Round) -> None:
    request = worker_pb2.GenerateRequest(
        prompt_token_ids=prompt, sampling=worker_pb2.Sampling(max_tokens=new, ignore_eos=True), request_id="bench-serve"
    )
    last, tokens, degraded = time.perf_counter(), 0, False
    async for message in worker.generate(request, TIMEOUT_SECONDS):
        degraded = degraded or message.degraded
        if not message.token_ids:
            continue
        now = time.perf_counter()
        (result.gaps if tokens else result.first).append(now - last)
        last, tokens = now, tokens + len(message.token_ids)
    if tokens != new:
        raise RuntimeError(f"a worker answered with {tokens} tokens of {new}")
    result.tokens += tokens
    result.degraded += degraded


async def _settled(worker: AsyncWorker, old: worker_pb2.StatusResponse) -> worker_pb2.StatusResponse:
    """The status of a worker that has told of the tickets of all its steps since `old`, or has had SETTLED_SECONDS_MAX for it."""
    ends = time.monotonic() + SETTLED_SECONDS_MAX
    while True:
        new = await worker.status(TIMEOUT_SECONDS)
        known = {layer.layer: layer.tickets for layer in old.engram_layers}
        told = [layer.tickets - known.get(layer.layer, 0) for layer in new.engram_layers]
        if not new.engram_model or min(told, default=0) >= new.steps - old.steps or time.monotonic() > ends:
            return new
        await asyncio.sleep(LOOK_SECONDS)


def _add_figures(result: Round, old: worker_pb2.StatusResponse, new: worker_pb2.StatusResponse) -> None:
    """What a worker's own counters say of the round."""
    result.steps += new.steps - old.steps
    result.step_seconds += new.step_seconds - old.step_seconds
    earlier = {layer.layer: layer for layer in old.engram_layers}
    for layer in new.engram_layers:
        known = earlier.get(layer.layer, worker_pb2.EngramLayerStatus())
        result.stall_seconds += layer.stall_seconds - known.stall_seconds
        result.tickets += layer.tickets - known.tickets
        result.tickets_in_time += layer.tickets_in_time - known.tickets_in_time
        result.rows_missing += layer.rows_missing - known.rows_missing
        result.gather_seconds = max(result.gather_seconds, layer.gather_seconds_p50)
