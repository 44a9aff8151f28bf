"""A prompt's rows are hinted at as soon as it is taken in, where that brings them nearer, and the answer is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from inference_worker.adapters.prometheus import WorkerMetrics
from inference_worker.domain.answer import Answer
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.limits import Limits
from inference_worker.domain.request import Piece, Request, Sampling
from treadle.client.engram import EngramHandle, StepPrefetcher
from treadle.client.engram.sources import TableSource
from treadle.contract import EngramModel, Transport, Unavailable, Windows
from treadle.dataplane.warming import Warming
from treadle.nn.memory_fit import fusion_of
from treadle.nn.model import CausalLM

Prompt = Callable[..., tuple[int, ...]]
TinyEngram = tuple[EngramModel, NDArray[np.int32], dict[int, NDArray[np.uint8]]]
ANSWER = Sampling(max_tokens=4, ignore_eos=True)


class CountedPrefetcher(StepPrefetcher):
    """Counts what was hinted at."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.hinted: list[int] = []
        self._error = error

    def hint(self, handle: EngramHandle, windows: Windows) -> int:
        if self._error is not None:
            raise self._error
        self.hinted.append(super().hint(handle, windows))
        return self.hinted[-1]


def memory_of(tiny: CausalLM, tiny_engram: TinyEngram, *, cold: bool) -> EngramMemory:
    model, token_map, tables = tiny_engram
    source = TableSource(Transport.MAPPED, model, tables, token_map, warming=Warming([]) if cold else None)
    return EngramMemory(EngramHandle(model, model.version, source), fusion_of(model, tiny.config.hidden, None), fused=True)


def answer(engine: Engine, ids: tuple[int, ...], ask: Callable[..., list[Piece]]) -> list[int]:
    (piece,) = ask(engine, Request(ids, ANSWER))
    return list(piece.token_ids)


@pytest.mark.parametrize("cold", [True, False])
def test_a_whole_prompt_is_hinted_at_where_rows_are_not_near(
    tiny: CausalLM,
    tiny_engram: TinyEngram,
    engines: Callable[..., Engine],
    ask: Callable[..., list[Piece]],
    prompt: Prompt,
    cold: bool,
) -> None:
    prefetcher, ids = CountedPrefetcher(), prompt(90)
    memory = memory_of(tiny, tiny_engram, cold=cold)
    told = answer(engines(memory, prefetcher=prefetcher), ids, ask)
    assert prefetcher.hinted == ([90] if cold else [])
    assert told == answer(engines(memory, prefetcher=StepPrefetcher(prefetch=False)), ids, ask)


def test_a_hint_that_fails_does_not_fail_the_request(
    tiny: CausalLM, tiny_engram: TinyEngram, engines: Callable[..., Engine], ask: Callable[..., list[Piece]], prompt: Prompt
) -> None:
    engine = engines(memory_of(tiny, tiny_engram, cold=True), prefetcher=CountedPrefetcher(Unavailable("gone")))
    assert len(answer(engine, prompt(20), ask)) == 4


def test_hints_are_counted(tiny: CausalLM, tiny_vocabulary: Any, tiny_engram: TinyEngram, prompt: Prompt) -> None:
    registry = CollectorRegistry()
    memory = memory_of(tiny, tiny_engram, cold=True)
    engine = Engine(
        tiny, tiny_vocabulary, Limits(context_tokens_max=200), memory, prefetcher=StepPrefetcher(), observer=WorkerMetrics(registry)
    )
    engine.submit(Request(prompt(30), ANSWER), Answer())
    assert registry.get_sample_value("treadle_worker_engram_hint_tokens_total") == 30
