"""The OpenAPI document: routes written here, schemas taken from the models of requests and answers.

Owns the description alone; what it describes is checked by http_models and typed by answer_models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from inference_gateway import answer_models, http_models, status_answer

_Json = dict[str, Any]
_REF = "#/components/schemas/{model}"
_SCHEMAS = (
    http_models.ChatCompletionRequest, http_models.CompletionRequest, http_models.EmbeddingRequest,
    answer_models.ChatCompletion, answer_models.ChatCompletionChunk, answer_models.Completion,
    answer_models.EmbeddingList, answer_models.Cancelled, answer_models.ModelList, answer_models.ModelAnswer, answer_models.ErrorAnswer,
    answer_models.Health, answer_models.Readiness, answer_models.Version, status_answer.FabricStatus,
)  # fmt: skip
_FRAME_ERRORS = {  # of every route
    "403": "The gateway has no keys and the request came by way of a web page, or under a name that is not this machine's.",
    "431": "Target and headers are too large.",
}
_KEY_ERRORS = {"401": "No key, or not the right one."}  # of every route that asks for one
_GENERATION_ERRORS = {
    "400": "The body is not JSON, a field is wrong or not supported (`param` names it), or the prompt is too long.",
    "404": "The model is not served here, or there is no memory of that name for it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "The key has used what it may in this minute, or has too many requests at once; see Retry-After.",
    "499": "The request was cancelled by its caller before there was anything to answer.",
    "502": "The worker failed, or the memory that was chosen is damaged.",
    "503": "No worker is ready, or too many requests are waiting; see Retry-After.",
    "504": "Not complete within the time limit.",
}


def openapi_document(version: str) -> _Json:
    """An OpenAPI 3.1 document as JSON."""
    _, definitions = TypeAdapter.json_schemas(
        [(schema.__name__, "validation", TypeAdapter(schema)) for schema in _SCHEMAS], ref_template=_REF
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "treadle inference gateway",
            "version": version,
            "description": "OpenAI-compatible chat, completions and embeddings. Fields that are not listed are ignored, unless they ask for "
            "something that is not supported yet: then they are refused by name.",
        },
        "paths": {path: {verb: _framed(operation) for verb, operation in verbs.items()} for path, verbs in _paths().items()},
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> _Json:
    key: list[_Json] = [{"key": []}, {}]  # {}: a gateway on loopback may ask for none
    model_errors = {"503": "No worker was met yet."}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/chat/completions": {
            "post": _generation("Continue a chat", "ChatCompletionRequest", "ChatCompletion", "ChatCompletionChunk")
            | {"security": key}
        },
        "/v1/completions": {
            "post": _generation("Continue a text", "CompletionRequest", "Completion", "Completion") | {"security": key}
        },
        "/v1/embeddings": {"post": _posted("Make vectors of texts", "EmbeddingRequest", "EmbeddingList") | {"security": key}},
        "/v1/requests/{request_id}/cancel": {"post": _cancel() | {"security": key}},
        "/v1/models": {
            "get": _look("The model, and an alias `MODEL+MEMORY` for each memory that can be chosen", "ModelList", model_errors)
            | {"security": key}
        },
        "/v1/models/{model}": {
            "get": _look("One model, or an alias of it", "ModelAnswer", model_errors | {"404": "The model is not served here."})
            | {"security": key, "parameters": [name]}
        },
        "/v1/treadle/status": {"get": _look("How gateway, workers and pools are", "FabricStatus", {}) | {"security": key}},
        "/": {"get": _text("A page with status, charts and a chat, for people", "text/html")},
        "/health": {"get": _look("Whether the process lives", "Health", {})},
        "/ready": {"get": _ready()},
        "/version": {"get": _look("Versions", "Version", {})},
        "/metrics": {"get": _text("Figures in Prometheus's format", "text/plain") | {"security": key}},
        "/openapi.json": {"get": _text("This document", "application/json")},
    }


def _framed(operation: _Json) -> _Json:
    """An operation with what may come of it before its route has it."""
    errors = _FRAME_ERRORS | (_KEY_ERRORS if "security" in operation else {})
    return operation | {"responses": operation["responses"] | _errors(errors)}


def _posted(summary: str, request: str, answer: str) -> _Json:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {"200": {"description": summary, "content": _content(answer)}, **_errors(_GENERATION_ERRORS)},
    }


def _cancel() -> _Json:
    told = "It is told to end: its answer is what there is of it, with the finish reason `abort`."
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "summary": "End a request of the same tenant, by its X-Request-Id or the id of its answer",
        "parameters": [request_id],
        "responses": {
            "200": {"description": told, "content": _content("Cancelled")},
            **_errors({"404": "No such request of this tenant is in progress."}),
        },
    }


def _generation(summary: str, request: str, answer: str, chunk: str) -> _Json:
    told = "The whole answer, or with `stream` events: `data: <chunk>`, at the end `data: [DONE]`."
    content = _content(answer) | {"text/event-stream": {"schema": _event(chunk)}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {"200": {"description": told, "content": content}, **_errors(_GENERATION_ERRORS)},
    }


def _event(chunk: str) -> _Json:
    """One event of a stream, which clients read as an object: its data is a chunk, an error, or the end."""
    said = [{"contentMediaType": "application/json", "contentSchema": _ref(each)} for each in (chunk, "ErrorAnswer")]
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, *said]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _look(summary: str, answer: str, errors: Mapping[str, str]) -> _Json:
    return {"summary": summary, "responses": {"200": {"description": summary, "content": _content(answer)}, **_errors(errors)}}


def _ready() -> _Json:
    looked = _look("Whether a request would be served now", "Readiness", {})
    looked["responses"]["503"] = {"description": "It would not; the reason says why.", "content": _content("Readiness")}
    return looked


def _text(summary: str, media_type: str) -> _Json:
    return {"summary": summary, "responses": {"200": {"description": summary, "content": {media_type: {}}}}}


def _errors(descriptions: Mapping[str, str]) -> _Json:
    return {status: {"description": text, "content": _content("ErrorAnswer")} for status, text in descriptions.items()}


def _content(schema: str) -> _Json:
    return {"application/json": {"schema": _ref(schema)}}


def _ref(schema: str) -> _Json:
    return {"$ref": _REF.format(model=schema)}
