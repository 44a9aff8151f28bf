"""A prompt is told to the pools of memory before its worker gets it, and no request waits for that or fails with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inference_gateway.adapters import pool_hints
from inference_gateway.adapters.pool_hints import HINTS_IN_FLIGHT_MAX, PoolHints
from inference_gateway.domain.memories import Memory, MemoryChoice, looked_up
from inference_gateway.settings import Settings
from treadle.chassis.settings import WrongSetting
from treadle.client import Endpoint
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

KJV, DEMO = "1b" * 32, "ab" * 32


class ScriptedPool(pb_grpc.EngramPoolServiceServicer):
    """An EngramPoolService that takes hints, on a free port of loopback, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self.hints: list[pb.HintTokensRequest] = []
        self.keys: list[str] = []
        self.seconds, self.taken = 0.0, 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-pool")
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def HintTokens(self, request: pb.HintTokensRequest, context: Any) -> pb.HintTokensResponse:  # noqa: N802
        self.keys += [str(value) for name, value in context.invocation_metadata() if name == "authorization"]
        self.hints.append(request)
        await asyncio.sleep(self.seconds)
        return pb.HintTokensResponse(tokens_taken=self.taken)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        pb_grpc.add_EngramPoolServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()


@pytest.fixture
def pool() -> Iterator[ScriptedPool]:
    pool = ScriptedPool()  # type: ignore[abstract]  # the RPCs that no gateway calls
    yield pool
    pool.close()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


def test_the_whole_prompt_is_told_with_the_memory_that_the_request_gets(
    worker: Any, start_gateway: Callable[..., Any], pool: ScriptedPool, tmp_path: Path
) -> None:
    key_file = tmp_path / "pool-key"
    key_file.write_text("of the gateway\n")
    key_file.chmod(0o600)
    gateway = started(start_gateway, worker, "--engram-pool", pool.address, "--engram-pool-key-file", str(key_file))
    assert gateway.chat("tell me of the whale").status_code == 200
    assert gateway.chat("and of the sea", treadle={"engram": "kjv"}).status_code == 200
    assert gateway.chat("and of nothing", treadle={"engram": "none"}).status_code == 200
    wait_until(lambda: gateway.figure("treadle_gateway_hints_total", outcome="taken") == 2, "both hints ended")
    told = {(hint.ref.model, hint.ref.version): list(hint.token_ids) for hint in pool.hints}  # the second may overtake the first
    whale, sea = (list(asked.prompt_token_ids) for asked in worker.requests[:2])
    assert (told, len(pool.hints)) == ({("smollm2-demo", DEMO): whale, ("kjv", KJV): sea}, 2)
    assert set(pool.keys) == {"Bearer of the gateway"}


def test_a_prompt_is_told_once_however_many_answers_it_gets(
    worker: Any, start_gateway: Callable[..., Any], pool: ScriptedPool
) -> None:
    gateway = started(start_gateway, worker, "--engram-pool", pool.address)
    several = {"model": "tiny-chat", "prompt": ["one", "two"], "n": 4}
    assert gateway.http.post("/v1/completions", json=several).status_code == 200
    assert gateway.chat("three").status_code == 200
    wait_until(
        lambda: len(pool.hints) >= 3 and pool.hints[-1].token_ids == worker.requests[-1].prompt_token_ids, "the last is told"
    )
    told = sorted(list(hint.token_ids) for hint in pool.hints[:-1])  # both prompts begin at once
    assert told == sorted(list(worker.requests[place].prompt_token_ids) for place in (0, 4))


@pytest.mark.parametrize("how", ["frozen", "gone"])
def test_a_request_neither_waits_for_a_pool_nor_fails_with_it(
    worker: Any, start_gateway: Callable[..., Any], pool: ScriptedPool, how: str
) -> None:
    pool.seconds = 30.0
    gateway = started(start_gateway, worker, "--engram-pool", pool.address if how == "frozen" else "127.0.0.1:9")
    for _ in range(3):
        begun = time.monotonic()
        assert gateway.chat().status_code == 200
        assert time.monotonic() - begun < 5
    wait_until(lambda: gateway.figure("treadle_gateway_hints_total", outcome="failed") >= 1, "a hint was given up")
    assert gateway.chat().status_code == 200
    assert gateway.terminate() == 0


class Outcomes(list[str]):
    """How hints ended; `several(n)` waits for n of them."""

    def __init__(self) -> None:
        self._one = asyncio.Event()

    def __call__(self, outcome: str) -> None:
        self.append(outcome)
        self._one.set()

    async def several(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self) < count:
                self._one.clear()
                await self._one.wait()


async def test_a_pool_that_has_nothing_to_do_is_left_alone_for_a_moment(
    pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_hints, "HINT_SECONDS_MAX", 10.0)
    monkeypatch.setattr(pool_hints, "QUIET_SECONDS", 60.0)
    outcomes = Outcomes()
    hints, pool.taken = PoolHints([Endpoint(pool.address)], outcomes), 0
    try:
        for count in (1, 2):
            hints.tell("kjv", "", [1, 2])
            await outcomes.several(count)
        assert (outcomes, len(pool.hints)) == (["near", "quiet"], 1)
    finally:
        await hints.close()


async def test_hints_on_their_way_are_bounded(pool: ScriptedPool) -> None:
    outcomes = Outcomes()
    hints, pool.seconds = PoolHints([Endpoint(pool.address)], outcomes), 0.2
    try:
        for _ in range(HINTS_IN_FLIGHT_MAX + 5):
            hints.tell("kjv", "", [1, 2])
        assert outcomes == ["left"] * 5
        await outcomes.several(HINTS_IN_FLIGHT_MAX + 5)
        assert len(pool.hints) <= HINTS_IN_FLIGHT_MAX
    finally:
        await hints.close()


def started(start_gateway: Callable[..., Any], worker: Any, *flags: str) -> Any:
    gateway = start_gateway("--worker", worker.address, *flags)
    gateway.wait_ready()
    return gateway


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (MemoryChoice(None), ("demo", DEMO)),
        (MemoryChoice(""), None),
        (MemoryChoice("kjv"), ("kjv", KJV)),
        (MemoryChoice("kjv", "1b1b1b1b"), ("kjv", KJV)),
        (MemoryChoice("kjv", "2c2c2c2c"), None),
        (MemoryChoice("foreign"), None),
        (MemoryChoice("new"), ("new", "")),
        (MemoryChoice("new", "1b1b1b1b"), None),
    ],
)
def test_what_is_told_is_the_version_that_will_be_looked_up(choice: MemoryChoice, expected: tuple[str, str] | None) -> None:
    there = [Memory("demo", DEMO, default=True), Memory("kjv", KJV), Memory("foreign", "f0" * 32, refusal="another tokenizer")]
    assert looked_up(choice, there) == expected


def test_a_pool_without_a_port_stops_the_start() -> None:
    with pytest.raises(WrongSetting, match="engram_pool"):
        Settings(engram_pool="127.0.0.1:7401, elsewhere")
