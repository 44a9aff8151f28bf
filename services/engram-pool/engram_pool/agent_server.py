"""EngramPoolService of a host agent: what the upstream pools say, passed on, with this host's doors instead of theirs.

Loading, removing and verifying are for the pools that hold the tables: refused here, naming those.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from treadle.client import Endpoint
from treadle.client.errors import from_rpc
from treadle.contract import PROTO_VERSION, InvalidArgument
from treadle.contract.owners import Door
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

log = logging.getLogger("engram_pool")
HINT_SECONDS_MAX = 1.0  # for an upstream pool to take a hint
STREAM_SECONDS_MAX = 24 * 3600.0  # of holds and watches, as the SDK's own


class AgentServer(pb_grpc.EngramPoolServiceServicer):
    """Asks the first upstream pool that answers. Close it in the end."""

    def __init__(
        self, endpoints: Sequence[Endpoint], doors: Callable[[], Sequence[Door]], check_served: Callable[[str], None], *,
        build_version: str,
    ) -> None:  # fmt: skip
        """check_served: raises what keeps a version from this host's doors, if anything does."""
        self._endpoints, self._doors, self._build_version = list(endpoints), doors, build_version
        self._check_served = check_served
        self._channels = [endpoint.aio_channel() for endpoint in endpoints]

    async def close(self) -> None:
        """Let go of the upstream pools."""
        for channel in self._channels:
            await channel.close()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """What the upstream pools have."""
        listed: pb.ListModelsResponse = await self._ask(lambda stub, options: stub.ListModels(request, **options))
        return listed

    async def OpenModel(self, request: pb.OpenModelRequest, context: Any) -> pb.OpenModelResponse:  # noqa: N802
        """A version, by this host's doors: nothing of it can be mapped here."""
        opened: pb.OpenModelResponse = await self._ask(lambda stub, options: stub.OpenModel(request, **options))
        self._check_served(opened.model.ref.version)
        del opened.segments[:], opened.doors[:]
        opened.lock_path = ""
        opened.doors.extend(self._own_doors())
        return opened

    async def HoldModel(self, request: pb.HoldModelRequest, context: Any) -> AsyncIterator[pb.HoldModelResponse]:  # noqa: N802
        """Held upstream for as long as the caller stays."""
        async for answer in self._stream(lambda stub, options: stub.HoldModel(request, **options)):
            yield answer

    async def WatchModels(self, request: pb.WatchModelsRequest, context: Any) -> AsyncIterator[pb.WatchModelsResponse]:  # noqa: N802
        """The upstream list and its changes."""
        async for answer in self._stream(lambda stub, options: stub.WatchModels(request, **options)):
            yield answer

    async def Gather(self, request: pb.GatherRequest, context: Any) -> AsyncIterator[pb.GatherResponse]:  # noqa: N802
        """Rows by id from upstream, for callers without the native data plane."""
        async for answer in self._stream(lambda stub, options: stub.Gather(request, **options)):
            yield answer

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> AsyncIterator[pb.LookupResponse]:  # noqa: N802
        """Rows by tokens from upstream, for callers without the native data plane."""
        async for answer in self._stream(lambda stub, options: stub.Lookup(request, **options)):
            yield answer

    async def HintTokens(self, request: pb.HintTokensRequest, context: Any) -> pb.HintTokensResponse:  # noqa: N802
        """Passed on to every upstream pool: each brings near what it holds. The most that one of them takes."""
        told = await asyncio.gather(*map(self._hint, self._endpoints, self._channels, [request] * len(self._channels)))
        return pb.HintTokensResponse(tokens_taken=max(told))

    async def ReadFusion(self, request: pb.ReadFusionRequest, context: Any) -> AsyncIterator[pb.ReadFusionResponse]:  # noqa: N802
        """Fusion weights from upstream."""
        async for answer in self._stream(lambda stub, options: stub.ReadFusion(request, **options)):
            yield answer

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802
        """This process: no tables, and its doors."""
        return pb.StatusResponse(
            build_version=self._build_version, proto_version=PROTO_VERSION, pid=os.getpid(), doors=self._own_doors()
        )

    async def LoadTable(self, request: pb.LoadTableRequest, context: Any) -> AsyncIterator[pb.LoadTableResponse]:  # noqa: N802
        """Not here."""
        raise self._elsewhere()
        yield

    async def VerifyModel(self, request: pb.VerifyModelRequest, context: Any) -> AsyncIterator[pb.VerifyModelResponse]:  # noqa: N802
        """Not here."""
        raise self._elsewhere()
        yield

    async def PromoteModel(self, request: pb.PromoteModelRequest, context: Any) -> pb.PromoteModelResponse:  # noqa: N802
        """Not here."""
        raise self._elsewhere()

    async def ReadTable(self, request: pb.ReadTableRequest, context: Any) -> AsyncIterator[pb.ReadTableResponse]:  # noqa: N802
        """Not here."""
        raise self._elsewhere()
        yield

    async def ReserveBandwidth(self, request: pb.ReserveBandwidthRequest, context: Any) -> pb.ReserveBandwidthResponse:  # noqa: N802
        """Not here."""
        raise self._elsewhere()

    async def RemoveModel(self, request: pb.RemoveModelRequest, context: Any) -> pb.RemoveModelResponse:  # noqa: N802
        """Not here."""
        raise self._elsewhere()

    async def WatchOwners(self, request: pb.WatchOwnersRequest, context: Any) -> AsyncIterator[pb.WatchOwnersResponse]:  # noqa: N802
        """Not here."""
        raise self._elsewhere()
        yield

    def _elsewhere(self) -> InvalidArgument:
        pools = ", ".join(endpoint.address for endpoint in self._endpoints)
        return InvalidArgument(f"this pool holds no tables, it serves those of others; ask {pools}")

    def _own_doors(self) -> list[pb.Door]:
        return [pb.Door(transport=door.transport, address=door.address) for door in self._doors()]

    async def _hint(self, endpoint: Endpoint, channel: grpc.aio.Channel, request: pb.HintTokensRequest) -> int:
        stub: Any = pb_grpc.EngramPoolServiceStub(channel)
        try:
            answer = await stub.HintTokens(request, timeout=HINT_SECONDS_MAX, metadata=endpoint.metadata)
        except grpc.aio.AioRpcError as error:  # a hint that is lost costs nothing but time later
            log.debug("no hint", extra={"pool": endpoint.address, "reason": error.details()})
            return 0
        return int(answer.tokens_taken)

    async def _ask(self, call: Callable[[Any, dict[str, Any]], Awaitable[Any]]) -> Any:
        for place, (endpoint, channel) in enumerate(zip(self._endpoints, self._channels, strict=True)):
            options = {"timeout": endpoint.timeout_seconds, "metadata": endpoint.metadata}
            try:
                return await call(pb_grpc.EngramPoolServiceStub(channel), options)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or place == len(self._channels) - 1:
                    raise from_rpc(error, endpoint.address) from error
        raise AssertionError("settings name at least one upstream pool")

    async def _stream(self, call: Callable[[Any, dict[str, Any]], Any]) -> AsyncIterator[Any]:
        for place, (endpoint, channel) in enumerate(zip(self._endpoints, self._channels, strict=True)):
            answers, begun = (
                call(pb_grpc.EngramPoolServiceStub(channel), {"timeout": STREAM_SECONDS_MAX, "metadata": endpoint.metadata}),
                False,
            )
            async with _left(answers):
                try:
                    async for answer in answers:
                        begun = True
                        yield answer
                    return
                except grpc.aio.AioRpcError as error:
                    if begun or error.code() is not grpc.StatusCode.UNAVAILABLE or place == len(self._channels) - 1:
                        raise from_rpc(error, endpoint.address) from error


def register_agent(server: grpc.aio.Server, agent: AgentServer) -> Sequence[str]:
    """Add the RPCs to `server`; their service's full name."""
    pb_grpc.add_EngramPoolServiceServicer_to_server(agent, server)
    return [pb.DESCRIPTOR.services_by_name["EngramPoolService"].full_name]


@asynccontextmanager
async def _left(call: Any) -> AsyncIterator[None]:
    """A caller that leaves ends the call upstream too."""
    try:
        yield
    finally:
        call.cancel()
