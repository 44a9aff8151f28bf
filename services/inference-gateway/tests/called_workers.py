"""Workers for streamed calls to be made of: gRPC's own server, and raw HTTP/2 that says what it is told to; and how a call is heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from hpack import Encoder

from inference_gateway.adapters import http2_frames as h2
from inference_gateway.adapters.grpc_calls import StreamingCalls
from treadle.client import Endpoint

METHOD = "/test.Service/Stream"
GREETING = h2.frame(h2.SETTINGS, 0, 0)
HEAD = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")], huffman=True)
WELL = h2.header_block([("grpc-status", "0")])
CALL = h2.frame(h2.DATA, h2.END_STREAM, 1, h2.message(b""))  # the end of the first one, as it comes
Script = Callable[[bytes, Any], AsyncIterator[bytes]]


@asynccontextmanager
async def serving(script: Script, *options: tuple[str, Any], credentials: grpc.ServerCredentials | None = None) -> Any:
    """gRPC's own server with one method; gives its address and itself."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8 << 20), *options])
    register(server, script)
    if credentials is None:
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        address = f"localhost:{server.add_secure_port('localhost:0', credentials)}"
    await server.start()
    try:
        yield address, server
    finally:
        await server.stop(None)


def register(server: grpc.aio.Server, script: Script) -> None:
    handler: Any = grpc.unary_stream_rpc_method_handler(script)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Stream": handler}),))


@asynccontextmanager
async def saying(said: bytes, cut: int = 1 << 20) -> AsyncIterator[str]:
    """A server that greets whoever connects, says the rest to the first call, `cut` bytes at a time, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if said.startswith(GREETING):
            writer.write(GREETING)
            with contextlib.suppress(asyncio.IncompleteReadError):  # nobody calls a second time
                await reader.readuntil(CALL)
        rest = said.removeprefix(GREETING)
        for at in range(0, len(rest), cut):
            writer.write(rest[at : at + cut])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def listening(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A server of one's own; its address. What it serves ends with it."""
    serving_now: set[asyncio.Task[Any]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving_now.add(task := asyncio.create_task(serve(reader, writer)))
        await asyncio.wait((task,))
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving_now:
            task.cancel()
        await asyncio.gather(*serving_now, return_exceptions=True)


@asynccontextmanager
async def calling(address: str, **more: Any) -> AsyncIterator[StreamingCalls]:
    calls = StreamingCalls(Endpoint(address, **more))
    try:
        async with asyncio.timeout(120):
            yield calls
    finally:
        calls.close()


async def heard(calls: StreamingCalls, request: bytes = b"", seconds: float = 60.0) -> tuple[list[bytes], Any]:
    """All messages, and the error at the end: code, text and what trails."""
    messages = []
    try:
        call = await calls.begin(METHOD, request, seconds)
        try:
            while (message := await call.read()) is not None:
                messages.append(message)
        finally:
            call.close()
    except grpc.aio.AioRpcError as error:
        return messages, (error.code(), error.details(), sorted(error.trailing_metadata() or ()))
    return messages, None


async def still(figure: Callable[[], int]) -> None:
    """Until a figure has not changed for a tenth of a second."""
    before = -1
    while before != (before := figure()):  # noqa: ASYNC110  # there is no event for nothing happening
        await asyncio.sleep(0.1)
