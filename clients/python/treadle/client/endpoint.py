"""One service's address: channel, key and time limit; the one place where an RPC leaves this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from treadle.client.errors import from_rpc
from treadle.contract import PROTO_VERSION
from treadle.contract.errors import InvalidArgument, ProtocolMismatch
from treadle.contract.trace import trace_headers

Request = TypeVar("Request")
Response = TypeVar("Response")
MESSAGE_BYTES_MAX = 8 << 20  # answers come in messages of at most 1 MiB; a token map goes up in one
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted service is found again as soon as it listens: channels of a process
    ("grpc.max_reconnect_backoff_ms", 200),  # share their backoff, so that a new one would wait for the patience of an old one
]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a service is and how to talk to it.

    address:         host:port, or unix:path
    key:             shown as `authorization: Bearer <key>`; None: none
    tls_root_file:   PEM roots that vouch for the service; None: plain text
    timeout_seconds: time limit of a call that names none
    tls_cert_file, tls_key_file: PEM certificate chain and key that are shown to a service that asks for one; with tls_root_file
    """

    address: str
    key: str | None = None
    tls_root_file: Path | None = None
    timeout_seconds: float = 5.0
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def __post_init__(self) -> None:
        if ":" not in self.address:
            raise InvalidArgument(f"an address is host:port or unix:path, got {self.address!r}")
        if self.timeout_seconds <= 0:
            raise InvalidArgument(f"timeout_seconds is above 0, got {self.timeout_seconds}")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise InvalidArgument("tls_cert_file and tls_key_file go together")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries: the key, and which trace it belongs to."""
        return ((("authorization", f"Bearer {self.key}"),) if self.key else ()) + trace_headers()

    def channel(self) -> grpc.Channel:
        """A new channel; it connects at the first call and again whenever the service comes back."""
        if self.tls_root_file is None:
            return grpc.insecure_channel(self.address, options=_OPTIONS)
        return grpc.secure_channel(self.address, self._credentials(), options=_OPTIONS)

    def aio_channel(self) -> grpc.aio.Channel:
        """The same for asyncio."""
        if self.tls_root_file is None:
            return grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        return grpc.aio.secure_channel(self.address, self._credentials(), options=_OPTIONS)

    def call(
        self, method: Callable[..., Response], request: object, timeout_seconds: float | None = None, **options: Any
    ) -> Response:
        """Make a unary call. Raises the error of `treadle.contract.errors` that the service meant."""
        try:
            return method(request, timeout=timeout_seconds or self.timeout_seconds, metadata=self.metadata, **options)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error

    def stream(self, method: Callable[..., Iterator[Response]], request: object, timeout_seconds: float) -> Iterator[Response]:
        """Make a call whose answer streams; errors as in `call`, at the item where they happen. Closing it cancels the call."""
        call = method(request, timeout=timeout_seconds, metadata=self.metadata)
        try:
            yield from self.answers_of(call)
        finally:
            call.cancel()  # type: ignore[attr-defined]  # the stubs call it an iterator

    def answers_of(self, call: Iterator[Response]) -> Iterator[Response]:
        """What a call in progress streams; errors as in `call`. For callers that want to cancel it from another thread."""
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error

    async def aio_call(
        self, method: Callable[..., Awaitable[Response]], request: object, timeout_seconds: float | None = None
    ) -> Response:
        """`call` for asyncio."""
        try:
            return await method(request, timeout=timeout_seconds or self.timeout_seconds, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from error

    async def aio_stream(self, method: Callable[..., Any], request: object, timeout_seconds: float) -> AsyncGenerator[Any, None]:
        """`stream` for asyncio. Leaving the iteration cancels the call."""
        call = method(request, timeout=timeout_seconds, metadata=self.metadata)
        try:
            # Not `async for`: what that leaves suspended, when the caller is content before the end, holds the call and is held by
            # it, and stays with all its buffers until the garbage collector comes by.
            while (response := await call.read()) is not grpc.aio.EOF:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from error
        finally:
            call.cancel()

    def _credentials(self) -> grpc.ChannelCredentials:
        assert self.tls_root_file is not None
        roots, key, chain = (
            None if path is None else path.read_bytes() for path in (self.tls_root_file, self.tls_key_file, self.tls_cert_file)
        )
        return grpc.ssl_channel_credentials(roots, key, chain)


def check_protocol(service: str, theirs: str) -> None:
    """Raise ProtocolMismatch, naming both, unless `theirs` has the same first number as ours."""
    if theirs.split(".")[0] != PROTO_VERSION.split(".")[0]:
        raise ProtocolMismatch(f"{service} speaks protocol {theirs or 'unknown'}, this SDK {PROTO_VERSION}; update the older one")
