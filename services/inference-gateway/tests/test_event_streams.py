"""Streams on the wire: framing, silence, errors after the status was sent, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

MODEL = "tiny-chat"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def events_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


def send_request(gateway: Any, **more: Any) -> socket.socket:
    """A chat request over a bare connection that the test can close at any moment."""
    host, port = gateway.ready["listen"].split(":")
    body = json.dumps(BODY | more).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_events_are_data_lines_and_the_last_is_done(gateway: Any) -> None:
    answer = gateway.chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]
    events = events_of(answer.text)
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_half_a_character_makes_no_event(gateway: Any) -> None:
    chunks = [json.loads(event.removeprefix("data: ")) for event in events_of(gateway.chat(stream=True).text)[:-1]]
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "H", "é", " ", "t", "h", "e", "r", "e", None]


def test_an_error_after_the_first_event_is_an_event_and_then_done(gateway: Any, worker: Any, scripts: Any) -> None:
    failed = gateway.figure("treadle_gateway_requests_total", route="/v1/chat/completions", outcome="busy")
    worker.script = scripts["broken"]
    answer = gateway.chat(stream=True)
    assert answer.status_code == 200
    events = events_of(answer.text)
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert events[-1] == "data: [DONE]"
    assert gateway.figure("treadle_gateway_requests_total", route="/v1/chat/completions", outcome="busy") == failed + 1
    assert "stream ended early" in gateway.log


def test_an_answer_made_with_memory_missing_says_so(gateway: Any, worker: Any, scripts: Any) -> None:
    counted = {"memory": "smollm2-demo", "because": "late"}
    before = gateway.figure("treadle_gateway_degraded_total", **counted)
    worker.script = scripts["degraded"]
    whole, stream = gateway.chat(), gateway.chat(stream=True)
    last = json.loads(events_of(stream.text)[-2].removeprefix("data: "))
    for told in (whole.json()["treadle"], last["treadle"]):
        assert told["degraded"] is True
        assert (told["memory"][0]["name"], told["memory"][0]["missing_because"]) == ("smollm2-demo", "late")
    assert [answer.headers["x-treadle-degraded"] for answer in (whole, stream)] == ["engram", "engram"]
    assert gateway.figure("treadle_gateway_degraded_total", **counted) == before + 2
    worker.reset()
    assert "x-treadle-degraded" not in gateway.chat().headers


def test_a_client_that_leaves_a_stream_stops_the_worker(gateway: Any, worker: Any, scripts: Any) -> None:
    left = gateway.figure("treadle_gateway_client_disconnects_total")
    worker.script = scripts["endless"]
    connection = send_request(gateway, stream=True)
    assert b"200 OK" in connection.recv(4096)
    assert not worker.cancelled.is_set()
    connection.close()
    assert worker.cancelled.wait(5)
    wait_until(lambda: gateway.figure("treadle_gateway_client_disconnects_total") == left + 1, "the departure is counted")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_stops_the_worker(
    gateway: Any, worker: Any, scripts: Any, stream: bool
) -> None:
    worker.script = scripts["wait_first"](60)
    connection = send_request(gateway, stream=stream)
    wait_until(lambda: bool(worker.requests), "the worker is asked")
    connection.close()
    assert worker.cancelled.wait(5)


def test_a_client_that_leaves_while_a_whole_answer_is_made_stops_the_worker(gateway: Any, worker: Any, scripts: Any) -> None:
    worker.script = scripts["endless"]
    connection = send_request(gateway)
    wait_until(lambda: bool(worker.requests), "the worker is asked")
    connection.close()
    assert worker.cancelled.wait(5)


def test_a_client_that_leaves_while_it_sends_its_body_costs_nothing(gateway: Any, worker: Any) -> None:
    left = gateway.figure("treadle_gateway_client_disconnects_total")
    host, port = gateway.ready["listen"].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    wait_until(
        lambda: gateway.figure("treadle_gateway_client_disconnects_total") > left, "the departure is counted"
    )  # others' may be too, late
    assert worker.requests == []


def test_a_connection_is_used_again_after_a_stream(gateway: Any) -> None:
    with socket.create_connection(tuple(gateway.ready["listen"].split(":")), timeout=10) as connection:
        for _ in range(2):
            body = json.dumps(BODY | {"stream": True}).encode()
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
            )
            came = b""
            while not came.endswith(b"0\r\n\r\n"):
                came += connection.recv(4096)
            assert b"[DONE]" in came


def test_silence_is_filled_with_comments_that_open_the_stream(
    start_gateway: Any, worker: Any, scripts: Any, session_worker: Any
) -> None:
    commented = threading.Event()

    async def wait_for_the_comment(request: Any, context: Any) -> Any:
        await asyncio.to_thread(commented.wait, 10)
        async for response in scripts["hello"](request, context):
            yield response

    gateway = start_gateway("--worker", session_worker.address, "--keep-alive-seconds", "0.1")
    gateway.wait_ready()
    worker.script = wait_for_the_comment
    with gateway.http.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as answer:
        parts = answer.iter_text()
        first = next(parts)
        assert first.startswith(": keep-alive\n\n")
        commented.set()
        assert events_of(first + "".join(parts))[-1] == "data: [DONE]"


def test_a_refusal_after_a_comment_is_an_event(start_gateway: Any, worker: Any, session_worker: Any) -> None:
    commented = threading.Event()

    async def refuse_late(request: Any, context: Any) -> Any:
        await asyncio.to_thread(commented.wait, 10)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield

    gateway = start_gateway("--worker", session_worker.address, "--keep-alive-seconds", "0.1")
    gateway.wait_ready()
    worker.script = refuse_late
    with gateway.http.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as answer:
        assert answer.status_code == 200
        parts = answer.iter_text()
        first = next(parts)
        commented.set()
        events = events_of(first + "".join(parts))
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "overloaded"


def test_the_time_limit_of_a_request_ends_it(start_gateway: Any, worker: Any, scripts: Any, session_worker: Any) -> None:
    gateway = start_gateway("--worker", session_worker.address, "--request-timeout-seconds", "2.5")
    gateway.wait_ready()
    worker.script = scripts["endless"]
    whole = gateway.chat()
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "deadline_exceeded"
    events = events_of(gateway.chat(stream=True).text)
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert worker.timeouts[-1] < 2.6  # what was left, not a fresh value; gRPC rounds it up


def test_a_client_that_does_not_read_holds_the_worker_back_and_then_loses_it(
    start_gateway: Any, worker: Any, scripts: Any, session_worker: Any
) -> None:
    sent = 0

    async def counted_flood(request: Any, context: Any) -> Any:
        nonlocal sent
        async for response in scripts["flood"](request, context):
            yield response
            sent += 1

    gateway = start_gateway("--worker", session_worker.address, "--request-timeout-seconds", "2.5")
    gateway.wait_ready()
    worker.script = counted_flood
    with send_request(gateway, stream=True):
        assert worker.cancelled.wait(10)
    assert sent < 1000  # 64 MB; what it sends without being held back in that time is several times as much


def test_figures_of_an_answer_are_counted(gateway: Any) -> None:
    def figures() -> list[float]:
        tokens = [gateway.figure("treadle_gateway_tokens_total", kind=kind) for kind in ("prompt", "completion", "cached")]
        return [
            *tokens,
            gateway.figure("treadle_gateway_time_to_first_token_seconds_count"),
            gateway.figure("treadle_gateway_inter_token_seconds_count"),
            gateway.figure("treadle_gateway_requests_total", route="/v1/chat/completions", outcome="ok"),
            gateway.figure("treadle_gateway_request_seconds_count", route="/v1/chat/completions"),
        ]

    before = figures()
    prompt_tokens = gateway.chat().json()["usage"]["prompt_tokens"]
    assert [after - earlier for after, earlier in zip(figures(), before, strict=True)] == [prompt_tokens, 9, 3, 1, 8, 1, 1]
    assert gateway.figure("treadle_gateway_requests_in_flight") == 1  # the look at the figures itself
