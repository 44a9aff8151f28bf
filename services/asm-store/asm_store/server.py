"""AsmStoreService over gRPC: messages in, domain calls, messages out, and the error table. No logic."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from asm_store import messages as m
from asm_store.domain.extending import Extending
from asm_store.domain.lookup import Lookups
from asm_store.domain.ports import Announced, Meters
from asm_store.domain.publishing import Publishing
from asm_store.domain.reading import FileReading
from asm_store.domain.room import Room
from asm_store.domain.store import Store
from asm_store.domain.tenancy import Caller, Tenants, ask_may_change
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.contract import PROTO_VERSION, InvalidArgument
from treadle.contract.dictionary import LOG_BASE

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["AsmStoreService"].full_name
STATUS: dict[type[Exception], grpc.StatusCode] = dict(CONTRACT_STATUS)  # the domain raises nothing else
Context = Any  # grpc.aio.ServicerContext: the stubs and the runtime disagree about its parameters


class AsmStoreServer(pb_grpc.AsmStoreServiceServicer):
    """The RPCs. Exceptions become statuses in the chassis, by STATUS."""

    def __init__(
        self, store: Store, publishing: Publishing, extending: Extending, lookups: Lookups, reading: FileReading, room: Room,
        meters: Meters, tenants: Tenants, *, build_version: str,
    ) -> None:  # fmt: skip
        self._store, self._publishing, self._extending, self._lookups = store, publishing, extending, lookups
        self._reading, self._room, self._meters, self._tenants = reading, room, meters, tenants
        self._build_version = build_version

    async def Publish(self, request_iterator: AsyncIterator[pb.PublishRequest], context: Context) -> pb.PublishResponse:  # noqa: N802
        """Take in a version."""
        caller = self._caller(context)
        async with aclosing(m.publish_events(request_iterator, caller.tenant)) as events:
            announced = await self._publishing.first(events)
            if not isinstance(announced, Announced):
                raise InvalidArgument("publish: the first message says what comes (begin)")
            published = await self._publishing.publish(announced, events, caller)
        listed = await self._store.listed(published.kept)
        return pb.PublishResponse(dictionary=m.dictionary_message(listed), existed=published.existed)

    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[pb.GetResponse]:  # noqa: N802
        """The files of a version."""
        with self._meters.measured("gets"):
            bringing, ref = self._store.bringing, request.ref
            kept = bringing.here(ref.name, ref.version) if request.here_only else await bringing.bring(ref.name, ref.version)
            listed, files = await self._store.listed(kept), m.file_messages(kept.stored.record.files)
            async with aclosing(self._reading.read(kept)) as pieces:
                yield pb.GetResponse(begin=pb.GetBegin(dictionary=m.dictionary_message(listed), files=files))
                async for piece in pieces:
                    yield pb.GetResponse(piece=m.piece_message(piece))

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:  # noqa: N802
        """Where a version lies."""
        kept = await self._store.open(request.ref.name, request.ref.version, request.expected_fingerprint)
        return m.open_message(await self._store.listed(kept), kept)

    async def Hold(self, request: pb.HoldRequest, context: Context) -> AsyncIterator[pb.HoldResponse]:  # noqa: N802
        """Keep a version from being evicted while the call is open."""
        async with aclosing(self._store.hold(request.ref.name, request.ref.version)) as held:
            async for name, version in held:
                yield pb.HoldResponse(ref=pb.DictionaryRef(name=name, version=version))

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:  # noqa: N802
        """States of queries."""
        found = await self._lookups.look_up(request.ref.name, request.ref.version, request.layer, request.queries, request.rotated)
        return pb.LookupResponse(
            states=found.states.astype("<f4").tobytes(), log_z=found.log_z.astype("<f4").tobytes(),
            cosines=found.cosines.astype("<f4").tobytes(), log_base=LOG_BASE,
        )  # fmt: skip

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteResponse:  # noqa: N802
        """Flip a pointer."""
        expected = request.expected_version if request.HasField("expected_version") else None
        pointer = await self._store.promote(request.ref.name, request.ref.version, expected, self._caller(context))
        return pb.PromoteResponse(pointer=m.pointer_message(pointer))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        """Pointers and their changes."""
        async with aclosing(self._store.pointers.watch(list(request.names))) as lists:
            async for told in lists:
                for message in m.watch_messages(told.pointers, complete=told.complete):
                    yield message

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:  # noqa: N802
        """What is kept."""
        after = (request.after.name, request.after.version) if request.HasField("after") else None
        return m.list_message(await self._store.listing(request.name, after))

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:  # noqa: N802
        """Keep a version from eviction for a while."""
        until = await self._store.pin(request.ref.name, request.ref.version, request.ttl_seconds, self._caller(context))
        return pb.PinResponse(pinned_until_seconds=until)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:  # noqa: N802
        """End a pin."""
        await self._store.unpin(request.ref.name, request.ref.version, self._caller(context))
        return pb.UnpinResponse()

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:  # noqa: N802
        """Delete a version, every copy."""
        await ask_may_change(self._store.catalogue, self._caller(context), request.ref.name)
        at = request.deleted_at_seconds if request.here_only else 0.0
        deleted = await self._store.deleting.delete(
            request.ref.name, request.ref.version, here_only=request.here_only, at_seconds=at
        )
        return pb.DeleteResponse(files=[m.deleted_message(file) for file in deleted.files], pending_replicas=deleted.pending)

    async def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.ExtendResponse:  # noqa: N802
        """Merge a further chunk into a version."""
        base, chunk = (request.ref.name, request.ref.version), (request.chunk.name, request.chunk.version)
        kept = await self._extending.extend(base, chunk, self._caller(context), promote=request.promote)
        return pb.ExtendResponse(dictionary=m.dictionary_message(await self._store.listed(kept)))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        """How the store is."""
        catalogue, sharing = self._store.catalogue, self._store.sharing
        return pb.StatusResponse(
            build_version=self._build_version, proto_version=PROTO_VERSION, pid=os.getpid(), versions=len(catalogue.all()),
            file_bytes=catalogue.file_bytes(), file_bytes_max=self._room.file_bytes_max, tenant_bytes=catalogue.tenants(),
            lookups=self._lookups.answered, evictions=self._room.evictions, draining=self._store.changes.draining,
            replica=sharing.name, replicas=[replica.name for replica in sharing.others if replica.alive],
        )  # fmt: skip

    def _caller(self, context: Context) -> Caller:
        shown = next((str(value) for name, value in context.invocation_metadata() or () if name == "authorization"), "")
        return self._tenants.find(hashlib.sha256(shown.removeprefix("Bearer ").encode()).digest())


def register(server: grpc.aio.Server, store_server: AsmStoreServer) -> Sequence[str]:
    """Add the RPCs to `server`; their service's full name."""
    pb_grpc.add_AsmStoreServiceServicer_to_server(store_server, server)
    return [SERVICE_NAME]
