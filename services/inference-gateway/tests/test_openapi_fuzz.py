"""Whatever a stranger sends that the OpenAPI document allows, or does not, is answered, and never by a server error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed: make test installs it (TOOLS in the Makefile)"
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny-chat", "prompt": "hi"},
    "/v1/embeddings": {"model": "tiny-chat", "input": "hi"},
}
EXAMPLES, SECONDS_MAX = 25, 10.0  # of each operation; less than a minute for all


@pytest.fixture(scope="session")
def described(session_gateway: Any) -> Any:
    return schemathesis.openapi.from_url(f"{session_gateway.url}/openapi.json")


OPERATIONS = [
    *(("POST", path) for path in (*GOOD, "/v1/requests/{request_id}/cancel")),
    *(
        ("GET", path)
        for path in ("/v1/models", "/v1/models/{model}", "/v1/treadle/status", "/health", "/ready", "/version", "/openapi.json")
    ),
]


def run(described: Any, gateway: Any, method: str, path: str, mode: Any) -> list[int]:
    """Send generated requests, the same ones each time; the statuses of their answers."""
    operation = described[path][method]
    sent: list[int] = []

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: Any) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if path in GOOD and isinstance(case.body, dict) and case.body and data.draw(st.booleans()):
            kept = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=2))
            case.body = {name: case.body[name] for name in kept} | GOOD[path]  # or nothing would get as far as the worker
        allow_time(case.body)
        answer = case.call(base_url=gateway.url, timeout=SECONDS_MAX)
        sent.append(answer.status_code)
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error, *conformance()])

    check()
    return sent


def allow_time(body: Any) -> None:
    """Of a body that says how long its answer may take: enough. Less is answered by a 504, and rightly."""
    wish = body.get("treadle") if isinstance(body, dict) else None
    if isinstance(wish, dict) and type(wish.get("timeout_seconds")) in (int, float) and 0 < wish["timeout_seconds"] < SECONDS_MAX:
        wish["timeout_seconds"] = SECONDS_MAX


def conformance() -> list[Any]:
    """The status is described, and the answer is of the described type and shape."""
    from schemathesis.specs.openapi import checks

    return [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_requests_that_the_document_allows_are_answered_as_it_says(described: Any, gateway: Any, method: str, path: str) -> None:
    statuses = run(described, gateway, method, path, schemathesis.GenerationMode.POSITIVE)
    assert 200 in statuses or path.endswith(("/cancel", "{model}")), "none of them was served"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_event_of_a_stream_is_of_the_shape_that_the_document_has(described: Any, gateway: Any, path: str) -> None:
    operation = described[path]["POST"]
    case = operation.Case(
        body=GOOD[path] | {"stream": True, "stream_options": {"include_usage": True}}, media_type="application/json"
    )
    answer = case.call(base_url=gateway.url, timeout=SECONDS_MAX)
    assert answer.text.count("data: ") > 2
    case.validate_response(answer, checks=conformance())


@pytest.mark.parametrize("path", GOOD)
def test_requests_that_the_document_does_not_allow_are_refused(described: Any, gateway: Any, path: str) -> None:
    assert 400 in run(described, gateway, "POST", path, schemathesis.GenerationMode.NEGATIVE)


def test_the_document_is_all_that_is_fuzzed(described: Any) -> None:
    there = {(operation.ok().method.upper(), operation.ok().path) for operation in described.get_all_operations()}
    assert there - set(OPERATIONS) == {("GET", "/metrics"), ("GET", "/")}  # no JSON, and nothing to vary
