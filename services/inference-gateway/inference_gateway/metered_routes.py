"""The limits of a key around the routes that generate: requests and calls before them, headers that tell how they stand.

Owns which routes count and how the limits are told, as OpenAI tells them. Tokens are charged where they are known (domain.limits).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_gateway.domain.errors import RateLimited
from inference_gateway.domain.limits import KeyUse, Standing
from inference_gateway.domain.ports import Figures
from inference_gateway.frame import record_of
from inference_gateway.replies import error_reply

METERED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})


class MeteredRoutes:
    """An ASGI application around another; within Frame, which knows whose key was shown."""

    def __init__(self, inner: ASGIApp, figures: Figures) -> None:
        self._inner, self._figures = inner, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; those of other routes, and of callers without limits, pass through."""
        use = record_of(scope).caller.use if scope["type"] == "http" and scope["path"] in METERED else None
        if use is None:
            await self._inner(scope, receive, send)
            return
        told = _TellingSend(send, use)
        try:
            use.begin()
        except RateLimited as error:
            await error_reply(error)(scope, receive, told)
            self._figures.request_limited(error.limit, record_of(scope).caller.tenant_name)
            return
        try:
            await self._inner(scope, receive, told)
        finally:
            use.end()


class _TellingSend:
    """Adds how the limits stand to the headers of an answer."""

    def __init__(self, send: Send, use: KeyUse) -> None:
        self._send, self._use = send, use

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in ratelimit_headers(self._use.standings()):
                headers[name] = value
        await self._send(message)


def ratelimit_headers(standings: Iterable[Standing]) -> Iterable[tuple[str, str]]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`; a reset is told as OpenAI tells it: `250ms`, `6.5s`, `1m0s`."""
    for standing in standings:
        yield f"x-ratelimit-limit-{standing.name}", str(standing.limit)
        yield f"x-ratelimit-remaining-{standing.name}", str(standing.remaining)
        yield f"x-ratelimit-reset-{standing.name}", duration(standing.reset_seconds)


def duration(seconds: float) -> str:
    """Rounded up to a millisecond, so that nobody comes back too early."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    told = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{told}" if minutes else told
