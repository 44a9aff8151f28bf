"""What a request may also say in a header, for callers that cannot reach its body: how long it may take, its
priority, and the session that it belongs to."""

from __future__ import annotations

from dataclasses import replace

from starlette.datastructures import Headers

from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import Priority
from inference_gateway.http_models import TIMEOUT_SECONDS_MAX
from inference_gateway.request_parsing import Order

TIMEOUT, PRIORITY, SESSION = "x-request-timeout", "x-treadle-priority", "x-session-id"


def timeout_of(headers: Headers) -> float | None:
    """Seconds in `X-Request-Timeout`; None without one. Raises RequestRefused for what is no number above 0."""
    text = headers.get(TIMEOUT)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TIMEOUT_SECONDS_MAX:  # also for what is not a number
        raise RequestRefused(f"'{TIMEOUT}': seconds above 0, up to {TIMEOUT_SECONDS_MAX:g}", param=TIMEOUT, code="invalid_value")
    return seconds


def priority_of(headers: Headers) -> Priority | None:
    """The class in `X-Treadle-Priority`; None without one. Raises RequestRefused for another word."""
    text = headers.get(PRIORITY)
    if text is None:
        return None
    try:
        return Priority(text.strip().lower())
    except ValueError:
        raise RequestRefused(f"'{PRIORITY}': {', '.join(Priority)}", param=PRIORITY, code="invalid_value") from None


def session_of(headers: Headers) -> str:
    """What `X-Session-Id` says; "" without one."""
    return headers.get(SESSION, "").strip()


def with_headers(order: Order, timeout_seconds: float | None, priority: Priority | None, session: str) -> Order:
    """The order with what the headers say: of two times the shorter counts, of two priorities the body's, of two sessions the header's."""
    times = [seconds for seconds in (order.timeout_seconds, timeout_seconds) if seconds is not None]
    wishes = tuple(replace(wish, priority=wish.priority or priority, session=session or wish.session) for wish in order.wishes)
    return replace(order, wishes=wishes, timeout_seconds=min(times, default=None))
