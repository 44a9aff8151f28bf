"""Requests that cannot be served: each is refused by name, with OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

MODEL = "tiny-chat"
HI = [{"role": "user", "content": "hi"}]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
WRONG_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "[]"}}
CHAT_REFUSALS = [
    ("temperature", {"temperature": "0.5"}),
    ("temperature", {"temperature": 2.5}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("seed", {"seed": 2**64}),
    ("stop", {"stop": 5}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": [1]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("messages[1].tool_calls[0].function", {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
    ("model", {"model": None}),
    ("model", {"model": ""}),
    ("treadle", {"treadle": 1}),
    ("treadle.memory", {"treadle": {"memory": "x"}}),
    ("treadle.prefix", {"treadle": {"prefix": "unknown"}}),
    ("treadle.prefix", {"treadle": {"prefix": ""}}),
    ("treadle.prefix", {"treadle": {"prefix": "default"}}),
    ("treadle.prefix", {"treadle": {"prefix": "rules@1b1b1b"}}),
    ("treadle.prefix", {"treadle": {"prefix": "rules@" + "1" * 65}}),
    ("treadle.prefix", {"treadle": {"prefix": 1}}),
    ("treadle.session", {"treadle": {"session": "s1"}}),
    ("treadle.engram", {"treadle": {"engram": "another"}}),
    ("treadle.engram", {"treadle": {"engram": ""}}),
    ("treadle.engram", {"treadle": {"engram": "kjv@1b1b1b1"}}),
    ("treadle.engram", {"treadle": {"engram": "kjv@" + "1" * 65}}),
    ("treadle.engram", {"treadle": {"engram": "kjv@version1"}}),
    ("treadle.engram", {"treadle": {"engram": 1}}),
    ("treadle.policy.late", {"treadle": {"policy": {"late": "zero"}}}),
    ("treadle.policy.wait_seconds_max", {"treadle": {"policy": {"wait_seconds_max": 31}}}),
    ("treadle.policy.retry", {"treadle": {"policy": {"retry": 1}}}),
    ("n", {"n": 9}),
    ("n", {"n": 0}),
    ("n", {"n": True}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools[0].type", {"tools": [{"type": "search"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}),
    ("messages[1].tool_calls", {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}]}),
    ("messages[1].tool_calls[0].function.arguments", {"messages": [*HI, {"role": "assistant", "tool_calls": [WRONG_CALL]}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
    ("logit_bias.5", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"five": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {str(2**32): 1}}),
    ("logit_bias", {"logit_bias": {"1" * 5000: 1}}),
    (
        "messages[1].tool_calls[0].function.arguments",
        {"messages": [*HI, {"role": "assistant", "tool_calls": [HALF_CALL]}]},
    ),
    ("logit_bias", {"logit_bias": {str(token): 1 for token in range(1025)}}),
    ("frequency_penalty", {"frequency_penalty": 2.5}),
    ("presence_penalty", {"presence_penalty": -3}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("modalities", {"modalities": ["audio"]}),
    ("store", {"store": True}),
]
COMPLETION_REFUSALS = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": ["a"] * 17}),
    ("prompt", {"prompt": ["a", ""]}),
    ("n", {"n": 9}),
    ("prompt[1]", {"prompt": [1, "a"]}),
    ("prompt[0]", {"prompt": [-1]}),
    ("prompt[0][1]", {"prompt": [[1, True]]}),
    ("logprobs", {"logprobs": True}),
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "x"}),
    ("best_of", {"best_of": 3}),
]


@pytest.mark.parametrize(("param", "change"), CHAT_REFUSALS)
def test_a_chat_with_a_wrong_field_is_refused_by_its_name(gateway: Any, param: str, change: dict[str, Any]) -> None:
    error = error_of(gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI} | change), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


@pytest.mark.parametrize(("param", "change"), COMPLETION_REFUSALS)
def test_a_completion_with_a_wrong_field_is_refused_by_its_name(gateway: Any, param: str, change: dict[str, Any]) -> None:
    error = error_of(gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"} | change), 400)
    assert error["param"] == param


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(gateway: Any, missing: str) -> None:
    body = {name: value for name, value in {"model": MODEL, "messages": HI}.items() if name != missing}
    error = error_of(gateway.http.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


def test_fields_at_the_values_that_ask_for_nothing_are_taken(gateway: Any) -> None:
    nothing = {
        "n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {},
        "frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": False, "store": False, "stop": None,
        "top_k": -1, "min_p": 0, "repetition_penalty": 1.0,
        "treadle": {"engram": None, "prefix": None, "session": None, "policy": {}},
    }  # fmt: skip
    assert gateway.chat(**nothing).status_code == 200
    assert gateway.chat(treadle={"engram": "smollm2-demo"}).status_code == 200
    body = {"model": MODEL, "prompt": "a", "best_of": 1, "echo": False, "suffix": ""}
    assert gateway.http.post("/v1/completions", json=body).status_code == 200


def test_unknown_fields_are_ignored_and_counted_under_few_names(gateway: Any) -> None:
    name = "treadle_gateway_ignored_fields_total"
    metadata, other = gateway.figure(name, field="metadata"), gateway.figure(name, field="other")
    assert gateway.chat(user="u1", metadata={"a": "b"}, brand_new=1, newer=[1]).status_code == 200
    assert gateway.figure(name, field="metadata") == metadata + 1
    assert gateway.figure(name, field="other") == other + 2


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"a": 1}garbage', b"\xff\xfe", b"[" * 50_00, b'{"model": "\xff"}'])
def test_a_body_that_is_no_json_object_is_refused(gateway: Any, body: bytes) -> None:
    error = error_of(gateway.http.post("/v1/chat/completions", content=body), 400)
    assert "JSON" in error["message"]


def test_json_is_taken_whatever_its_content_type_is_said_to_be(gateway: Any) -> None:
    body = json.dumps({"model": MODEL, "messages": HI})
    answer = gateway.http.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 200


def test_an_unpaired_surrogate_is_no_json_and_breaks_nothing(gateway: Any) -> None:
    body = b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "\\ud800"}]}'
    error_of(gateway.http.post("/v1/chat/completions", content=body), 400)


def test_a_body_over_the_limit_is_refused_with_413(gateway: Any) -> None:
    error = error_of(gateway.chat("a" * 30_000), 413)
    assert "20000" in error["message"]


def test_a_chunked_body_over_the_limit_is_refused_with_413(gateway: Any) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(300):
            yield b" " * 1000

    error_of(gateway.http.post("/v1/chat/completions", content=chunks()), 413)


def test_a_large_body_is_answered_with_413_and_not_with_a_reset(gateway: Any) -> None:
    error_of(gateway.http.post("/v1/chat/completions", content=b" " * (8 << 20)), 413)


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(gateway: Any) -> None:
    error = error_of(gateway.chat("a" * 300), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "256" in error["message"]


def test_more_tokens_than_fit_are_refused_with_the_limit(gateway: Any) -> None:
    error = error_of(gateway.chat("a" * 100, max_tokens=200), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "256" in error["message"]
    assert gateway.chat("a" * 100, max_tokens=100).status_code == 200


def test_unknown_paths_and_methods_are_refused_in_the_same_form(gateway: Any) -> None:
    error_of(gateway.http.get("/v1/nothing"), 404)
    refused = gateway.http.get("/v1/chat/completions")
    error_of(refused, 405)
    assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("code", "status", "error_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, None),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "overloaded"),
        (grpc.StatusCode.UNAVAILABLE, 503, "unavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
        (grpc.StatusCode.INTERNAL, 502, "worker_failed"),
        (grpc.StatusCode.DATA_LOSS, 502, "worker_failed"),
        (grpc.StatusCode.UNAUTHENTICATED, 503, "unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_worker_has_its_own_status(
    gateway: Any, worker: Any, scripts: Any, code: grpc.StatusCode, status: int, error_code: str | None, stream: bool
) -> None:
    worker.script = scripts["refuse_with"](code, "as the test wants it", ("treadle-retry-after-seconds", "2.5"))
    answer = gateway.chat(stream=stream)
    assert error_of(answer, status)["code"] == error_code
    assert gateway.process.poll() is None
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert answer.headers["retry-after"] == "3"
    elif status == 503:
        assert answer.headers["retry-after"] == "1"
    assert ("as the test wants it" in answer.text) == (status != 502 and code is not grpc.StatusCode.UNAUTHENTICATED)


def test_an_end_without_a_last_message_is_no_answer(gateway: Any, worker: Any) -> None:
    async def nothing(request: Any, context: Any) -> Any:
        return
        yield

    worker.script = nothing
    assert error_of(gateway.chat(), 503)["code"] == "unavailable"


def test_a_request_id_is_kept_if_it_can_be_and_made_if_not(gateway: Any, worker: Any) -> None:
    url, body = "/v1/chat/completions", {"model": MODEL, "messages": HI}
    answer = gateway.http.post(url, json=body, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert worker.requests[-1].request_id == "mine-1"
    assert answer.json()["id"] == "chatcmpl-mine-1"
    made = gateway.http.post(url, json=body, headers={"x-request-id": "not a fit id"}).headers["x-request-id"]
    assert len(made) == 32
    assert gateway.http.get("/v1/nothing").headers["x-request-id"]


def test_ids_that_the_worker_does_not_know_are_told_of_as_the_prompt(gateway: Any, worker: Any, scripts: Any) -> None:
    worker.script = scripts["refuse_with"](grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids: ids are 0 to 257, got 1 to 300")
    error = error_of(gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": [1, 300]}), 400)
    assert error["param"] == "prompt"
    assert error["message"] == "'prompt': ids are 0 to 257, got 1 to 300"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"}, {"host": "127.evil.example:8000"}, {"host": "127.0.0.1@evil.example"}, {"host": "10.0.0.1"},
        {"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://localhost.evil.example"},
    ],
)  # fmt: skip
def test_without_keys_web_pages_of_other_hosts_are_refused(gateway: Any, worker: Any, headers: dict[str, str]) -> None:
    body = {"model": MODEL, "messages": HI}
    error = error_of(gateway.http.post("/v1/chat/completions", json=body, headers=headers), 403)
    assert error["code"] == "not_local"
    assert "api_key_file" in error["message"]
    assert worker.requests == []


@pytest.mark.parametrize(
    "headers", [{"host": "LOCALHOST:80"}, {"host": "[::1]:8000"}, {"host": "127.0.0.2"}, {"origin": "http://localhost:3000"}]
)
def test_without_keys_programs_and_pages_of_this_machine_are_served(gateway: Any, headers: dict[str, str]) -> None:
    assert gateway.http.get("/v1/models", headers=headers).status_code == 200
