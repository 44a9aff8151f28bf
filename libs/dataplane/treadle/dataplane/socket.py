"""The socket door: listens, and leaves everything else to native threads. Also the two small requests of who opens a door.

Owns addresses and who may listen where. Frames are `src/frames.hpp`; lookups of clients are in `remote`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, ResourceExhausted, Unavailable
from treadle.dataplane.extension import native_module
from treadle.dataplane.faults import error_of
from treadle.dataplane.queue import DeadlineQueue
from treadle.dataplane.versions import Versions

CONNECTIONS_MAX = 4096  # of one server, a thread each
REPLY_BYTES_MAX = 1 << 30  # of all replies of a server in the works together, where nobody says otherwise
UNIX_MODE = 0o660  # owner and group: as the segments
NO_DIGEST = bytes(32)  # stands where there is no token

_HEADER = struct.Struct("<IHHQQqqQQIi32s32s32s")  # FrameHeader
_MAGIC, _PROTOCOL, _BACKLOG = 0x4C445254, 1, 128
_PING, _TOKEN_MAP, _ROWS, _FAULT, _PONG = 3, 4, 16, 17, 18
_TOKEN_MAP_BYTES_MAX = 4 << 24  # 16 million tokens
_FAULT_TEXT_MAX = 256


class SocketServer:
    """Serves `versions` on TCP and Unix sockets; rows are gathered by `queue`. Close it before the queue.

    listen:          host:port (port 0 takes a free one) or unix:PATH; a host beyond loopback needs tokens
    queue:           its tenants say which tokens are known; none: nobody is asked for one
    connections_max: at once, 1 to CONNECTIONS_MAX; more are turned away. Beside them, 16 peers that have not yet sent a request
                     with a known token: when these places are taken, who has been silent longest yields to a newcomer
    reply_bytes_max: of all replies in the works together; requests beyond it are refused
    idle_seconds:    a connection without a request for so long is closed
    stall_seconds:   a peer that stops within a message for so long is cut; so is one that takes a reply, beyond
                     this time, at less than 16 MiB a second
    greet_seconds:   a connection without a first request for so long is closed

    Raises InvalidArgument for an address that may not be listened on, Unavailable for one that is taken, or without the
    native extension.
    """

    def __init__(
        self, queue: DeadlineQueue, versions: Versions, listen: Sequence[str], *,
        connections_max: int = 64, reply_bytes_max: int = REPLY_BYTES_MAX, idle_seconds: float = 600.0, stall_seconds: float = 5.0,
        greet_seconds: float = 2.0,
    ) -> None:  # fmt: skip
        if not 1 <= connections_max <= CONNECTIONS_MAX:
            raise InvalidArgument(f"connections_max: 1 to {CONNECTIONS_MAX}, got {connections_max}")
        if reply_bytes_max < 1 or not 0 < stall_seconds <= 3600 or not 0 < idle_seconds <= 86400 or not 0 < greet_seconds <= 3600:
            raise InvalidArgument("reply_bytes_max is >= 1, stall_seconds and greet_seconds 0 to 3600, idle_seconds 0 to 86400")
        self._paths: list[Path] = []
        with contextlib.ExitStack() as made:
            sockets = [made.enter_context(self._listener(address, tokens=bool(queue.tenants.tokens))) for address in listen]
            self.addresses = tuple(_name(each) for each in sockets)
            arguments = (queue.native_engine(), versions.native, [each.fileno() for each in sockets])
            try:
                self._native: Any = native_module().SocketServer(
                    *arguments, connections_max, reply_bytes_max, idle_seconds, stall_seconds, greet_seconds
                )
            except OSError as error:
                raise ResourceExhausted(f"socket: the system grants no thread or descriptor: {error}") from error
            finally:
                for each in sockets:
                    each.detach()  # the native side's, whatever came of it

    def drain(self) -> None:
        """Refuse new requests as UNAVAILABLE; those in the works go on."""
        self._native.drain()

    def close(self) -> None:
        """End every connection and thread; nothing is read for a request afterwards. A second call does nothing."""
        self._native.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths = []

    def stats(self) -> dict[str, int]:
        """Counters: connections now, connections_total, cut_total, requests_total, refused_total, rows_total, bytes_total."""
        counters: dict[str, int] = self._native.stats()
        return counters

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _listener(self, address: str, *, tokens: bool) -> socket.socket:
        family, place = parse_address(address)
        if isinstance(place, tuple) and not tokens and not ipaddress.ip_address(place[0]).is_loopback:
            raise InvalidArgument(f"socket: {address} is beyond loopback; give tokens, or listen on 127.0.0.1 or unix:PATH")
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            if isinstance(place, str):
                _remove_stale(Path(place))
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            if isinstance(place, str):
                self._paths.append(Path(place))
                Path(place).chmod(UNIX_MODE)
            listener.listen(_BACKLOG)
        except BaseException as error:
            listener.close()
            if not isinstance(error, OSError):
                raise
            raise Unavailable(f"socket: cannot listen on {address}: {error.strerror or error}") from error
        return listener


def parse_address(address: str) -> tuple[int, str | tuple[str, int]]:
    """Family and place of host:port or unix:PATH, names resolved. Raises InvalidArgument, and Unavailable for an unknown name."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path or len(os.fsencode(path)) > 107:  # sun_path
            raise InvalidArgument(f"address: a path of 1 to 107 bytes belongs behind unix:, got {address!r}")
        return socket.AF_UNIX, path
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"address: host:port or unix:PATH, got {address!r}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"address: {host} is not known: {error}") from error
    family, _, _, _, place = found[0]
    return family, (str(place[0]), int(place[1]))


def numeric_address(address: str) -> str:
    """The same address without names, as native code takes it."""
    family, place = parse_address(address)
    if isinstance(place, str):
        return f"unix:{place}"
    return f"[{place[0]}]:{place[1]}" if family == socket.AF_INET6 else f"{place[0]}:{place[1]}"


def token_digest(token: str | None) -> bytes:
    """What stands for a token in frames: its sha256; zeros for none."""
    return NO_DIGEST if token is None else hashlib.sha256(token.encode()).digest()


def ping(address: str, *, token: str | None = None, timeout_seconds: float = 1.0) -> None:
    """Ask whether a door answers. Raises Unavailable, AccessDenied, ResourceExhausted when it has no place left."""
    _ask(address, _PING, b"", (token_digest(token), NO_DIGEST, NO_DIGEST), 0, _PONG, timeout_seconds)


def fetch_token_map(
    address: str, version: str, fingerprint: bytes, layer: int, *, token: str | None = None, timeout_seconds: float = 5.0
) -> NDArray[np.int32] | None:
    """The token map with which a version's owner hashes, int32 [vocabulary]; None where its family has none.

    Raises Unavailable, NotFound, AccessDenied; the caller compares its digest with the manifest's.
    """
    body = struct.pack("<iIq", layer, 0, 0)
    digests = (token_digest(token), bytes.fromhex(version), fingerprint)
    data = _ask(address, _TOKEN_MAP, body, digests, 1, _ROWS, timeout_seconds)
    return np.frombuffer(data, dtype="<i4").astype(np.int32) if data else None


def _ask(address: str, kind: int, body: bytes, digests: Sequence[bytes], layers: int, wanted: int, timeout_seconds: float) -> bytes:
    family, place = parse_address(address)
    request = _HEADER.pack(_MAGIC, _PROTOCOL, kind, 1, len(body), round(timeout_seconds * 1e9), 0, 0, 0, layers, 0, *digests) + body
    until = time.monotonic() + timeout_seconds
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(place)
            with contextlib.suppress(BrokenPipeError):  # turned away: what it said before it closed is still to be read
                connection.sendall(request)
            return _answer(connection, address, wanted, until)
    except OSError as error:
        raise Unavailable(f"{address}: no answer at the socket door: {error}") from error


def _answer(connection: socket.socket, address: str, wanted: int, until: float) -> bytes:
    data = b""
    while True:
        magic, protocol, kind, _, length, _, _, offset, total, _, fault = _HEADER.unpack(_exactly(connection, _HEADER.size, until))[
            :11
        ]
        if magic != _MAGIC or protocol != _PROTOCOL or kind not in (wanted, _FAULT):
            raise DataLoss(f"{address}: what answers there does not speak this protocol")
        if kind == _FAULT:
            text = _exactly(connection, min(length, _FAULT_TEXT_MAX), until).decode(errors="replace")
            raise error_of(fault, address, text)
        if offset != len(data) or offset + length > total or total > _TOKEN_MAP_BYTES_MAX:
            raise DataLoss(f"{address}: a reply of {total} bytes with a piece of {length} at {offset}")
        data += _exactly(connection, length, until)
        if len(data) == total:
            return data


def _exactly(connection: socket.socket, count: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time was over")
        connection.settimeout(left)
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


def _name(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"[{name[0]}]:{name[1]}" if listener.family == socket.AF_INET6 else f"{name[0]}:{name[1]}"


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on any more: a killed process leaves it behind."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidArgument(f"socket: {path} is there and is no socket; give another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        outcome = probe.connect_ex(str(path))
    if outcome == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
