"""Calls an inference worker: generate, embed and status."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from treadle.client.endpoint import Endpoint, check_protocol
from treadle.inference.v1 import worker_pb2, worker_pb2_grpc


class Worker:
    """A worker, called from plain code. Owns its channel; `close()` or use as a context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.channel()
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def generate(self, request: worker_pb2.GenerateRequest, timeout_seconds: float) -> Iterator[worker_pb2.GenerateResponse]:
        """Stream an answer. Closing the iterator cancels the generation. Raises the errors listed at the service."""
        return self._endpoint.stream(self._stub.Generate, request, timeout_seconds)

    def embed(self, request: worker_pb2.EmbedRequest, timeout_seconds: float) -> worker_pb2.EmbedResponse:
        """Vectors of texts; see the proto. Raises ProtocolMismatch where the engine makes none."""
        return self._endpoint.call(self._stub.Embed, request, timeout_seconds)

    def status(self, timeout_seconds: float | None = None) -> worker_pb2.StatusResponse:
        """What runs there. Raises ProtocolMismatch if SDK and worker do not fit, Unavailable if it does not answer."""
        status = self._endpoint.call(self._stub.Status, worker_pb2.StatusRequest(), timeout_seconds)
        check_protocol(f"worker {self._endpoint.address}", status.proto_version)
        return status

    def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        self._channel.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncWorker:
    """A worker, called from asyncio. Make it inside the loop that uses it; `await close()`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.aio_channel()
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def generate(self, request: worker_pb2.GenerateRequest, timeout_seconds: float) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Stream an answer. `aclose()` of the iterator cancels the generation. Raises the errors listed at the service."""
        return self._endpoint.aio_stream(self._stub.Generate, request, timeout_seconds)

    async def embed(self, request: worker_pb2.EmbedRequest, timeout_seconds: float) -> worker_pb2.EmbedResponse:
        """Vectors of texts; see the proto. Raises ProtocolMismatch where the engine makes none."""
        return await self._endpoint.aio_call(self._stub.Embed, request, timeout_seconds)

    async def status(self, timeout_seconds: float | None = None) -> worker_pb2.StatusResponse:
        """What runs there. Raises ProtocolMismatch if SDK and worker do not fit, Unavailable if it does not answer."""
        status = await self._endpoint.aio_call(self._stub.Status, worker_pb2.StatusRequest(), timeout_seconds)
        check_protocol(f"worker {self._endpoint.address}", status.proto_version)
        return status

    def watch_blocks(self, timeout_seconds: float) -> AsyncIterator[worker_pb2.WatchBlocksResponse]:
        """Blocks of its prefix cache: first all, then what changes, until `timeout_seconds` are over or the worker drains."""
        return self._endpoint.aio_stream(self._stub.WatchBlocks, worker_pb2.WatchBlocksRequest(), timeout_seconds)

    async def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncWorker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
