"""Calls a gateway's GatewayService: chats, completions, vectors, models; typed, with the same keys and limits as by HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from treadle.client.endpoint import Endpoint, check_protocol
from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import gateway_pb2_grpc as pb_grpc

ANSWER_SECONDS_MAX = 600.0  # of an answer, unless the call says otherwise; the gateway has a limit of its own


class Gateway:
    """A gateway, called from plain code. Owns its channel; `close()` or use as a context manager.

    Calls raise the errors that the proto lists: InvalidArgument naming the field, AccessDenied, NotFound, ResourceExhausted with
    `retry_after_seconds`, DeadlineExceeded, Unavailable, DataLoss.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.channel()
        self._stub = pb_grpc.GatewayServiceStub(self._channel)

    def chat(self, request: pb.ChatRequest, timeout_seconds: float = ANSWER_SECONDS_MAX) -> Iterator[pb.AnswerPiece]:
        """Stream the answers to a chat. Closing the iterator stops the generation."""
        for response in self._endpoint.stream(self._stub.Chat, request, timeout_seconds):
            yield response.piece

    def complete(self, request: pb.CompleteRequest, timeout_seconds: float = ANSWER_SECONDS_MAX) -> Iterator[pb.AnswerPiece]:
        """Stream the continuations of texts. Closing the iterator stops the generation."""
        for response in self._endpoint.stream(self._stub.Complete, request, timeout_seconds):
            yield response.piece

    def embed(
        self, request: pb.GatewayServiceEmbedRequest, timeout_seconds: float = ANSWER_SECONDS_MAX
    ) -> pb.GatewayServiceEmbedResponse:
        """Vectors of texts, float32 little-endian, in their order."""
        return self._endpoint.call(self._stub.Embed, request, timeout_seconds)

    def models(self) -> list[pb.ServedModel]:
        """Each model that is served, then its aliases."""
        return list(self._endpoint.call(self._stub.ListModels, pb.ListModelsRequest()).models)

    def cancel(self, request_id: str) -> None:
        """End a request of the same tenant. Raises NotFound where none of that name is in progress."""
        self._endpoint.call(self._stub.Cancel, pb.CancelRequest(request_id=request_id))

    def status(self, timeout_seconds: float | None = None) -> pb.GatewayServiceStatusResponse:
        """Whether requests would be served now. Raises ProtocolMismatch if SDK and gateway do not fit."""
        status = self._endpoint.call(self._stub.Status, pb.GatewayServiceStatusRequest(), timeout_seconds)
        check_protocol(f"gateway {self._endpoint.address}", status.proto_version)
        return status

    def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        self._channel.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncGateway:
    """The same for asyncio. Make it inside the loop that uses it; `await close()`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.aio_channel()
        self._stub = pb_grpc.GatewayServiceStub(self._channel)

    async def chat(
        self, request: pb.ChatRequest, timeout_seconds: float = ANSWER_SECONDS_MAX
    ) -> AsyncGenerator[pb.AnswerPiece, None]:
        """`Gateway.chat`."""
        async for response in self._endpoint.aio_stream(self._stub.Chat, request, timeout_seconds):
            yield response.piece

    async def complete(
        self, request: pb.CompleteRequest, timeout_seconds: float = ANSWER_SECONDS_MAX
    ) -> AsyncGenerator[pb.AnswerPiece, None]:
        """`Gateway.complete`."""
        async for response in self._endpoint.aio_stream(self._stub.Complete, request, timeout_seconds):
            yield response.piece

    async def embed(
        self, request: pb.GatewayServiceEmbedRequest, timeout_seconds: float = ANSWER_SECONDS_MAX
    ) -> pb.GatewayServiceEmbedResponse:
        """`Gateway.embed`."""
        return await self._endpoint.aio_call(self._stub.Embed, request, timeout_seconds)

    async def models(self) -> list[pb.ServedModel]:
        """`Gateway.models`."""
        return list((await self._endpoint.aio_call(self._stub.ListModels, pb.ListModelsRequest())).models)

    async def cancel(self, request_id: str) -> None:
        """`Gateway.cancel`."""
        await self._endpoint.aio_call(self._stub.Cancel, pb.CancelRequest(request_id=request_id))

    async def status(self, timeout_seconds: float | None = None) -> pb.GatewayServiceStatusResponse:
        """`Gateway.status`."""
        status = await self._endpoint.aio_call(self._stub.Status, pb.GatewayServiceStatusRequest(), timeout_seconds)
        check_protocol(f"gateway {self._endpoint.address}", status.proto_version)
        return status

    async def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncGateway:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
