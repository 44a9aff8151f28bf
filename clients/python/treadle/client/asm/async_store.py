"""Calls an asm-store from asyncio, over the same messages as the plain face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.client.asm.mapped import Leaving, MappedDictionary, map_opened
from treadle.client.asm.records import (
    Deleted,
    FoundStates,
    Pointer,
    ProgressCallback,
    Published,
    Ref,
    StoredDictionary,
    StoreStatus,
)
from treadle.client.asm.store import (
    BRING_SECONDS_MAX,
    DELETE_SECONDS_MAX,
    LIST_SECONDS_MAX,
    OPEN_ATTEMPTS,
    AsmStore,
    ListParts,
    lookup_requests,
)
from treadle.client.asm.watching import ENDING, SILENCE_SECONDS, WATCH_SECONDS_MAX, Backoff, PointerBook
from treadle.client.endpoint import Endpoint, check_protocol
from treadle.contract.errors import TreadleError, Unavailable

Result = TypeVar("Result")


class AsyncAsmStore:
    """A store, called from asyncio. Make it inside the loop that uses it; `await close()`.

    What reads or writes files runs in a thread, so that the loop never waits; it goes on to its end where its caller leaves.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.aio_channel()
        self._stub = pb_grpc.AsmStoreServiceStub(self._channel)

    async def run(self, action: Callable[[AsmStore], Result]) -> Result:
        """Run one of `AsmStore`'s calls in a thread, on a channel of its own."""

        def act() -> Result:
            with AsmStore(self._endpoint) as store:
                return action(store)

        return await asyncio.to_thread(act)

    async def publish(self, folder: Path, *, promote: bool = True, progress: ProgressCallback | None = None) -> Published:
        """`AsmStore.publish`; `progress` is called in the thread."""
        return await self.run(lambda store: store.publish(folder, promote=promote, progress=progress))

    async def list(self, name: str = "") -> tuple[StoredDictionary, ...]:
        """`AsmStore.list`."""
        parts = ListParts(name, LIST_SECONDS_MAX, self._endpoint.timeout_seconds)
        while not parts.whole:
            parts.add(await self._endpoint.aio_call(self._stub.List, parts.request, parts.seconds_left))
        return parts.kept

    async def get(self, ref: Ref | str, folder: Path, *, progress: ProgressCallback | None = None) -> StoredDictionary:
        """`AsmStore.get`; `progress` is called in the thread."""
        return await self.run(lambda store: store.get(ref, folder, progress=progress))

    async def open(
        self, name: str, version: str | None = None, expected: Mapping[str, str] | None = None, *, verify: bool = False,
        timeout_seconds: float = BRING_SECONDS_MAX,
    ) -> MappedDictionary:  # fmt: skip
        """`AsmStore.open`; the mapping is made in a thread."""
        request = pb.OpenRequest(ref=Ref(name, version or "").message, expected_fingerprint=dict(expected or {}))
        for _ in range(OPEN_ATTEMPTS - 1):
            with suppress(Leaving):
                return await self._opened(request, verify, timeout_seconds)
        return await self._opened(request, verify, timeout_seconds)

    async def promote(
        self, ref: Ref | str, expected_version: str | None = None, timeout_seconds: float = BRING_SECONDS_MAX
    ) -> Pointer:
        """`AsmStore.promote`."""
        request = pb.PromoteRequest(ref=Ref.of(ref).message, expected_version=expected_version)
        return Pointer.of((await self._endpoint.aio_call(self._stub.Promote, request, timeout_seconds)).pointer)

    async def watch(self, names: Sequence[str] = ()) -> AsyncGenerator[tuple[Pointer, ...], None]:
        """What changed, as `PointerWatch` tells it: first all pointers, then changes, over restarts of the store. `aclose` ends it."""
        book, backoff = PointerBook(), Backoff()
        while True:
            book.restart()
            try:
                async with aclosing(self._watched(names)) as messages:
                    async for message in messages:
                        backoff.reset()
                        if (changed := book.take(message)) is not None:
                            yield changed
            except ENDING:
                raise
            except TreadleError:
                pass  # it restarts, or cannot be reached: asked again
            await asyncio.sleep(backoff.next_seconds())

    async def pin(self, ref: Ref | str, ttl_seconds: float, timeout_seconds: float = BRING_SECONDS_MAX) -> float:
        """`AsmStore.pin`."""
        request = pb.PinRequest(ref=Ref.of(ref).message, ttl_seconds=ttl_seconds)
        return (await self._endpoint.aio_call(self._stub.Pin, request, timeout_seconds)).pinned_until_seconds

    async def unpin(self, ref: Ref | str) -> None:
        """`AsmStore.unpin`."""
        await self._endpoint.aio_call(self._stub.Unpin, pb.UnpinRequest(ref=Ref.of(ref).message))

    async def delete(self, ref: Ref | str, timeout_seconds: float = DELETE_SECONDS_MAX) -> Deleted:
        """`AsmStore.delete`."""
        request = pb.DeleteRequest(ref=Ref.of(ref).message)
        return Deleted.of(await self._endpoint.aio_call(self._stub.Delete, request, timeout_seconds))

    async def extend(self, ref: Ref | str, chunk: Ref | str, *, promote: bool = False) -> StoredDictionary:
        """`AsmStore.extend`."""
        return await self.run(lambda store: store.extend(ref, chunk, promote=promote))

    async def lookup(
        self, stored: StoredDictionary, layer: int, queries: NDArray[np.float32], rotated: NDArray[np.float32] | None = None
    ) -> FoundStates:
        """`AsmStore.lookup`."""
        parts = []
        for tokens, request in lookup_requests(stored, layer, queries, rotated):
            answer = await self._endpoint.aio_call(self._stub.Lookup, request)
            parts.append(FoundStates.of(answer, tokens, stored.dictionary))
        return FoundStates.joined(parts)

    async def status(self, timeout_seconds: float | None = None) -> StoreStatus:
        """`AsmStore.status`."""
        status = StoreStatus.of(await self._endpoint.aio_call(self._stub.Status, pb.StatusRequest(), timeout_seconds))
        check_protocol(f"asm-store {self._endpoint.address}", status.proto_version)
        return status

    async def close(self) -> None:
        """Close the channel. Mapped dictionaries go on working."""
        await self._channel.close()

    async def _opened(self, request: pb.OpenRequest, verify: bool, timeout_seconds: float) -> MappedDictionary:
        opened = await self._endpoint.aio_call(self._stub.Open, request, timeout_seconds)
        return await asyncio.to_thread(map_opened, opened, verify=verify)

    async def _watched(self, names: Sequence[str]) -> AsyncGenerator[pb.WatchResponse, None]:
        """Messages of one call. Raises Unavailable after SILENCE_SECONDS without any."""
        request = pb.WatchRequest(names=names)
        async with aclosing(self._endpoint.aio_stream(self._stub.Watch, request, WATCH_SECONDS_MAX)) as answers:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        answer = await anext(answers)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    raise Unavailable(f"nothing was heard of the store for {SILENCE_SECONDS} s") from error
                yield answer
