"""Calls of one worker whose answers stream, without gRPC's own client: that takes 0.1 ms of the event loop's core for each message,
which is more than all that the gateway itself does for a piece of an answer.

Owns the connections to one endpoint and what every call carries. Calls with one answer go by the SDK.
"""

from __future__ import annotations

import asyncio
import re
import ssl

import grpc
import grpc.aio

from inference_gateway.adapters.grpc_connection import GrpcConnection
from inference_gateway.adapters.grpc_stream import StreamedCall
from inference_gateway.adapters.http2_frames import timeout_text
from treadle.client import Endpoint
from treadle.contract import Deadline
from treadle.contract.errors import InvalidArgument

CONNECT_SECONDS_MAX = 5.0
CONNECTIONS_MAX = 16  # to one worker; a second one only where the first has as many calls as the worker lets it have
_ALWAYS = (("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "treadle-inference-gateway"))
_HOST_PORT = re.compile(r"(?:\[([^\[\]/]+)\]|([^:\[\]/,]+)):([0-9]{1,5})")
_CLOSED = "the connection was closed here"


class StreamingCalls:
    """Make it inside the loop that uses it; `close()`. A connection is made at the first call, and again after it was lost.

    Raises InvalidArgument for an address that it cannot read.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._place = _place(endpoint.address)
        self._connections: list[GrpcConnection] = []  # also those that take no more calls, until they are lost
        self._connecting: asyncio.Task[str | None] | None = None  # gives why it failed
        self._tls = None if endpoint.tls_root_file is None else _tls(endpoint)
        self._closed = False
        self._target = (
            (":method", "POST"), (":scheme", "http" if self._tls is None else "https"),
            (":authority", _authority(self._place)),
        )  # fmt: skip

    async def begin(self, method: str, request: bytes, timeout_seconds: float) -> StreamedCall:
        """A call of `method`, e.g. /package.Service/Method, which the caller reads and closes. Raises AioRpcError as its `read` does."""
        deadline = Deadline.after(timeout_seconds)
        while (connection := next((each for each in self._connections if each.takes_calls), None)) is None:
            await self._another(deadline)  # others may have filled it before this goes on
        seconds = deadline.remaining_seconds()
        told = (("grpc-timeout", timeout_text(seconds)), *self._endpoint.metadata)
        return connection.begin((*self._target, (":path", method), *_ALWAYS, *told), request, seconds)

    def close(self) -> None:
        """Close all connections; calls in progress fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in list(self._connections):
            connection.close()

    async def _another(self, deadline: Deadline) -> None:
        """Have one connection more. It is made for all who wait: none of them takes it away from the others by leaving."""
        if self._closed:
            raise _failure(grpc.StatusCode.UNAVAILABLE, _CLOSED)
        if self._connecting is None or self._connecting.done():
            if sum(not each.leaving for each in self._connections) >= CONNECTIONS_MAX:
                raise _failure(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{CONNECTIONS_MAX} connections have all the calls they may")
            self._connecting = asyncio.create_task(self._connect_in_time())
        connecting = self._connecting
        await asyncio.wait((connecting,), timeout=deadline.remaining_seconds())
        if not connecting.done():
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if (why := _CLOSED if connecting.cancelled() else connecting.result()) is not None:
            raise _failure(grpc.StatusCode.UNAVAILABLE, why)

    async def _connect_in_time(self) -> str | None:
        connection = GrpcConnection(self._connections)
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                await self._connect(connection)
                await connection.greeted.wait()  # before that it is not known how many calls there may be
        except TimeoutError:
            connection.close()
            return f"no connection within {CONNECT_SECONDS_MAX:.3g} s"
        except OSError as error:  # ssl.SSLError is one
            return f"cannot connect: {error}"
        except asyncio.CancelledError:
            connection.close()
            raise
        if not connection.lives:
            connection.close()
            return "the connection was closed at once"
        return None

    async def _connect(self, connection: GrpcConnection) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._place, str):
            name = None if self._tls is None else "localhost"
            transport, _ = await loop.create_unix_connection(lambda: connection, self._place, ssl=self._tls, server_hostname=name)
        else:
            transport, _ = await loop.create_connection(lambda: connection, *self._place, ssl=self._tls)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            transport.abort()
            raise OSError("the worker does not speak HTTP/2")


def _place(address: str) -> str | tuple[str, int]:
    """The path of a Unix socket, or host and port; of gRPC's names for them, those that mean one place."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return rest.removeprefix("//")
    told = rest.removeprefix("///") if kind in ("dns", "ipv4", "ipv6") else address
    if (found := _HOST_PORT.fullmatch(told)) is None or int(found[3]) >= 1 << 16:
        raise InvalidArgument(f"a worker's address is host:port, dns:host:port, ipv4:, ipv6: or unix:path, got {address!r}")
    return found[1] or found[2], int(found[3])


def _authority(place: str | tuple[str, int]) -> str:
    if isinstance(place, str):
        return "localhost"
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls(endpoint: Endpoint) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(endpoint.tls_root_file))
    context.set_alpn_protocols(["h2"])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate one may be the root, as for gRPC
    if endpoint.tls_cert_file is not None:
        context.load_cert_chain(endpoint.tls_cert_file, endpoint.tls_key_file)
    return context


def _failure(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)
