"""Server-sent events: opened by the first of them, kept alive, ended with `[DONE]`.

Owns the framing. Until the stream is open, an error can still be answered with its own status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
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
        self.headers = list(_HEADERS)
        """Sent with the first event: more may be added before it."""
        self.opened = False

    async def events(self, contents: Sequence[Mapping[str, Any]]) -> None:
        """Send objects, an event each, in one write; nothing for none."""
        if contents:
            await self._write(_events(contents))

    async def event(self, json: bytes) -> None:
        """Send one object that is JSON already."""
        await self._write(b"data: " + json + b"\n\n")

    async def finish(self, last: Sequence[Mapping[str, Any]] = ()) -> None:
        """Send the last objects, `[DONE]`, and end the answer, in one write. Gives up on a client that does not read."""
        text = _events(last)
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
                await self._send({"type": "http.response.start", "status": 200, "headers": self.headers})
            await self._send({"type": "http.response.body", "body": text, "more_body": more})


def _events(contents: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join([b"data: " + json_bytes(content) + b"\n\n" for content in contents])
