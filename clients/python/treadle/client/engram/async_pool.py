"""Calls an engram pool from asyncio, over the same messages as the plain face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from treadle.client.endpoint import Endpoint, check_protocol
from treadle.client.engram import pool_types as types
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.load_messages import LOAD_SECONDS_MAX, LoadAnswers, ProgressCallback, grown_request
from treadle.client.engram.owners import OwnerList, owner_lists
from treadle.client.engram.pool import FUSION_SECONDS_MAX, WATCH_SECONDS_MAX, EngramPool
from treadle.client.engram.pool_types import model_ref
from treadle.client.engram.transport_choice import row_source
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

Result = TypeVar("Result")


class AsyncEngramPool:
    """A pool, called from asyncio. Make it inside the loop that uses it; `await close()`.

    Handles are the same EngramHandle: gathers are short and their tickets are awaited with `LookupTicket.arrived`. Work that
    maps or streams for long runs in a thread, so that the loop never waits.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.aio_channel()
        self._stub = pb_grpc.EngramPoolServiceStub(self._channel)

    async def open(
        self, model: str, version: str | None = None, *, transport: str = "auto", expected: Mapping[str, str] | None = None,
        workers: int = 1,
    ) -> EngramHandle:  # fmt: skip
        """`EngramPool.open`; the mapping is made in a thread."""
        await self.status()
        request = pb.OpenModelRequest(ref=model_ref(model, version), expected_fingerprint=dict(expected or {}))
        opened = types.opened_model(await self._endpoint.aio_call(self._stub.OpenModel, request))
        source = await asyncio.to_thread(row_source, self._endpoint, opened, transport, workers)
        return EngramHandle(opened.resident.model, opened.resident.version, source, opened.card)

    async def list_models(self) -> list[types.ResidentModel]:
        """`EngramPool.list_models`."""
        answer = await self._endpoint.aio_call(self._stub.ListModels, pb.ListModelsRequest())
        return [types.resident_model(model) for model in answer.models]

    async def watch(self, timeout_seconds: float = WATCH_SECONDS_MAX) -> AsyncIterator[list[types.ResidentModel]]:
        """`EngramPool.watch`."""
        async for answer in self._endpoint.aio_stream(self._stub.WatchModels, pb.WatchModelsRequest(), timeout_seconds):
            yield [types.resident_model(model) for model in answer.models]

    async def watch_owners(self, *, itself_only: bool = False) -> AsyncGenerator[OwnerList, None]:
        """`EngramPool.watch_owners`."""
        request = pb.WatchOwnersRequest(itself_only=itself_only)
        async with aclosing(self._endpoint.aio_stream(self._stub.WatchOwners, request, WATCH_SECONDS_MAX)) as answers:
            async for listed in owner_lists(answers):
                yield listed

    async def run(self, action: Callable[[EngramPool], Result]) -> Result:
        """Run one of `EngramPool`'s long calls in a thread: `await pool.run(lambda pool: pool.load_random(template))`."""

        def act() -> Result:
            with EngramPool(self._endpoint) as pool:
                return action(pool)

        return await asyncio.to_thread(act)

    async def load_grown(
        self, path: Path, name: str | None = None, *, keep_previous: bool = True, progress: ProgressCallback | None = None,
        timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> types.ResidentModel:  # fmt: skip
        """`EngramPool.load_grown`."""
        request, answers = grown_request(path, name, keep_previous), LoadAnswers(progress)
        async for answer in self._endpoint.aio_stream(self._stub.LoadTable, request, timeout_seconds):
            answers.add(answer)
        return answers.loaded()

    async def promote(self, model: str, version: str | None = None) -> types.Promoted:
        """`EngramPool.promote`."""
        request = pb.PromoteModelRequest(ref=model_ref(model, version))
        return types.promoted(await self._endpoint.aio_call(self._stub.PromoteModel, request))

    async def read_fusion(self, model: str, version: str | None = None, *, timeout_seconds: float = FUSION_SECONDS_MAX) -> bytes:
        """`EngramPool.read_fusion`."""
        request = pb.OpenModelRequest(ref=model_ref(model, version))
        opened = types.opened_model(await self._endpoint.aio_call(self._stub.OpenModel, request))
        weights = types.FusionBytes(opened.resident.model)
        read = pb.ReadFusionRequest(ref=model_ref(model, opened.resident.version))
        async for piece in self._endpoint.aio_stream(self._stub.ReadFusion, read, timeout_seconds):
            weights.add(piece)
        return await asyncio.to_thread(weights.whole)

    async def reserve_bandwidth(self, name: str, bytes_per_second: int, seconds: float) -> types.ReservedBandwidth:
        """`EngramPool.reserve_bandwidth`."""
        request = pb.ReserveBandwidthRequest(name=name, bytes_per_second=bytes_per_second, seconds=seconds)
        return types.reserved_bandwidth(await self._endpoint.aio_call(self._stub.ReserveBandwidth, request))

    async def hint_tokens(
        self, model: str, token_ids: Sequence[int], version: str | None = None, *, timeout_seconds: float | None = None
    ) -> int:
        """`EngramPool.hint_tokens`."""
        request = pb.HintTokensRequest(ref=model_ref(model, version), token_ids=token_ids)
        return (await self._endpoint.aio_call(self._stub.HintTokens, request, timeout_seconds)).tokens_taken

    async def remove(self, model: str, version: str | None = None) -> tuple[list[str], int]:
        """`EngramPool.remove`."""
        answer = await self._endpoint.aio_call(self._stub.RemoveModel, pb.RemoveModelRequest(ref=model_ref(model, version)))
        return [ref.version for ref in answer.removed], answer.awaiting_readers

    async def status(self, timeout_seconds: float | None = None) -> types.PoolStatus:
        """`EngramPool.status`."""
        status = types.pool_status(await self._endpoint.aio_call(self._stub.Status, pb.StatusRequest(), timeout_seconds))
        check_protocol(f"engram-pool {self._endpoint.address}", status.proto_version)
        return status

    async def close(self) -> None:
        """Close the channel. Handles go on working."""
        await self._channel.close()
