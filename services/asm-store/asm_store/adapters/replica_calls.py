"""Other replicas, called as any caller calls a store; what they are asked is answered from what they keep themselves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from asm_store.domain.ports import Announced, DeletedFile, End, Piece, Replica
from asm_store.domain.versions import FileInfo, Key
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.client import Endpoint
from treadle.contract.errors import NotFound

DELETE_SECONDS = 5.0
CHANNELS_MAX = 128  # to other replicas; twice as many as a store has, so that none in use goes


class ReplicaCalls:
    """The Peers of a store. endpoint: of an address, with our key and TLS; get_seconds: longest time of a copy."""

    def __init__(self, endpoint: Callable[[str], Endpoint], *, get_seconds: float) -> None:
        self._endpoint, self._get_seconds = endpoint, get_seconds
        self._channels: dict[str, tuple[Endpoint, grpc.aio.Channel]] = {}  # by address, the least recently used first

    async def get(self, replica: Replica, key: Key) -> AsyncGenerator[Announced | Piece | End, None]:
        """See Peers."""
        endpoint, stub = await self._open(replica)
        request = pb.GetRequest(ref=pb.DictionaryRef(name=key[0], version=key[1]), here_only=True)
        async with aclosing(endpoint.aio_stream(stub.Get, request, self._get_seconds)) as answers:
            async for answer in answers:
                if answer.WhichOneof("event") == "begin":
                    yield _announced(answer.begin)
                else:
                    piece = answer.piece
                    yield Piece(piece.name, piece.offset_bytes, piece.data, piece.crc32c)
        yield End()

    async def delete(self, replica: Replica, name: str, version: str, at_seconds: float) -> list[DeletedFile]:
        """See Peers."""
        endpoint, stub = await self._open(replica)
        ref = pb.DictionaryRef(name=name, version=version)
        request = pb.DeleteRequest(ref=ref, here_only=True, deleted_at_seconds=at_seconds)
        try:
            answer: pb.DeleteResponse = await endpoint.aio_call(stub.Delete, request, DELETE_SECONDS)
        except NotFound:
            return []
        return [
            DeletedFile(file.ref.name, file.ref.version, file.path, file.bytes, file.replica, file.freed) for file in answer.files
        ]

    async def close(self) -> None:
        """Close the connections."""
        for _, channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _open(self, replica: Replica) -> tuple[Endpoint, Any]:
        """A channel is kept for each of the last CHANNELS_MAX addresses: replicas move, and come and go."""
        found = self._channels.pop(replica.address, None)
        if found is None:
            endpoint = self._endpoint(replica.address)
            found = endpoint, endpoint.aio_channel()
        self._channels[replica.address] = found
        while len(self._channels) > CHANNELS_MAX:
            _, channel = self._channels.pop(next(iter(self._channels)))
            await channel.close()
        return found[0], pb_grpc.AsmStoreServiceStub(found[1])


def _announced(begin: pb.GetBegin) -> Announced:
    sent = begin.dictionary
    files = tuple(FileInfo(file.name, file.bytes, file.sha256) for file in begin.files)
    return Announced(
        sent.manifest_json, files, sent.card_json, sent.tenant, published_at_seconds=sent.published_at_seconds,
    )  # fmt: skip
