"""A gateway process before two scripted workers: what a client sees when one of them dies, freezes or is full."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

MODEL = "tiny-chat"
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": HI}
URL = "/v1/chat/completions"


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


@pytest.fixture
def second(other_worker: Any) -> Any:
    other_worker.start()
    return other_worker


@pytest.fixture
def pair(start_gateway: Any, worker: Any, second: Any) -> Any:
    """A gateway before `worker`, which is asked first of the two while neither is busy, and `second`."""
    gateway = start_gateway(
        "--worker", f"one={worker.address},two={second.address}", "--worker-first-piece-seconds-max", "2.5",
        "--worker-idle-seconds-max", "2.5", "--drain-grace-seconds", "0",
    )  # fmt: skip
    wait_until(lambda: gateway.log.count("worker ready") == 2, "both workers are known")
    return gateway


async def hang(request: Any, context: Any) -> Any:
    await asyncio.sleep(60)
    yield


async def fall_silent(request: Any, context: Any) -> Any:
    from treadle.inference.v1 import worker_pb2

    yield worker_pb2.GenerateResponse(token_ids=b"H", text_delta="H")
    await asyncio.sleep(60)


def hang_at_first(scripts: Any) -> Any:
    """A script for two workers: whoever is asked first hangs, the other one answers."""
    asked: list[str] = []

    async def answer(request: Any, context: Any) -> Any:
        asked.append(request.request_id)
        async for response in (hang if len(asked) == 1 else scripts["hello"])(request, context):
            yield response

    return answer


def test_a_worker_that_stands_still_before_its_answer_costs_a_retry(pair: Any, worker: Any, second: Any, scripts: Any) -> None:
    worker.script = second.script = hang_at_first(scripts)
    answer = pair.chat()
    assert answer.status_code == 200, answer.text
    assert pair.figure("treadle_gateway_retries_total", reason="stalled") == 1
    assert pair.figure("treadle_gateway_worker_stalls_total", when="first") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_worker_that_falls_silent_ends_the_answer_with_an_error_of_its_own_name(
    pair: Any, worker: Any, second: Any, stream: bool
) -> None:
    worker.script = second.script = fall_silent
    answer = pair.chat(stream=stream)
    if stream:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("worker_stalled", "server_error")
    seconds = re.search(r"sent nothing for (\S+) seconds, in the middle", error["message"])
    assert seconds is not None
    assert 2.4 < float(seconds[1]) < 20
    assert len(worker.requests) + len(second.requests) == 1
    wait_until(lambda: worker.cancelled.is_set() or second.cancelled.is_set(), "the worker's call is cancelled")
    assert pair.figure("treadle_gateway_worker_stalls_total", when="between") == 1


def test_a_worker_that_dies_costs_its_requests_a_retry_and_no_error(pair: Any, worker: Any, second: Any) -> None:
    second.stop()
    assert [pair.chat().status_code for _ in range(6)] == [200] * 6
    second.start()


def test_a_full_worker_is_left_for_the_other(pair: Any, worker: Any, second: Any, scripts: Any) -> None:
    worker.script = scripts["refuse_with"](grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert [pair.chat().status_code for _ in range(4)] == [200] * 4
    second.script = worker.script
    full = pair.chat()
    assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")


@pytest.mark.parametrize("how", ["field", "header", "both"])
def test_a_request_may_say_how_long_it_may_take(gateway: Any, worker: Any, scripts: Any, how: str) -> None:
    worker.script = scripts["wait_first"](30)
    field = {"field": 2.5, "both": 50}.get(how)
    headers = {} if how == "field" else {"x-request-timeout": "2.5"}
    body = CHAT | ({"treadle": {"timeout_seconds": field}} if field else {})
    answer = gateway.http.post(URL, json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "2.5 seconds" in answer.json()["error"]["message"]
    assert worker.timeouts[-1] <= 2.501  # on the wire it is rounded up
    assert worker.cancelled.wait(5)


@pytest.mark.parametrize(
    ("headers", "treadle", "sent"),
    [
        ({}, {}, 0),
        ({}, {"priority": "high"}, 50),
        ({"x-treadle-priority": "Low"}, {}, -50),
        ({"x-treadle-priority": "low"}, {"priority": "normal"}, 0),
    ],
)
def test_the_priority_of_a_request_reaches_the_worker(
    gateway: Any, worker: Any, headers: dict[str, str], treadle: dict[str, str], sent: int
) -> None:
    assert gateway.http.post(URL, json=CHAT | {"treadle": treadle}, headers=headers).status_code == 200
    assert worker.requests[-1].priority == sent


@pytest.mark.parametrize(
    ("headers", "treadle", "param"),
    [
        ({"x-request-timeout": "soon"}, {}, "x-request-timeout"),
        ({"x-request-timeout": "-1"}, {}, "x-request-timeout"),
        ({"x-request-timeout": "nan"}, {}, "x-request-timeout"),
        ({"x-treadle-priority": "urgent"}, {}, "x-treadle-priority"),
        ({}, {"timeout_seconds": 0}, "treadle.timeout_seconds"),
        ({}, {"priority": "urgent"}, "treadle.priority"),
    ],
)
def test_a_wrong_time_or_priority_is_refused_by_name(
    gateway: Any, worker: Any, headers: dict[str, str], treadle: dict[str, Any], param: str
) -> None:
    answer = gateway.http.post(URL, json=CHAT | {"treadle": treadle}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not worker.requests


def test_more_requests_than_the_worker_takes_are_refused_at_once_with_the_time_to_come_back(
    start_gateway: Any, worker: Any, scripts: Any
) -> None:
    worker.status["requests_running_max"] = 1
    gateway = start_gateway(
        "--worker", worker.address, "--queue-headroom", "0", "--queue-max", "0", "--queue-wait-seconds-max", "15",
        "--drain-grace-seconds", "0",
    )  # fmt: skip
    gateway.wait_ready()
    worker.script = scripts["endless"]
    with gateway.http.stream("POST", URL, json=CHAT | {"stream": True}) as stream:
        lines = stream.iter_lines()  # kept: its end would close the connection
        next(lines)
        begun = time.monotonic()
        refused = gateway.chat()
        assert time.monotonic() - begun < 10
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert gateway.figure("treadle_gateway_generations", model=MODEL) == 1
    worker.reset()
    assert gateway.figure("treadle_gateway_queue_refusals_total", reason="full") == 1
    wait_until(lambda: gateway.figure("treadle_gateway_generations", model=MODEL) == 0, "the place is free again")
    assert gateway.chat().status_code == 200


def test_a_request_for_more_answers_than_there_are_slots_is_served(start_gateway: Any, worker: Any) -> None:
    worker.status["requests_running_max"] = 1
    gateway = start_gateway("--worker", worker.address, "--queue-headroom", "0", "--queue-max", "0", "--drain-grace-seconds", "0")
    gateway.wait_ready()
    answer = gateway.chat(n=4)
    assert (answer.status_code, len(answer.json().get("choices", ()))) == (200, 4), answer.text


def test_a_request_for_many_answers_holds_no_more_places_than_there_are_and_shuts_nobody_out(
    start_gateway: Any, worker: Any, scripts: Any
) -> None:
    running, most = 0, 0

    async def counted(request: Any, context: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        async for response in scripts["wait_first"](0.2)(request, context):
            running -= bool(response.finish_reason)  # before the gateway can hear of it
            yield response

    worker.status["requests_running_max"], worker.script = 2, counted
    gateway = start_gateway(
        "--worker", worker.address, "--queue-headroom", "0", "--queue-wait-seconds-max", "10", "--drain-grace-seconds", "0"
    )
    gateway.wait_ready()
    answers: list[Any] = []
    with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as client:
        many = {"model": MODEL, "prompt": ["a", "b", "c", "d"], "n": 4}
        asker = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=many)))
        asker.start()
        wait_until(lambda: gateway.figure("treadle_gateway_queue_requests", model=MODEL) == 1, "one answer waits for its place")
        assert gateway.chat().status_code == 200
        assert not answers
        asker.join()
    assert [(answer.status_code, len(answer.json()["choices"])) for answer in answers] == [(200, 16)]
    assert most == 2


def test_no_answer_of_a_request_is_computed_before_the_request_has_its_place(start_gateway: Any, worker: Any, scripts: Any) -> None:
    worker.status["requests_running_max"] = 1
    gateway = start_gateway(
        "--worker", worker.address, "--queue-headroom", "0", "--queue-wait-seconds-max", "10", "--drain-grace-seconds", "0"
    )
    gateway.wait_ready()
    worker.script = scripts["endless"]
    answers: list[Any] = []
    with gateway.http.stream("POST", URL, json=CHAT | {"stream": True}) as stream:
        lines = stream.iter_lines()  # kept: its end would close the connection
        next(lines)
        asker = threading.Thread(target=lambda: answers.append(gateway.chat(n=3)))
        asker.start()
        wait_until(lambda: gateway.figure("treadle_gateway_queue_requests", model=MODEL) == 1, "the request waits for its place")
        assert gateway.figure("treadle_gateway_generations", model=MODEL) == 1
        worker.script = scripts["hello"]
    asker.join()
    assert [(answer.status_code, len(answer.json()["choices"])) for answer in answers] == [(200, 3)]
    assert len(worker.requests) == 4


def test_who_waits_gets_the_place_of_who_ends(start_gateway: Any, worker: Any, scripts: Any) -> None:
    worker.status["requests_running_max"] = 1
    gateway = start_gateway(
        "--worker", worker.address, "--queue-headroom", "0", "--queue-wait-seconds-max", "10", "--drain-grace-seconds", "0"
    )
    gateway.wait_ready()
    worker.script = scripts["wait_first"](0.2)
    codes: list[int] = []
    askers = [threading.Thread(target=lambda: codes.append(gateway.chat().status_code)) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert codes == [200] * 3
    assert gateway.figure("treadle_gateway_queue_wait_seconds_count") == 3
    assert gateway.figure("treadle_gateway_breaker_state", worker=worker.address) == 0


def test_a_second_worker_is_asked_for_a_first_piece_that_does_not_come(
    start_gateway: Any, worker: Any, second: Any, scripts: Any
) -> None:
    gateway = start_gateway(
        "--worker", f"one={worker.address},two={second.address}", "--hedge-seconds", "0.2", "--drain-grace-seconds", "0"
    )
    wait_until(lambda: gateway.log.count("worker ready") == 2, "both workers are known")
    worker.script = second.script = hang_at_first(scripts)
    assert gateway.chat().status_code == 200
    assert gateway.figure("treadle_gateway_hedges_total", outcome="won") == 1
    wait_until(lambda: worker.cancelled.is_set() or second.cancelled.is_set(), "the slower one is stopped")
