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
from inference_gateway.domain.errors import PageRefused
from inference_gateway.domain.ports import Figures
from inference_gateway.local_callers import check_local
from inference_gateway.replies import error_reply, kind_of
from treadle.contract.errors import AccessDenied

log = logging.getLogger("treadle.gateway.http")
RECORD = "treadle.request"  # where the record stands in an ASGI scope
GUARDED = "/v1/"  # what needs a key; the rest is for probes, scrapers and people who look for the door
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ROUTES = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/models",
        "/health", "/ready", "/version", "/metrics", "/openapi.json",
    }
)  # fmt: skip
_OUTCOMES = {408: "late", 503: "busy", 504: "late"}


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request: set by the frame, corrected by routes that fail after their status was sent."""

    request_id: str
    route: str
    caller: Caller = ANYBODY
    outcome: str | None = None
    begun_seconds: float = field(default_factory=time.monotonic)


class Frame:
    """The outermost ASGI application."""

    def __init__(self, inner: ASGIApp, keys: ApiKeys, figures: Figures) -> None:
        self._inner, self._keys, self._figures = inner, keys, figures

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
            if not self._keys.any:
                check_local(headers)
            if scope["path"].startswith(GUARDED):
                record.caller = self._keys.caller_of(headers.get("authorization"))
            await self._inner(scope, receive, framed)
        except (AccessDenied, PageRefused) as error:
            await error_reply(error)(scope, receive, framed)
        except Exception as error:
            record.outcome = "failed"
            log.exception("bug in a request", extra={"request": record.request_id, "route": record.route})
            if not framed.status:
                await error_reply(error)(scope, receive, framed)
        finally:
            outcome = record.outcome or outcome_of(framed.status)
            self._figures.request_ended(record.route, outcome, time.monotonic() - record.begun_seconds)


class _FramedSend:
    """Passes messages on, adds the request id to the headers, and notes the status."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send, self._record = send, record
        self.status = 0  # not sent yet

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._record.request_id
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
    return shown if _REQUEST_ID.fullmatch(shown) else uuid.uuid4().hex
