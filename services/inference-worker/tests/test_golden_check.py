"""The check of an engine's first answer, beside the loop that hears the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference_worker.adapters import golden_check
from inference_worker.adapters.golden_check import Agreement, check_answers
from inference_worker.domain.request import Finish, FinishReason, Piece, Usage

HEARD_SECONDS_MAX = 30.0


class Answering:
    """An engine whose every answer is over at once."""

    def begin(self, request: Any, leases: Any) -> Answering:
        return self

    async def pieces(self) -> AsyncIterator[Piece]:
        yield Piece([1], finish=Finish(FinishReason.LENGTH, Usage(48, 0, 1)))


def test_the_loop_goes_on_while_an_answer_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard = threading.Event()
    compared: list[bool] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def compare(folder: Path, prompt: Any, answer: Any) -> Agreement:
        asyncio.run_coroutine_threadsafe(hear(), loops[0])
        compared.append(heard.wait(HEARD_SECONDS_MAX))
        return Agreement(0.0, 0.0)

    async def hear() -> None:
        heard.set()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await check_answers(Answering(), tmp_path, 100, params_max=1, difference_max=0.1)  # type: ignore[arg-type]

    monkeypatch.setattr(golden_check, "compare", compare)
    asyncio.run(run())
    assert compared == [True]
