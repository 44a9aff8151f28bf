"""Whole JSON answers and the error table: which of our errors is which HTTP status, in OpenAI's error object.

Owns statuses, error types and codes, and Retry-After. What is not in the table is our bug: 500 without details.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from inference_gateway.answer_models import ErrorAnswer, TreadleAnswer
from inference_gateway.domain.errors import (
    BodyTooLarge,
    BodyTooSlow,
    HeadTooLarge,
    MemoryDamaged,
    ModelNotFound,
    PageRefused,
    PrefixDamaged,
    RateLimited,
    RequestCancelled,
    RequestNotFound,
    RequestRefused,
    WorkerStalled,
)
from treadle.contract.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # json.dumps makes a new one for each call
DEGRADED = "x-treadle-degraded"  # names the kinds of memory that an answer missed
RETRY_SECONDS = 1.0  # where an error does not say when to try again


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of errors is told. `message` replaces the error's own, which is for our log."""

    status: int
    type: str
    code: str | None = None
    param: str | None = None
    message: str | None = None
    retry: bool = False


ERROR_KINDS: dict[type[Exception], ErrorKind] = {
    RequestRefused: ErrorKind(400, "invalid_request_error"),  # names the field and the code itself
    InvalidArgument: ErrorKind(400, "invalid_request_error"),  # the worker found what the gateway could not
    AccessDenied: ErrorKind(401, "invalid_request_error", "invalid_api_key"),
    PageRefused: ErrorKind(403, "invalid_request_error", "not_local"),
    ModelNotFound: ErrorKind(404, "invalid_request_error", "model_not_found", "model"),
    BodyTooSlow: ErrorKind(408, "invalid_request_error", "request_timeout"),
    RequestNotFound: ErrorKind(404, "invalid_request_error", "request_not_found"),
    RequestCancelled: ErrorKind(499, "invalid_request_error", "request_cancelled"),  # as nginx calls a client that went
    BodyTooLarge: ErrorKind(413, "invalid_request_error", "request_too_large"),
    RateLimited: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded", retry=True),
    HeadTooLarge: ErrorKind(431, "invalid_request_error", "headers_too_large"),
    TreadleError: ErrorKind(502, "server_error", "worker_failed", message="the worker failed; the gateway's log has the details"),
    MemoryDamaged: ErrorKind(502, "server_error", "engram_damaged"),  # says which, and why
    PrefixDamaged: ErrorKind(502, "server_error", "prefix_damaged", "treadle.prefix"),
    ResourceExhausted: ErrorKind(503, "server_error", "overloaded", retry=True),
    Unavailable: ErrorKind(503, "server_error", "unavailable", retry=True),
    WorkerStalled: ErrorKind(504, "server_error", "worker_stalled"),
    DeadlineExceeded: ErrorKind(504, "server_error", "deadline_exceeded"),
}
_BUG = ErrorKind(500, "server_error", "internal_error", message="internal error; the gateway's log has the details")


def kind_of(error: Exception) -> ErrorKind:
    """The entry of the nearest class of `error` in the table."""
    return next((ERROR_KINDS[cls] for cls in type(error).__mro__ if cls in ERROR_KINDS), _BUG)


def error_answer(error: Exception) -> ErrorAnswer:
    """OpenAI's error object for `error`."""
    kind = kind_of(error)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return error_object(kind.message or str(error), kind.type, param or kind.param, code or kind.code)


def error_object(message: str, type: str, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_reply(error: Exception) -> Response:
    """The whole answer for `error`."""
    kind = kind_of(error)
    headers = {}
    if kind.retry:
        seconds = getattr(error, "retry_after_seconds", None) or RETRY_SECONDS
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if kind.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_reply(error_answer(error), kind.status, headers)


def degraded_headers(treadle: TreadleAnswer | None) -> dict[str, str]:
    """The header of an answer made with memory missing; none for any other."""
    if treadle is None or not treadle["degraded"]:
        return {}
    kinds = sorted({memory["kind"] for memory in treadle["memory"] if memory["rows_missing"] or memory["missing_because"]}) or [
        "engram"
    ]
    return {DEGRADED: ",".join(kinds)}


def json_reply(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(json_bytes(content), status, headers, media_type="application/json")


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Compact JSON in ASCII alone: no byte of it can end a line of an event, and unpaired surrogates survive."""
    return _ENCODER.encode(content).encode("ascii")
