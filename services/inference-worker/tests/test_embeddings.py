"""Vectors of texts, made between the engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from inference_worker.domain.answer import Answer
from inference_worker.domain.embedding import CHUNK_TOKENS, Embedder
from inference_worker.domain.engine import Engine
from inference_worker.domain.engine_port import Vector
from inference_worker.domain.engine_thread import EngineThread
from inference_worker.domain.errors import Draining
from inference_worker.domain.limits import EMBED_INPUTS_MAX, EMBED_TEXTS_WAITING_MAX
from inference_worker.domain.request import Request, Sampling
from treadle.contract.errors import InvalidArgument, ResourceExhausted
from treadle.nn.model import CausalLM

LONG = [1 + number % 200 for number in range(CHUNK_TOKENS + 40)]


@pytest.fixture
def embedder(tiny: CausalLM) -> Embedder:
    return Embedder(tiny, vocabulary=257, context_tokens_max=200)


def made(embedder: Embedder, *texts: list[int]) -> list[Vector]:
    future = embedder.submit(texts)
    while embedder.advance():
        pass
    return future.result(timeout=0)


def reference(tiny: CausalLM, text: list[int]) -> Vector:
    hidden = tiny.forward(torch.tensor(text), torch.arange(len(text)), [0, len(text)], [tiny.new_kv()])
    mean = hidden.double().numpy().mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)


def test_a_vector_is_the_mean_of_the_final_hidden_states_of_length_one(tiny: CausalLM, embedder: Embedder) -> None:
    texts = [[5, 6, 7], LONG, [9]]
    vectors = made(embedder, *texts)
    for text, vector in zip(texts, vectors, strict=True):
        assert vector.dtype == np.float32
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(vector, reference(tiny, text), atol=1e-5)


def test_a_chunk_at_a_time_so_that_answers_are_not_kept_waiting(tiny: CausalLM, embedder: Embedder) -> None:
    future = embedder.submit([LONG])
    assert embedder.advance()
    assert not future.done()
    assert embedder.advance()
    assert future.done()
    assert not embedder.advance()


def test_the_engine_thread_answers_between_vectors(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine(step_tokens_max=64, context_tokens_max=200)
    answer, answered_first = Answer(), list[bool]()
    futures = [engine.embedder.submit([LONG] * 4) for _ in range(8)]
    engine.submit(Request((1, 2, 3), Sampling(max_tokens=4, ignore_eos=True)), answer)
    futures[-1].add_done_callback(lambda _: answered_first.append(answer.done))  # called by the engine's thread
    with EngineThread(engine):
        assert len(futures[-1].result(timeout=30)) == 4
    assert answered_first == [True], "an answer of four tokens waited for thirty-two texts"


@pytest.mark.parametrize("texts", [[], [[]], [[1], [257]], [[1] * 201], [[1]] * (EMBED_INPUTS_MAX + 1)])
def test_texts_that_cannot_be_run_are_refused_by_name(embedder: Embedder, texts: list[list[int]]) -> None:
    with pytest.raises(InvalidArgument, match=r"^inputs"):
        embedder.submit(texts)


def test_texts_wait_in_a_queue_with_a_limit(embedder: Embedder) -> None:
    for _ in range(EMBED_TEXTS_WAITING_MAX // EMBED_INPUTS_MAX):
        embedder.submit([[1]] * EMBED_INPUTS_MAX)
    with pytest.raises(ResourceExhausted):
        embedder.submit([[1]])


def test_a_request_that_nobody_waits_for_is_not_computed(embedder: Embedder) -> None:
    left, stays = embedder.submit([LONG]), embedder.submit([[1]])
    assert left.cancel()
    assert embedder.advance()
    assert stays.done()
    with pytest.raises(CancelledError):
        left.result(timeout=0)


def test_a_worker_that_stops_ends_what_waits(embedder: Embedder) -> None:
    waiting = embedder.submit([[1]])
    embedder.close()
    with pytest.raises(Draining):
        waiting.result(timeout=0)
    with pytest.raises(Draining):
        embedder.submit([[1]])
