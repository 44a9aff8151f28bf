"""HTTP/1.1 connections whose client must read: uvicorn's protocol, which closes politely and waits for what was not read, with an end.

Owns that end. What is not taken holds neither a request for ever (its route waits in `send`) nor a connection (`close` waits, too).
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any

from inference_gateway.head_timeout import HeadTimedProtocol

TAKEN_BYTES_MIN = 16 << 10  # of an answer that waits, within `timeout_keep_alive` seconds
_FORGET = struct.pack("ii", 1, 0)  # on closing, whatever waits in the kernel


class ReadTimedProtocol(HeadTimedProtocol):
    """Aborts a connection whose client takes less than TAKEN_BYTES_MIN within `timeout_keep_alive` seconds while more waits for it."""

    def __init__(self, *given: Any, on_unread: Callable[[], None], **named: Any) -> None:
        """on_unread: told of every connection that ended so; the rest is uvicorn's."""
        super().__init__(*given, **named)
        self._on_unread = on_unread
        self._look_timer: asyncio.TimerHandle | None = None
        self._unread: int | None = None  # bytes, at the last look; None: nothing had to wait then, or has been taken since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to look now and then."""
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._look_timer is not None:
            self._look_timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """The client has taken what waited."""
        self._unread = None
        super().resume_writing()

    def _look_later(self) -> None:
        self._look_timer = self.loop.call_later(self.timeout_keep_alive, self._look)

    def _look(self) -> None:
        """Abort if too little has been taken since the last look."""
        self._look_later()
        if not (self.flow.write_paused or self.transport.is_closing()):
            return
        before = self._unread
        try:
            self._unread = _unread_bytes(self.transport)
        except OSError:  # its socket is closed, which we hear of in a moment
            return
        if before is not None and before - self._unread < TAKEN_BYTES_MIN:
            self._on_unread()
            connected: socket.socket = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _FORGET)  # else the kernel would go on offering its part
            self.transport.abort()


def _unread_bytes(transport: asyncio.Transport) -> int:
    """What waits here and in the kernel, which gets more from here only once a good part of its own is gone. Raises OSError."""
    in_kernel = array.array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + in_kernel[0]
