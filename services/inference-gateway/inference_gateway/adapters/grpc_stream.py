"""One gRPC call whose answer streams: messages in the order in which they came, then how it ended.

Owns the messages that wait for their reader, and what the end says. Frames and the connection are grpc_connection's.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import unquote

import grpc
import grpc.aio

from inference_gateway.adapters.http2_frames import REFUSED, WINDOW_BYTES

MESSAGE_BYTES_MAX = 8 << 20  # as the SDK's channels take
_PREFIX = struct.Struct(">BI")  # compressed, length
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_HTTP = {400: 13, 401: 16, 403: 7, 404: 12, 429: 14, 502: 14, 503: 14, 504: 14}  # gRPC's table for answers that are not its own
DEADLINE_SLACK_SECONDS = 0.01  # the other side counts down a rounded number, and its clock may tell it before ours tells us
_RESETS = {REFUSED: grpc.StatusCode.UNAVAILABLE, 0x8: grpc.StatusCode.CANCELLED, 0xB: grpc.StatusCode.RESOURCE_EXHAUSTED}


class StreamedCall:
    """One reader, on the event loop.

    unsent:      of the request; send_window: bytes of it that the other side takes now
    open_there:  the other side has not ended it; began_at: the loop's time
    not_begun:   the other side says that it has not looked at it (RFC 9113, 8.7)
    """

    def __init__(
        self, number: int, unsent: bytes, send_window: int, over: Callable[[StreamedCall], None],
        consumed: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """over: told once, when it has ended there or here; consumed: told the number and how many bytes more may come."""
        self.number, self.unsent, self.send_window = number, memoryview(unsent), send_window
        self._over, self._consumed = over, consumed
        self.open_there, self.not_begun = True, False
        self._heard = False
        self._buffer = bytearray()  # of a message that is not whole
        self._held = 0  # bytes of the answer that the other side was not told to be consumed
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: tuple[grpc.StatusCode, grpc.aio.Metadata, str] | None = None  # no error: raised, it would hold its raiser
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._expires_seconds = math.inf
        self.began_at = self._loop.time()
        self.ended = False

    def expire_after(self, seconds: float) -> None:
        """End it here, with DEADLINE_EXCEEDED, after so long."""
        self._expires_seconds = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    async def read(self) -> bytes | None:
        """The next message; None once the call has ended well. Raises AioRpcError once it has not."""
        while not self._messages:
            if self.ended:
                if self._failure is None:
                    return None
                code, metadata, text = self._failure
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, text)
            self._waiter = self._loop.create_future()
            await self._waiter
        message = self._messages.popleft()
        if not self._messages:
            self._give_back()
        return message

    def close(self) -> None:
        """The reader wants no more: a call in progress is cancelled."""
        self.fail(grpc.StatusCode.CANCELLED, "cancelled here")

    # -- what the connection tells ---------------------------------------------------------------------------------------------

    def came(self, data: bytes, counted: int) -> None:
        """Bytes of the answer; `counted` of its window, with what padded them. Raises ValueError for more than that lets through."""
        self._heard = True
        self._held += counted
        if self._held > WINDOW_BYTES:
            raise ValueError("more than the window of a call")
        if self._buffer:
            self._buffer += data
        buffer = self._buffer or data
        at, end = 0, len(buffer)
        while end - at >= 5:
            compressed, size = _PREFIX.unpack_from(buffer, at)
            if compressed or size > MESSAGE_BYTES_MAX:
                what = "a compressed message" if compressed else f"a message of {size} bytes, above {MESSAGE_BYTES_MAX}"
                self.fail(grpc.StatusCode.INTERNAL, f"the worker sent {what}")
                return
            if at + 5 + size > end:
                break
            self._messages.append(bytes(buffer[at + 5 : at + 5 + size]))
            at += 5 + size
        if self._buffer:
            del self._buffer[:at]
        else:
            self._buffer += data[at:]
        if self._messages:
            self._wake()
        else:
            self._give_back()  # a message may be larger than the window

    def headers_came(self, headers: Mapping[str, str], *, last: bool) -> None:
        """The head of the answer, or with `last` its end."""
        self.open_there, self._heard = not last, True
        status = headers.get(":status", "200")
        if status.startswith("1"):  # more is to come
            if last:
                self.cut()
        elif status != "200" and "grpc-status" not in headers:
            code = _CODES[_HTTP.get(int(status) if status.isdecimal() else 0, 2)]
            self.fail(code, f"HTTP status {status[:16]}")
        elif last:
            self._end(headers)

    def cut(self) -> None:
        """The answer ended without a status."""
        self.open_there = False
        self.fail(grpc.StatusCode.INTERNAL, "the answer ended without a status")

    def was_reset(self, error: int) -> None:
        """The other side gave it up; at the deadline that is how it says so."""
        self.open_there, self.unsent = False, memoryview(b"")
        if self._loop.time() >= self._expires_seconds - DEADLINE_SLACK_SECONDS:
            self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if error == REFUSED:
            self.was_not_begun()
        self.fail(_RESETS.get(error, grpc.StatusCode.INTERNAL), f"the call was reset with HTTP/2 error {error}")

    def was_not_begun(self) -> None:
        """The other side says that it has not looked at it, nor will; of one that it has begun to answer that is not believed."""
        self.not_begun = not self._heard and not self.ended

    def fail(self, code: grpc.StatusCode, text: str, trailers: Mapping[str, str] | None = None) -> None:
        """End it with an error. Nothing once it has ended."""
        if self.ended:
            return
        own = ((name, value) for name, value in (trailers or {}).items() if not name.startswith((":", "grpc-", "content-")))
        self._failure = code, grpc.aio.Metadata(*own), text
        self._finish()

    def _end(self, trailers: Mapping[str, str]) -> None:
        told = trailers.get("grpc-status", "")
        code = _CODES.get(int(told)) if told.isdecimal() else None
        if code is grpc.StatusCode.OK and not self._buffer and not self.ended:
            self._finish()
        elif code is grpc.StatusCode.OK:
            self.fail(grpc.StatusCode.INTERNAL, "the answer ended within a message")
        else:
            self.fail(code or grpc.StatusCode.UNKNOWN, unquote(trailers.get("grpc-message", "")), trailers)

    def _finish(self) -> None:
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._over(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _give_back(self) -> None:
        if self._held >= WINDOW_BYTES // 2 and not self.ended:
            self._consumed(self.number, self._held)
            self._held = 0
