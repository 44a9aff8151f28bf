"""Requests that their callers end by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "tiny-chat"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def cancel(gateway: Any, request_id: str, **headers: str) -> httpx.Response:
    answer: httpx.Response = gateway.http.post(f"/v1/requests/{request_id}/cancel", headers=headers)
    return answer


def cancel_soon(gateway: Any, request_id: str) -> threading.Thread:
    """Cancel a request as soon as it is there."""

    def run() -> None:
        for _ in range(2000):
            if cancel(gateway, request_id).status_code == 200:
                return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("asked", ["mine-1", "chatcmpl-mine-1"])
def test_a_stream_ends_well_with_the_reason_abort_and_what_was_used(gateway: Any, worker: Any, scripts: Any, asked: str) -> None:
    worker.script = scripts["endless"]
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    events: list[str] = []
    with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"}) as stream:
        assert stream.headers["x-request-id"] == "mine-1"
        for line in stream.iter_lines():
            if not line.startswith("data: "):
                continue
            events.append(line.removeprefix("data: "))
            if len(events) == 4:
                told = cancel(gateway, asked)
                assert (told.status_code, told.json()) == (200, {"id": asked, "cancelled": True})
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    assert chunks[-2]["choices"][0]["finish_reason"] == "abort"
    assert chunks[-1]["usage"]["completion_tokens"] >= 3
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    assert worker.cancelled.wait(5)
    assert worker.requests[-1].request_id == "mine-1"
    assert cancel(gateway, asked).status_code == 404


def test_an_answer_that_comes_whole_holds_what_there_was(gateway: Any, worker: Any, scripts: Any) -> None:
    worker.script = scripts["endless"]
    before = gateway.figure("treadle_gateway_requests_total", route="/v1/chat/completions", outcome="cancelled")
    thread = cancel_soon(gateway, "mine-2")
    answer = gateway.http.post("/v1/chat/completions", json=CHAT | {"n": 2}, headers={"x-request-id": "mine-2"})
    thread.join()
    if answer.status_code == 200:
        body = answer.json()
        assert [choice["finish_reason"] for choice in body["choices"]] == ["abort", "abort"]
        assert body["usage"]["completion_tokens"] == sum(len(choice["message"]["content"]) for choice in body["choices"])
    else:  # it was there before its prompt was encoded
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
    after = gateway.figure("treadle_gateway_requests_total", route="/v1/chat/completions", outcome="cancelled")
    assert after == before + 1


def test_a_name_that_nobody_uses_is_not_found(gateway: Any) -> None:
    answer = cancel(gateway, "no-such-request")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
    assert gateway.http.get("/v1/requests/x/cancel").status_code == 405


def test_another_tenants_request_is_not_found(worker: Any, scripts: Any, start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one-key-of-sixteen-letters\nanother-key-of-sixteen\n")
    keys.chmod(0o600)
    gateway = start_gateway("--worker", worker.address, "--api-key-file", str(keys))
    gateway.wait_ready()
    worker.script = scripts["endless"]
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one-key-of-sixteen-letters", "another-key-of-sixteen"))
    body, named = CHAT | {"stream": True}, mine | {"x-request-id": "shared-name"}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=named) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert cancel(gateway, "shared-name", **other).status_code == 404
        assert cancel(gateway, "shared-name").status_code == 401
        assert cancel(gateway, "shared-name", **mine).status_code == 200
        assert list(lines)[-2] == "data: [DONE]"


def test_a_request_id_that_is_not_fit_is_replaced_by_ours(gateway: Any, worker: Any) -> None:
    for shown in ("a b", "x" * 129, "é".encode().decode("latin-1")):
        answer = gateway.http.post("/v1/chat/completions", json=CHAT, headers=[("x-request-id", shown.encode("latin-1"))])
        assert len(answer.headers["x-request-id"]) == 32
        assert worker.requests[-1].request_id == answer.headers["x-request-id"]
        assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
