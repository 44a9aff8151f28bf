"""Vectors of texts, by the stock OpenAI SDK."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

MODEL = "tiny-chat"


@pytest.fixture
def client(gateway: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def test_vectors_come_in_the_order_of_their_texts_with_the_tokens_counted(client: openai.OpenAI, worker: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=["abc", "de"], encoding_format="float")
    assert [len(each.token_ids) for each in worker.embeds[-1].inputs] == [3, 2]
    assert [(item.index, item.embedding[0], len(item.embedding)) for item in answer.data] == [(0, 3.0, 2), (1, 2.0, 2)]
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (5, 5, MODEL)


def test_the_stock_client_asks_for_base64_and_reads_the_same(client: openai.OpenAI, gateway: Any) -> None:
    assert client.embeddings.create(model=MODEL, input="abc", dimensions=2).data[0].embedding[0] == 3.0
    body = {"model": MODEL, "input": [[5, 6], [7]], "encoding_format": "base64"}
    data = gateway.http.post("/v1/embeddings", json=body).json()["data"]
    assert [struct.unpack("<2f", base64.b64decode(item["embedding"])) for item in data] == [(2.0, 5.0), (1.0, 7.0)]


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("input", {"input": []}),
        ("input", {"input": 5}),
        ("input[1]", {"input": ["a", ""]}),
        ("input[0]", {"input": "x" * 300}),
        ("input[0]", {"input": [5] * 300}),
        ("input", {"input": ["a"] * 65}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("dimensions", {"dimensions": 1}),
        ("model", {"model": "tiny-chat+kjv"}),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(gateway: Any, param: str, change: dict[str, Any]) -> None:
    answer = gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"} | change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.fixture
def standing_still(other_worker: Any) -> Any:
    """A worker that answers its status and makes no vectors; `asked` counts requests for them."""
    other_worker.asked = 0

    async def stand(request: Any, context: Any) -> Any:
        other_worker.asked += 1
        await asyncio.sleep(60)

    other_worker.Embed = stand
    other_worker.start()
    return other_worker


def test_a_worker_that_stands_still_is_left_for_another(
    worker: Any, standing_still: Any, start_gateway: Callable[..., Any]
) -> None:
    gateway = start_gateway(
        "--worker", f"{standing_still.address},{worker.address}", "--worker-first-piece-seconds-max", "2.5",
        "--drain-grace-seconds", "0",
    )  # fmt: skip
    end = time.monotonic() + 10
    while gateway.log.count("worker ready") < 2:
        assert time.monotonic() < end, f"both workers are ready; log: {gateway.log}"
        time.sleep(0.01)
    for _ in range(3):
        answer = gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "abc"})
        assert answer.status_code == 200, answer.text
    assert standing_still.asked >= 1


def test_a_lone_worker_that_stands_still_is_told_of_and_left_alone(standing_still: Any, start_gateway: Callable[..., Any]) -> None:
    gateway = start_gateway("--worker", standing_still.address, "--worker-first-piece-seconds-max", "0.2")
    gateway.wait_ready()
    for _ in range(5):
        answer = gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "abc"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "worker_stalled")
    assert gateway.figure("treadle_gateway_breaker_state", worker=standing_still.address) > 0


@pytest.mark.parametrize("header", [("x-request-timeout", "soon"), ("x-treadle-priority", "first")])
def test_a_header_that_says_what_cannot_be_is_refused_by_its_name(gateway: Any, header: tuple[str, str]) -> None:
    answer = gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"}, headers=[header])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, header[0])


def test_the_header_says_how_long_vectors_may_take(standing_still: Any, start_gateway: Callable[..., Any]) -> None:
    gateway = start_gateway("--worker", standing_still.address)
    gateway.wait_ready()
    headers = {"x-request-timeout": "0.3"}
    answer = gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "abc"}, headers=headers)
    assert answer.status_code == 504, answer.text
    assert "0.3 seconds" in answer.json()["error"]["message"]


def test_no_more_workers_are_asked_for_vectors_than_may_be(
    worker: Any, standing_still: Any, start_gateway: Callable[..., Any]
) -> None:
    gateway = start_gateway(
        "--worker", f"{standing_still.address},{worker.address}", "--worker-first-piece-seconds-max", "2.5", "--attempts-max", "1",
    )  # fmt: skip
    end = time.monotonic() + 10
    while gateway.log.count("worker ready") < 2:
        assert time.monotonic() < end, f"both workers are ready; log: {gateway.log}"
        time.sleep(0.01)
    statuses = [gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "abc"}).status_code for _ in range(2)]
    assert sorted(statuses) == [200, 504]  # whoever was not asked for longest comes first


def test_an_engine_that_makes_none_is_named(other_worker: Any, start_gateway: Callable[..., Any]) -> None:
    other_worker.status["embedding_dim"] = 0
    other_worker.start()
    gateway = start_gateway("--worker", other_worker.address)
    gateway.wait_ready()
    answer = gateway.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "embeddings_not_supported")
    assert gateway.http.post("/v1/embeddings", json={"model": "other", "input": "a"}).status_code == 404
