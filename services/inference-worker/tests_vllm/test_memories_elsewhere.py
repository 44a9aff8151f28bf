"""What the worker tells the engine's process of the versions that it holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inference_worker.adapters import vllm_process
from inference_worker.adapters.vllm_memories import VllmMemories
from inference_worker.adapters.vllm_process import VllmProcess
from inference_worker.settings import EngramTransport
from treadle.contract.errors import DeadlineExceeded

HANDLE: Any = SimpleNamespace(model=SimpleNamespace(name="kjv"), version="a" * 64, transport="mapped")
SETTINGS: Any = SimpleNamespace(engram_transport=EngramTransport.AUTO, engram_open_seconds_max=30.0)


class Core:
    """vLLM's side: what it was asked, and the answers that it gives."""

    def __init__(self, *answers: str) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)
        self.closed = asyncio.Event()

    async def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[str]:
        assert args == ("kjv@" + "a" * 64,)
        self.asked.append(method)
        if method == "close_engram_memory":
            self.closed.set()
        elif not self._answers:
            await asyncio.Event().wait()
        return [self._answers.pop(0)] if self._answers else [""]


def test_a_version_is_opened_there_and_let_go_when_it_is_closed_here() -> None:
    async def run() -> list[str]:
        core: Any = Core("opening", "open")
        memories = VllmMemories(VllmProcess(core, asyncio.get_running_loop()), SETTINGS)
        assert await asyncio.to_thread(memories.open, HANDLE) == "mapped"
        await asyncio.to_thread(memories.close, HANDLE)
        await asyncio.wait_for(core.closed.wait(), 10.0)
        return list(core.asked)

    assert asyncio.run(run()) == ["open_engram_memory"] * 2 + ["close_engram_memory"]


def test_an_answer_that_came_too_late_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "ANSWER_SECONDS_MAX", 0.05)

    async def run() -> None:
        core: Any = Core()
        memories = VllmMemories(VllmProcess(core, asyncio.get_running_loop()), SETTINGS)
        with pytest.raises(DeadlineExceeded, match="does not answer"):
            await asyncio.to_thread(memories.open, HANDLE)
        await asyncio.wait_for(core.closed.wait(), 10.0)

    asyncio.run(run())
