"""HTTP/1.1 connections that must say what they want: uvicorn's protocol with a time limit on the head of a request.

Owns that limit, and what is said to a head that is no HTTP or too large before it is whole. The body's is request_body's; the time between requests is uvicorn's, which forgets it at the first byte
of the next head and sets none on the first.
"""

from __future__ import annotations

import asyncio
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference_gateway.replies import error_object, json_bytes


class HeadTimedProtocol(H11Protocol):
    """Closes a connection whose request head is not complete within `timeout_keep_alive` seconds, however it trickles in."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head that is not complete do not prolong its time."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be parsed, and close. uvicorn calls this while it handles h11's error, which knows the status."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if status == 431:
            answer = error_object("the head of the request is too large", "invalid_request_error", code="headers_too_large")
        else:
            answer = error_object("this is not HTTP/1.1", "invalid_request_error")
        body = json_bytes(answer)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of another answer there is nothing to say
            headers = [
                (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")
            ]  # fmt: skip
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
