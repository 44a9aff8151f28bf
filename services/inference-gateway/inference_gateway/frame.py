"""What surrounds every HTTP request: its id, its key, its figures, and the last word on errors.

Owns nothing that a route does. Per-request success is counted, not logged.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_gateway.domain.api_keys import ANYBODY, ApiKeys, Caller
from inference_gateway.domain.errors import HeadTooLarge, PageRefused
from inference_gateway.domain.ports import Figures
from inference_gateway.local_callers import check_local
from inference_gateway.replies import error_reply, kind_of
from inference_gateway.request_head import HeadLimits, check_head
from treadle.chassis.bug_report import bug_report
from treadle.chassis.tracing import annotate, server_span
from treadle.contract.errors import AccessDenied
from treadle.contract.trace import TRACEPARENT, TRACESTATE, parse_trace

log = logging.getLogger("treadle.gateway.http")
RECORD = "treadle.request"  # where the record stands in an ASGI scope
GUARDED = "/v1/"  # what needs a key; the rest is for probes and people who look for the door, and the routes hide what is not
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
TRACED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
_ROUTES = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models",
        "/", "/v1/treadle/status", "/health", "/ready", "/version", "/metrics", "/openapi.json",
    }
)  # fmt: skip
_OUTCOMES = {408: "late", 429: "limited", 503: "busy", 504: "late"}


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request: set by the frame, corrected by routes that fail after their status was sent."""

    request_id: str
    route: str
    caller: Caller = ANYBODY
    outcome: str | None = None
    worker: str = ""  # who answers, once somebody does
    begun_seconds: float = field(default_factory=time.monotonic)


class Frame:
    """The outermost ASGI application."""

    def __init__(self, inner: ASGIApp, keys: ApiKeys, figures: Figures, head: HeadLimits) -> None:
        self._inner, self._keys, self._figures, self._head = inner, keys, figures, head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(_request_id(headers), route_of(scope["path"]))
        scope[RECORD] = record
        framed = _FramedSend(send, record)
        self._figures.request_began(record.route)
        try:
            check_head(scope, self._head)
            if not self._keys.any:
                check_local(headers)
            if scope["path"].startswith(GUARDED):
                record.caller = self._keys.caller_of(headers.get("authorization"))
            await self._traced(scope, headers, receive, framed, record)
        except (AccessDenied, PageRefused, HeadTooLarge) as error:
            await error_reply(error)(scope, receive, framed)
        except Exception as error:
            record.outcome = "failed"
            fields = {"request": record.request_id, "route": record.route, "bug": bug_report(error)}
            log.error("bug in a request", extra=fields)
            if not framed.status:
                await error_reply(error)(scope, receive, framed)
        finally:
            outcome = record.outcome or outcome_of(framed.status)
            self._figures.request_ended(record.route, outcome, time.monotonic() - record.begun_seconds)

    async def _traced(self, scope: Scope, headers: Headers, receive: Receive, framed: _FramedSend, record: RequestRecord) -> None:
        """The request within its span, where it is one that others are called for."""
        if record.route not in TRACED:
            await self._inner(scope, receive, framed)
            return
        parent = parse_trace(headers.get(TRACEPARENT), ",".join(headers.getlist(TRACESTATE)))
        with server_span(f"POST {record.route}", parent, begins=True):
            try:
                await self._inner(scope, receive, framed)
            finally:
                outcome = record.outcome or outcome_of(framed.status)
                annotate(
                    {
                        "treadle.request_id": record.request_id,
                        "http.response.status_code": framed.status,
                        "treadle.outcome": outcome,
                    }
                )


class _FramedSend:
    """Passes messages on, adds the request id and the worker to the headers, and notes the status."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send, self._record = send, record
        self.status = 0  # not sent yet

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._record.request_id
            if self._record.worker:
                headers["x-treadle-worker"] = self._record.worker
        await self._send(message)


def record_of(scope: Scope) -> RequestRecord:
    """The record that the frame put into `scope`."""
    record = scope[RECORD]
    assert isinstance(record, RequestRecord)
    return record


def route_of(path: str) -> str:
    """The metric label of a path: one of a few."""
    if path in _ROUTES:
        return path
    if path.startswith("/v1/requests/") and path.endswith("/cancel"):
        return "/v1/requests/{id}/cancel"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def outcome_of(status: int) -> str:
    """The metric label of a status; 0, nothing sent, is a request that was cut off."""
    if 0 < status < 400:
        return "ok"
    return _OUTCOMES.get(status, "refused" if 400 <= status < 500 else "failed")


def outcome_of_error(error: Exception) -> str:
    """The metric label of an error that comes after the status was sent."""
    return outcome_of(kind_of(error).status)


def _request_id(headers: Headers) -> str:
    shown = headers.get("x-request-id", "")
    return shown if REQUEST_ID.fullmatch(shown) else uuid.uuid4().hex
