"""Server-sent events: opened by the first of them, kept alive, ended with `[DONE]`.

Owns the framing. Until the stream is open, an error can still be answered with its own status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Send

from inference_gateway.replies import json_bytes

FAREWELL_SECONDS = 5.0  # for the last event to leave: a client that reads nothing must not hold the request
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class EventStream:
    """The answer to one request as events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()  # events and keep-alive comments come from two tasks
        self.opened = False

    async def event(self, content: Mapping[str, Any]) -> None:
        """Send one object."""
        await self._write(b"data: " + json_bytes(content) + b"\n\n")

    async def finish(self, last: Mapping[str, Any] | None = None) -> None:
        """Send `last` if given, `[DONE]`, and end the answer. Gives up on a client that does not read."""
        text = b"" if last is None else b"data: " + json_bytes(last) + b"\n\n"
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._write(text + b"data: [DONE]\n\n", more=False)
        except TimeoutError:
            return

    @asynccontextmanager
    async def kept_alive(self, seconds: float) -> AsyncIterator[None]:
        """Send a comment every `seconds` while the body runs, so that nothing on the way takes the silence for an end."""
        task = asyncio.create_task(self._comment_every(seconds))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _comment_every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._write(b": keep-alive\n\n")

    async def _write(self, text: bytes, *, more: bool = True) -> None:
        async with self._lock:
            if not self.opened:
                self.opened = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send({"type": "http.response.body", "body": text, "more_body": more})
