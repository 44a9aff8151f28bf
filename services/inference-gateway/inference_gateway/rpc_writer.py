"""The messages of one gRPC call, written by its handler, so that the handler hears of it when it is ended in a write.

Owns what becomes of a write that is interrupted. gRPC itself writes what a generator yields where the generator cannot see it:
a request whose time is over there ended without a status, and its caller waited on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from inference_gateway.event_stream import FAREWELL_SECONDS
from treadle.inference.v1 import gateway_pb2 as pb

Context = Any  # grpc.aio.ServicerContext: the stubs and the runtime disagree about its parameters


class CallWriter:
    """Writes pieces, one after the other; an async context within which the handler runs.

    A write that is interrupted goes on by itself: gRPC takes no second one beside it. It is over when the context is left,
    or is given up after FAREWELL_SECONDS.
    """

    def __init__(self, context: Context, message: Callable[[pb.AnswerPiece], Any]) -> None:
        self._context, self._message = context, message
        self._write: asyncio.Task[None] | None = None

    async def __aenter__(self) -> CallWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._write is None:
            return
        if not self._write.done() and isinstance(error, Exception):  # the caller is there: a status follows
            await asyncio.wait({self._write}, timeout=FAREWELL_SECONDS)
        if not self._write.done():
            self._write.cancel()
            await asyncio.wait({self._write})

    async def write(self, piece: pb.AnswerPiece) -> None:
        """Write a piece; a caller that reads slowly holds this back."""
        self._write = asyncio.create_task(self._context.write(self._message(piece)))
        await asyncio.shield(self._write)

    async def finish(self, pieces: Sequence[pb.AnswerPiece]) -> bool:
        """Write the last pieces, after one that was interrupted. False: the caller does not read them."""
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                if self._write is not None:
                    await asyncio.shield(self._write)
                for piece in pieces:
                    await self.write(piece)
        except TimeoutError:
            if self._write is not None:
                self._write.cancel()
            return False
        return True
