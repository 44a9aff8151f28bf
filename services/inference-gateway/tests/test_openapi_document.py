"""The OpenAPI document describes what the gateway does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

VERBS = ("get", "post")


@pytest.fixture
def document(gateway: Any) -> dict[str, Any]:
    answer = gateway.http.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def test_it_is_openapi_3_1_and_all_references_lead_somewhere(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert references
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(document["components"]["schemas"])


def test_every_path_in_it_is_served_and_every_operation_has_answers(document: dict[str, Any], gateway: Any) -> None:
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            assert verb in VERBS
            assert "200" in operation["responses"]
            served = gateway.http.request(verb.upper(), path.replace("{model}", "tiny-chat"))
            assert str(served.status_code) in operation["responses"], path


@pytest.mark.parametrize(
    ("status", "headers"), [(403, {"host": "page.example"}), (431, {f"x-{number}": "" for number in range(100)})]
)
def test_what_is_refused_before_any_route_has_it_is_described_for_all(
    document: dict[str, Any], gateway: Any, status: int, headers: dict[str, str]
) -> None:
    for path, verb, operation in operations(document):
        answer = gateway.http.request(verb, path, headers=headers)
        assert answer.status_code == status, path
        assert described_as_an_error(operation, status), path


def test_every_route_that_asks_for_a_key_says_so(
    document: dict[str, Any], start_gateway: Any, session_worker: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    keys.chmod(0o600)
    guarded = start_gateway("--worker", session_worker.address, "--listen", "0.0.0.0:0", "--api-key-file", str(keys))
    guarded.http.base_url = f"http://127.0.0.1:{guarded.ready['listen'].split(':')[1]}"
    for path, verb, operation in operations(document):
        asks = guarded.http.request(verb, path).status_code == 401
        assert asks == described_as_an_error(operation, 401) == ("security" in operation), path


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(path, verb, what the document says) of all of it."""
    return [(path, verb.upper(), operation) for path, verbs in document["paths"].items() for verb, operation in verbs.items()]


def described_as_an_error(operation: dict[str, Any], status: int) -> bool:
    content = operation["responses"].get(str(status), {}).get("content", {})
    return bool(content == {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}})


def test_requests_are_described_field_by_field(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert {"model", "messages"} == set(chat["required"])
    assert {"temperature", "stop", "stream_options", "treadle", "top_logprobs"} <= set(chat["properties"])
    assert document["components"]["schemas"]["TreadleOptions"]["additionalProperties"] is False
