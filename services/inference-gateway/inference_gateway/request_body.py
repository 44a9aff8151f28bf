"""The request side of a connection: its body within limits, and the moment at which its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive

from inference_gateway.domain.errors import BodyTooLarge, BodyTooSlow, ClientLeft
from inference_gateway.domain.lifetime import Lifetime

# Of a refused body: an answer sent while its client still writes is lost when the connection is reset.
DISCARD_BYTES_MAX = 32 << 20
DISCARD_SECONDS_MAX = 2.0


async def read_body(receive: Receive, headers: Headers, *, bytes_max: int, seconds_max: float) -> bytes:
    """The whole body, counted while it comes, whatever its length is said to be.

    Raises BodyTooLarge, BodyTooSlow, or ClientLeft if the connection closes before its end.
    """
    try:
        async with asyncio.timeout(seconds_max) as limit:
            declared = headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > bytes_max:
                await _discard(receive, headers)
                raise BodyTooLarge(bytes_max)
            return await _read(receive, headers, bytes_max)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise BodyTooSlow(f"the body did not arrive within {seconds_max:g} seconds") from error


@asynccontextmanager
async def departure_ends(lifetime: Lifetime, receive: Receive) -> AsyncIterator[None]:
    """End `lifetime` with ClientLeft when the connection closes while the body of the context runs.

    The body must have been read, and the answer's last message must be sent after the context: it, too, closes `receive`.
    """
    watch = asyncio.create_task(_watch(lifetime, receive))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait({watch})


async def _read(receive: Receive, headers: Headers, bytes_max: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left while it sent the body")
        body += message.get("body", b"")
        if len(body) > bytes_max:
            if message.get("more_body", False):
                await _discard(receive, headers)
            raise BodyTooLarge(bytes_max)
        if not message.get("more_body", False):
            return bytes(body)


async def _discard(receive: Receive, headers: Headers) -> None:
    if headers.get("expect", "").lower() == "100-continue":
        return  # such a client sends nothing until it is told to
    count = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS_MAX):
            while count < DISCARD_BYTES_MAX:
                message = await receive()
                count += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _watch(lifetime: Lifetime, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    lifetime.end(ClientLeft("the client left before its answer was complete"))
