"""A request chooses a long prefix at the door, beside its memory or without one, and its answer says what that did."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from treadle.inference.v1 import worker_pb2

MODEL = "tiny-chat"
HI = [{"role": "user", "content": "hi"}]
VERSION = "2c" * 32


def ask(gateway: Any, prefix: str | None, engram: str = "none", **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HI, "treadle": {"engram": engram, "prefix": prefix}, **more}
    answer: httpx.Response = gateway.http.post("/v1/chat/completions", json=body)
    return answer


@pytest.mark.parametrize(
    ("text", "chosen"),
    [(None, None), ("none", None), ("rules", ("rules", "")), ("rules@2C2C2C2C", ("rules", "2c2c2c2c"))],
)
def test_the_worker_is_asked_for_the_prefix_that_the_request_chose(
    gateway: Any, worker: Any, text: str | None, chosen: tuple[str, str] | None
) -> None:
    answer = ask(gateway, text)
    assert answer.status_code == 200, answer.text
    asked = worker.requests[-1]
    assert ((asked.prefix.name, asked.prefix.version) if asked.HasField("prefix") else None) == chosen
    assert (asked.engram.model, asked.HasField("engram")) == ("", True)
    reports = answer.json()["treadle"]["memory"]
    assert [report["kind"] for report in reports] == ([] if chosen is None else ["prefix"])
    if reports:
        (report,) = reports
        assert (report["name"], report["version"], report["prefix_tokens"]) == ("rules", VERSION, 900)
        assert (report["lookups"], report["lookups_outside"], report["fell_back"]) == (400, 12, False)


def test_a_prefix_and_a_memory_answer_one_request_together(gateway: Any, worker: Any) -> None:
    answer = ask(gateway, "rules", "kjv").json()
    asked = worker.requests[-1]
    assert (asked.engram.model, asked.prefix.name) == ("kjv", "rules")
    assert [report["kind"] for report in answer["treadle"]["memory"]] == ["engram", "prefix"]


def test_the_choices_of_one_request_add_up_their_lookups(gateway: Any) -> None:
    (report,) = ask(gateway, "rules", n=2).json()["treadle"]["memory"]
    assert (report["lookups"], report["lookups_outside"], report["prefix_tokens"]) == (800, 24, 900)


def test_completions_and_streams_choose_in_the_same_way(gateway: Any, worker: Any) -> None:
    body = {"model": MODEL, "prompt": "May a player", "treadle": {"prefix": "rules"}}
    assert gateway.http.post("/v1/completions", json=body).status_code == 200
    assert worker.requests[-1].prefix.name == "rules"
    events = [line for line in ask(gateway, "rules", stream=True).text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1].removeprefix("data: "))
    assert [report["kind"] for report in last["treadle"]["memory"]] == ["prefix"]


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [("guide", "prefix_not_found", "there is 'rules'"), ("foreign", "prefix_mismatch", "'model.rope' differs")],
)
@pytest.mark.parametrize("engram", ["none", "kjv"])
def test_a_prefix_that_cannot_be_had_is_refused_as_the_prefix(gateway: Any, name: str, code: str, told: str, engram: str) -> None:
    answer = ask(gateway, name, engram)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("treadle.prefix", code)
    assert told in error["message"]


def test_a_memory_that_cannot_be_had_is_not_taken_for_the_prefix(gateway: Any) -> None:
    error = ask(gateway, "rules", "bible").json()["error"]
    assert (error["param"], error["code"]) == ("treadle.engram", "engram_not_found")


def test_a_damaged_prefix_is_no_fault_of_the_request(gateway: Any, worker: Any) -> None:
    async def damaged(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        text = "prefix 'rules', version 2c, is damaged: tensor layers.0.keys"
        await context.abort(grpc.StatusCode.DATA_LOSS, text, (("treadle-error", "DataLoss"),))
        yield worker_pb2.GenerateResponse()

    worker.script = damaged
    answer = ask(gateway, "rules")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "prefix_damaged")
    assert "is damaged" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_missed_its_prefix_says_so_in_its_header(gateway: Any, worker: Any, stream: bool) -> None:
    async def off_task(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        report = worker_pb2.MemoryReport(
            kind="prefix", name="rules", version=VERSION, missing_because="off_task", prefix_tokens=900
        )
        yield worker_pb2.GenerateResponse(token_ids=[65], text_delta="A", degraded=True)
        usage = worker_pb2.Usage(prompt_tokens=3, completion_tokens=1)
        yield worker_pb2.GenerateResponse(finish_reason=worker_pb2.FINISH_REASON_STOP, usage=usage, memory=[report], degraded=True)

    worker.script = off_task
    answer = ask(gateway, "rules", stream=stream)
    assert answer.headers["x-treadle-degraded"] == "prefix"
    assert gateway.figure("treadle_gateway_degraded_total", memory="rules", because="off_task") >= 1


def test_the_status_tells_of_each_workers_prefixes(gateway: Any) -> None:
    (worker,) = gateway.http.get("/v1/treadle/status").json()["workers"]
    foreign, rules = worker["prefixes"]
    assert (foreign["name"], foreign["refusal"]) == ("foreign", "made with another language model")
    assert (rules["name"], rules["version"], rules["tokens"], rules["open"], rules["fallbacks"]) == ("rules", VERSION, 900, True, 3)
