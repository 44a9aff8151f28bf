"""The OpenAPI document describes what the gateway does."""

from __future__ import annotations

import json
import re
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


def test_requests_are_described_field_by_field(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert {"model", "messages"} == set(chat["required"])
    assert {"temperature", "stop", "stream_options", "treadle", "top_logprobs"} <= set(chat["properties"])
    assert document["components"]["schemas"]["TreadleOptions"]["additionalProperties"] is False
