"""One HTTP/2 connection to a worker, over which many calls stream.

Owns frames, windows and the numbers of calls. What comes for a call is given to it in the very turn of the loop in which it was
read, for all calls of one read together; connecting is grpc_calls'.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from typing import cast

import grpc
from hpack import Decoder
from hpack.exceptions import HPACKError

from inference_gateway.adapters import http2_frames as h2
from inference_gateway.adapters.grpc_stream import StreamedCall

CONNECTION_WINDOW_BYTES = 1 << 20  # given back as it comes: a call that is not read has its own window, and must not stop others
HEADER_BLOCK_BYTES_MAX = 64 << 10
HEADER_PARTS_MAX = 64  # frames; an empty one costs the worker less than us
UNSENT_BYTES_MAX = 16 << 20  # when the worker wants an answer of the connection itself
SILENT_SECONDS = 1.0  # a call given up sooner says nothing of whether the worker is still there
# A connection that was dropped without a word: one probe after so long without traffic, and what is not acknowledged for so long ends it.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": 20_000}  # s, s, ms
_LAST_NUMBER = (1 << 31) - 1


class GrpcConnection(asyncio.Protocol):
    """Give it to the loop's create_connection. All on that loop."""

    def __init__(self, among: list[GrpcConnection]) -> None:
        """among: where it stands from when it is made until it is lost."""
        self._among = among
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, StreamedCall] = {}
        self._next_number = 1
        self._rest = b""  # of a frame that is not whole
        self._block: tuple[int, bool, list[bytes]] | None = None  # of headers that are not whole: call, whether its last, parts
        self._decoder = Decoder(HEADER_BLOCK_BYTES_MAX)
        self._send_window = self._call_window = h2.WINDOW_BYTES
        self._unacknowledged = 0
        self._frame_bytes, self._calls_max = h2.FRAME_BYTES, _LAST_NUMBER
        self.leaving = False
        """Takes no more calls, whatever those in progress do."""
        self._heard_at = 0.0  # the loop's time when something came
        self.greeted = asyncio.Event()
        """Set once the worker has said how many calls it takes, or the connection is lost."""
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            h2.HEADERS: self._headers, h2.CONTINUATION: self._continuation, h2.RST_STREAM: self._reset, h2.SETTINGS: self._settings,
            h2.PING: self._ping, h2.GOAWAY: self._goaway, h2.WINDOW_UPDATE: self._window_update,
        }  # fmt: skip

    @property
    def takes_calls(self) -> bool:
        """Whether one more call can begin here."""
        return self.lives and len(self._calls) < self._calls_max

    @property
    def lives(self) -> bool:
        """Whether calls can begin here, now or when others have ended."""
        there = self._transport is not None and not self.leaving and not self._transport.is_closing()
        return there and self.greeted.is_set() and self._calls_max > 0

    def begin(self, headers: Iterable[tuple[str, str]], request: bytes, seconds: float) -> StreamedCall:
        """A call with that request, which may take so long. Only while `takes_calls`."""
        number, self._next_number = self._next_number, self._next_number + 2
        call = StreamedCall(number, h2.message(request), self._call_window, self._over, self._consumed)
        self._calls[number] = call
        block = h2.header_block(headers) if number > 1 else h2.NO_TABLE + h2.header_block(headers)
        self._write(h2.header_frames(number, block) + self._body(call))
        call.expire_after(seconds)
        if self._next_number > _LAST_NUMBER:
            self._leave()
        return call

    def close(self) -> None:
        """Close it; calls in progress fail."""
        self._break("the connection was closed here")

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self._among.append(self)
        _probe(transport.get_extra_info("socket"))
        own = h2.settings({h2.ENABLE_PUSH: 0})
        more = h2.number(CONNECTION_WINDOW_BYTES - h2.WINDOW_BYTES)
        self._write(h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0, own) + h2.frame(h2.WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was in progress."""
        self._among.remove(self)
        self._break(f"the connection was lost: {exc}" if exc else "the connection was closed by the worker")

    def data_received(self, data: bytes) -> None:
        """Take frames; a protocol that is not kept ends the connection."""
        self._heard_at = asyncio.get_running_loop().time()
        buffer = self._rest + data if self._rest else data
        at, end = 0, len(buffer)
        try:
            while end - at >= h2.HEAD_BYTES:
                upper, lower, kind, flags, number = h2.HEAD.unpack_from(buffer, at)
                begin = at + h2.HEAD_BYTES
                at = begin + (upper << 8 | lower)
                if at - begin > h2.FRAME_BYTES:
                    raise ValueError(f"a frame of {at - begin} bytes")
                if at > end:
                    at = begin - h2.HEAD_BYTES
                    break
                self._frame(kind, flags, number & h2.ID_MASK, buffer[begin:at])
        except (ValueError, IndexError, struct.error, HPACKError) as error:
            self._break(f"what came is no HTTP/2: {error}")
            return
        self._rest = buffer[at:]

    # -- frames -----------------------------------------------------------------------------------------------------------------

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if (self._block is not None) != (kind == h2.CONTINUATION):
            raise ValueError("headers within headers")
        if not self.greeted.is_set() and kind != h2.SETTINGS:
            raise ValueError("the first frame is not SETTINGS")
        if kind == h2.PUSH_PROMISE:
            raise ValueError("a promise, which was forbidden")
        if kind == h2.DATA:
            self._data(flags, number, payload)
        elif kind in self._handlers:
            self._handlers[kind](flags, number, payload)

    def _data(self, flags: int, number: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged >= CONNECTION_WINDOW_BYTES // 2:
            self._consumed(0, self._unacknowledged)
            self._unacknowledged = 0
        call = self._calls.get(number)
        if call is None:  # given up here
            return
        call.came(h2.without_padding(h2.PADDED, payload) if flags & h2.PADDED else payload, len(payload))
        if flags & h2.END_STREAM:
            call.cut()

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        self._block = (number, bool(flags & h2.END_STREAM), [])
        self._continuation(flags, number, h2.without_padding(flags, payload))

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        assert self._block is not None
        expected, last, parts = self._block
        parts.append(payload)
        if number != expected or len(parts) > HEADER_PARTS_MAX or sum(map(len, parts)) > HEADER_BLOCK_BYTES_MAX:
            raise ValueError("headers of another call" if number != expected else "too many headers")
        if not flags & h2.END_HEADERS:
            return
        self._block = None
        block = self._decoder.decode(b"".join(parts))  # also of a call given up: it has a memory
        headers = {str(name): str(value) for name, value in block}
        if (call := self._calls.get(number)) is not None:
            call.headers_came(headers, last=last)

    def _reset(self, flags: int, number: int, payload: bytes) -> None:
        if (call := self._calls.get(number)) is not None:
            call.was_reset(int.from_bytes(payload, "big"))

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if flags & h2.ACK:
            return
        for name, value in h2.read_settings(payload):
            if not h2.LOWEST.get(name, 0) <= value <= h2.HIGHEST.get(name, value):
                raise ValueError(f"setting {name} is {value}")
            if name == h2.STREAMS_MAX:
                self._calls_max = value
            elif name == h2.FRAME_MAX:
                self._frame_bytes = value
            elif name == h2.INITIAL_WINDOW:
                for call in self._calls.values():
                    call.send_window = h2.checked_window(call.send_window + value - self._call_window)
                self._call_window = value
        self.greeted.set()
        self._answer(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._send_more()

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != h2.PING_BYTES:
            raise ValueError(f"a ping of {len(payload)} bytes")
        if not flags & h2.ACK:
            self._answer(h2.frame(h2.PING, h2.ACK, 0, payload))

    def _goaway(self, flags: int, number: int, payload: bytes) -> None:
        """The worker takes no more calls; those that it has not seen never began."""
        last = int.from_bytes(payload[:4], "big") & h2.ID_MASK
        for call in [call for call in self._calls.values() if call.number > last]:
            call.was_not_begun()
            call.fail(grpc.StatusCode.UNAVAILABLE, "the worker has closed its door")
        self._leave()

    def _window_update(self, flags: int, number: int, payload: bytes) -> None:
        more = h2.read_increment(payload)
        if not number:
            self._send_window = h2.checked_window(self._send_window + more)
        elif (call := self._calls.get(number)) is not None:
            call.send_window = h2.checked_window(call.send_window + more)
        self._send_more()

    # -- what goes out ------------------------------------------------------------------------------------------------------------

    def _send_more(self) -> None:
        for call in [call for call in self._calls.values() if call.unsent]:
            if data := self._body(call):
                self._write(data)

    def _body(self, call: StreamedCall) -> bytes:
        """Frames of a request as far as the windows let it."""
        frames = []
        while call.unsent and (size := min(len(call.unsent), call.send_window, self._send_window, self._frame_bytes)) > 0:
            part, call.unsent = call.unsent[:size], call.unsent[size:]
            call.send_window -= size
            self._send_window -= size
            frames.append(h2.frame(h2.DATA, 0 if call.unsent else h2.END_STREAM, call.number, part))
        if not call.unsent:
            call.unsent = memoryview(b"")  # lets the request go
        return b"".join(frames)

    def _consumed(self, number: int, count: int) -> None:
        """So many bytes more may come: for a call, or with 0 for all."""
        self._write(h2.frame(h2.WINDOW_UPDATE, 0, number, h2.number(count)))

    def _over(self, call: StreamedCall) -> None:
        del self._calls[call.number]
        if call.open_there or call.unsent:
            self._write(h2.frame(h2.RST_STREAM, 0, call.number, h2.number(h2.CANCEL)))
        if call.open_there and self._heard_at < call.began_at <= asyncio.get_running_loop().time() - SILENT_SECONDS:
            self._leave()  # it may be dead, and would hold up one call after another
        elif self.leaving and not self._calls and self._transport is not None:
            self._transport.close()

    def _answer(self, data: bytes) -> None:
        """What the worker asks for as often as it likes, as long as it reads it."""
        self._write(data)
        if self._transport is not None and self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            raise ValueError(f"more than {UNSENT_BYTES_MAX} bytes wait for a worker that asks and does not read")

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _leave(self) -> None:
        self.leaving = True
        if not self._calls and self._transport is not None:
            self._transport.close()

    def _break(self, why: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.leaving = True
        self.greeted.set()
        for call in list(self._calls.values()):
            call.fail(grpc.StatusCode.UNAVAILABLE, why)


def _probe(connected: socket.socket | None) -> None:
    """Have the kernel find out that the other side is gone."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not every system has each
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
