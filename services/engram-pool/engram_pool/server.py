"""EngramPoolService over gRPC: messages in, domain calls, messages out, and the error table. No logic."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from engram_pool.domain.directory import Directory
from engram_pool.domain.fusion_reading import FusionReading
from engram_pool.domain.gathering import PIECE_BYTES, Gathering
from engram_pool.domain.held_rows import Share
from engram_pool.domain.hinting import Hinting
from engram_pool.domain.loading import Loader, LoadOrder
from engram_pool.domain.origins import CheckpointOrder, GrownOrder, PeerOrder, RandomOrder, Source, StoreOrder
from engram_pool.domain.pool import Pool
from engram_pool.domain.progress import Progress
from engram_pool.domain.readers import Listed
from engram_pool.domain.reserving import Reserving
from engram_pool.domain.scrubbing import Scrubbed, Scrubber
from engram_pool.domain.storing import Ranges
from engram_pool.domain.table_reading import TableReading
from engram_pool.domain.tenancy import Tenants
from engram_pool.domain.windows_bytes import read_ids, read_windows
from engram_pool.owner_lists import list_messages
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.contract import PROTO_VERSION, AccessDenied, Deadline, DeadlineExceeded, InvalidArgument
from treadle.contract.placement import Spread
from treadle.contract.warm_state import WarmState
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["EngramPoolService"].full_name
STATUS: dict[type[Exception], grpc.StatusCode] = dict(CONTRACT_STATUS)  # the domain raises nothing else
STALL_SECONDS = 0.05  # behind the deadline: a call that is read finds it passed by itself, and says at which row
_WARM_STATES = {
    WarmState.COLD: pb.WARM_STATE_COLD, WarmState.WARMING: pb.WARM_STATE_WARMING, WarmState.WARM: pb.WARM_STATE_WARM,
}  # fmt: skip
Context = Any  # grpc.aio.ServicerContext: the stubs and the runtime disagree about its parameters


class EngramPoolServer(pb_grpc.EngramPoolServiceServicer):
    """The RPCs. Exceptions become statuses in the chassis, by STATUS."""

    def __init__(
        self, pool: Pool, loader: Loader, gathering: Gathering, fusion: FusionReading, tables: TableReading, scrubber: Scrubber,
        directory: Directory, *, reserving: Reserving, tenants: Tenants, hinting: Hinting, segment_dir: Path, gather_seconds_max: float, build_version: str,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._pool, self._loader, self._gathering, self._fusion = pool, loader, gathering, fusion
        self._tables, self._scrubber = tables, scrubber
        self._reserving, self._tenants, self._hinting = reserving, tenants, hinting
        self._segment_dir, self._gather_seconds_max, self._build_version = segment_dir, gather_seconds_max, build_version

    async def LoadTable(self, request: pb.LoadTableRequest, context: Context) -> AsyncIterator[pb.LoadTableResponse]:  # noqa: N802
        """Load a version, streaming progress; the model comes last."""
        self._administers(context)
        async with aclosing(self._loader.load(_load_order(request))) as events:
            async for event in events:
                if isinstance(event, Progress):
                    yield pb.LoadTableResponse(progress=_progress(event))
                else:
                    (listed,) = await self._pool.readers.with_readers([event])
                    yield pb.LoadTableResponse(loaded=_model(listed))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        """What is resident."""
        return pb.ListModelsResponse(models=_models(await self._pool.readers.listing()))

    async def OpenModel(self, request: pb.OpenModelRequest, context: Context) -> pb.OpenModelResponse:  # noqa: N802
        """Where a version lies."""
        self._pool.changes.refuse_if_draining()
        resident = self._pool.find(request.ref.model, request.ref.version, request.expected_fingerprint)
        (listed,) = await self._pool.readers.with_readers([resident])
        segments = [
            pb.Segment(
                layer=layer, path=str(segment.path), rows_offset_bytes=segment.rows_offset_bytes, rows=segment.row_count,
                row_bytes=segment.row_bytes, file_bytes=segment.file_bytes, segment_offset_bytes=segment.offset,
                held=_held(segment.held),
            )
            for layer, segment in resident.stored.segments.items()
        ]  # fmt: skip
        return pb.OpenModelResponse(
            model=_model(listed), segments=segments, fingerprint=resident.model.fingerprint.as_dict(),
            lock_path=str(resident.stored.lock_path), card_json=resident.stored.card_json, doors=self._doors(),
        )  # fmt: skip

    async def HoldModel(self, request: pb.HoldModelRequest, context: Context) -> AsyncIterator[pb.HoldModelResponse]:  # noqa: N802
        """Keep a version from being freed while the call is open."""
        async with aclosing(self._pool.readers.hold(request.ref.model, request.ref.version)) as held:
            async for resident in held:
                yield pb.HoldModelResponse(ref=pb.ModelRef(model=resident.name, version=resident.version))

    async def Gather(self, request: pb.GatherRequest, context: Context) -> AsyncIterator[pb.GatherResponse]:  # noqa: N802
        """Rows by id."""
        ref, ids, deadline = request.ref, read_ids(request.rows), self._deadline(context)
        pieces = self._gathering.gather(ref.model, ref.version, request.layer, ids, deadline, self._tenant(context))
        async with _bounded(deadline), aclosing(pieces):
            async for piece in pieces:
                yield pb.GatherResponse(data=piece)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> AsyncIterator[pb.LookupResponse]:  # noqa: N802
        """Rows by tokens."""
        ref, sent = request.ref, request.windows
        order_max = self._pool.find_readable(ref.model, ref.version).model.order_max
        windows = read_windows(
            order_max,
            tokens=sent.tokens,
            starts=sent.starts,
            lookback=sent.lookback,
            dead=sent.dead,
            lookback_dead=sent.lookback_dead,
        )
        deadline = self._deadline(context)
        pieces = self._gathering.lookup(ref.model, ref.version, request.layers, windows, deadline, self._tenant(context))
        async with _bounded(deadline), aclosing(pieces):
            async for layer, piece in pieces:
                yield pb.LookupResponse(layer=layer, data=piece)

    async def HintTokens(self, request: pb.HintTokensRequest, context: Context) -> pb.HintTokensResponse:  # noqa: N802
        """Rows of these tokens will be looked up."""
        tokens = np.fromiter(request.token_ids, dtype=np.int64, count=len(request.token_ids))
        taken = self._hinting.hint(request.ref.model, request.ref.version, tokens, self._tenant(context))
        return pb.HintTokensResponse(tokens_taken=taken)

    async def WatchModels(self, request: pb.WatchModelsRequest, context: Context) -> AsyncIterator[pb.WatchModelsResponse]:  # noqa: N802
        """The list now and after each change."""
        async with aclosing(self._pool.readers.watch()) as lists:
            async for listing in lists:
                yield pb.WatchModelsResponse(models=_models(listing))

    async def VerifyModel(self, request: pb.VerifyModelRequest, context: Context) -> AsyncIterator[pb.VerifyModelResponse]:  # noqa: N802
        """Compare every checksum."""
        self._administers(context)
        async with aclosing(self._pool.verify(request.ref.model, request.ref.version)) as events:
            async for progress in events:
                yield pb.VerifyModelResponse(progress=_progress(progress))

    async def PromoteModel(self, request: pb.PromoteModelRequest, context: Context) -> pb.PromoteModelResponse:  # noqa: N802
        """Make a version current."""
        self._administers(context)
        resident, previous = await self._pool.promote(request.ref.model, request.ref.version)
        (listed,) = await self._pool.readers.with_readers([resident])
        return pb.PromoteModelResponse(model=_model(listed), previous_version=previous)

    async def ReadFusion(self, request: pb.ReadFusionRequest, context: Context) -> AsyncIterator[pb.ReadFusionResponse]:  # noqa: N802
        """Fusion weights of a version."""
        deadline, first = self._deadline(context), True
        pieces = self._fusion.read(request.ref.model, request.ref.version, deadline)
        async with _bounded(deadline), aclosing(pieces):
            async for bytes_total, piece in pieces:
                yield pb.ReadFusionResponse(data=piece, bytes_total=bytes_total if first else 0)
                first = False

    async def ReserveBandwidth(self, request: pb.ReserveBandwidthRequest, context: Context) -> pb.ReserveBandwidthResponse:  # noqa: N802
        """Keep bandwidth of this host's memory free for other traffic."""
        self._administers(context)
        now = await self._reserving.reserve(request.name, request.bytes_per_second, request.seconds)
        return pb.ReserveBandwidthResponse(
            reserved_bytes_per_second=now.reserved_bytes_per_second, left_bytes_per_second=now.left_bytes_per_second
        )

    async def ReadTable(self, request: pb.ReadTableRequest, context: Context) -> AsyncIterator[pb.ReadTableResponse]:  # noqa: N802
        """Bytes of a table, or what is known of it."""
        ref, deadline = request.ref, self._deadline(context)
        async with _bounded(deadline):
            if not request.byte_count:
                digests, words = await self._tables.describe(ref.model, ref.version, request.layer)
                for at in range(0, len(digests), PIECE_BYTES):
                    yield pb.ReadTableResponse(chunk_digests=digests[at : at + PIECE_BYTES])
                for at in range(0, len(words), PIECE_BYTES):
                    yield pb.ReadTableResponse(token_map=words[at : at + PIECE_BYTES])
                return
            pieces = self._tables.read(ref.model, ref.version, request.layer, request.first_byte, request.byte_count, deadline)
            async with aclosing(pieces):
                async for piece in pieces:
                    yield pb.ReadTableResponse(data=piece)

    async def WatchOwners(self, request: pb.WatchOwnersRequest, context: Context) -> AsyncIterator[pb.WatchOwnersResponse]:  # noqa: N802
        """The owners now and after each change; an empty message in between."""
        only = self._directory.name if request.itself_only else None
        async with aclosing(self._directory.watch()) as lists:
            async for listing in lists:
                if listing is None:
                    yield pb.WatchOwnersResponse()
                    continue
                for message in list_messages(listing, request.ref.model, request.ref.version, only):
                    yield message

    async def RemoveModel(self, request: pb.RemoveModelRequest, context: Context) -> pb.RemoveModelResponse:  # noqa: N802
        """Take a version, or all of a model, off the list."""
        self._administers(context)
        removal = await self._pool.remove(request.ref.model, request.ref.version)
        versions = dict.fromkeys((gone.name, gone.version) for gone in removal.removed)  # one may lie aside and be served again
        refs = [pb.ModelRef(model=name, version=version) for name, version in versions]
        return pb.RemoveModelResponse(removed=refs, awaiting_readers=removal.awaiting_readers)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        """How the pool is."""
        pool = self._pool
        return pb.StatusResponse(
            build_version=self._build_version, proto_version=PROTO_VERSION, pid=os.getpid(), table_bytes=pool.occupancy.table_bytes,
            table_bytes_max=pool.room.table_bytes_max, segment_dir=str(self._segment_dir), page_bytes=pool.occupancy.page_bytes,
            draining=pool.changes.draining, scrub=_scrub(self._scrubber.figures), doors=self._doors(), tenants=self._tenant_messages(),
        )  # fmt: skip

    def _doors(self) -> list[pb.Door]:
        return [pb.Door(transport=door.transport, address=door.address) for door in self._pool.doors]

    def _tenant(self, context: Context) -> int:
        shown = next((str(value) for name, value in context.invocation_metadata() or () if name == "authorization"), "")
        return self._tenants.find(shown.removeprefix("Bearer "))

    def _administers(self, context: Context) -> None:
        """Raise AccessDenied for a tenant that may use what is here and not change it."""
        limits = self._tenants.limits[self._tenant(context)]
        if not limits.admin:
            raise AccessDenied(
                f"tenant {limits.name} may not load, remove, promote, verify or reserve: show a key of the pool's api_key_file, "
                "or set `admin: true` for it in tenants_file"
            )

    def _tenant_messages(self) -> list[pb.Tenant]:
        messages = []
        for index, limits in enumerate(self._tenants.limits):
            now = self._tenants.figures(index)
            messages.append(
                pb.Tenant(
                    name=limits.name, rows_total=sum(now.rows.values()), refused_total=sum(now.refused.values()), late_total=now.late,
                    rows_per_second_max=limits.rows_per_second_max,
                )
            )  # fmt: skip
        return messages

    def _deadline(self, context: Context) -> Deadline:
        left = context.time_remaining()  # None, or infinite, for a caller without a deadline
        seconds = self._gather_seconds_max if left is None or not math.isfinite(left) else min(left, self._gather_seconds_max)
        return Deadline.after(max(0.0, seconds))


def register(server: grpc.aio.Server, pool_server: EngramPoolServer) -> Sequence[str]:
    """Add the RPCs to `server`; their service's full name."""
    pb_grpc.add_EngramPoolServiceServicer_to_server(pool_server, server)
    return [SERVICE_NAME]


@asynccontextmanager
async def _bounded(deadline: Deadline) -> AsyncIterator[None]:
    """End the call at its deadline also while it waits for a caller that does not read: its place and its version are needed."""
    try:
        async with asyncio.timeout(deadline.remaining_seconds() + STALL_SECONDS):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the call's time was over before all rows were read") from error


def _load_order(request: pb.LoadTableRequest) -> LoadOrder:
    source: Source
    if request.WhichOneof("source") == "checkpoint":
        if not request.checkpoint.path:
            raise InvalidArgument("checkpoint.path: a file or folder on the pool's host")
        sent = request.checkpoint
        source = CheckpointOrder(Path(sent.path), dict(sent.tensors), sent.name, sent.row_dtype)
    elif request.WhichOneof("source") == "random":
        source = RandomOrder(request.random.seed)
    elif request.WhichOneof("source") == "grown":
        if not request.grown.path:
            raise InvalidArgument("grown.path: a folder on the pool's host")
        source = GrownOrder(Path(request.grown.path), request.grown.name)
    elif request.WhichOneof("source") == "store":
        source = _store_order(request.store)
    elif request.WhichOneof("source") == "peers":
        asked = request.peers
        source = PeerOrder(tuple(asked.endpoints), asked.ref.model, asked.ref.version)
    else:
        raise InvalidArgument("source: checkpoint, random, grown, peers or store")
    return LoadOrder(source, request.manifest_json, request.token_map, request.keep_previous, _share(request))


def _share(request: pb.LoadTableRequest) -> Share | None:
    if not request.HasField("placement"):
        return None
    sent = request.placement
    return Share(sent.owner, Spread(tuple(sent.owners), sent.replicas, sent.stretch_rows))


def _scrub(figures: Scrubbed) -> pb.Scrub:
    return pb.Scrub(
        chunks_checked_total=figures.checked, chunks_bad_total=figures.bad, chunks_repaired_total=figures.repaired,
        pass_ended_at_seconds=figures.pass_ended_at_seconds,
    )  # fmt: skip


def _held(held: Ranges | None) -> list[pb.RowRange]:
    """None: all; a pool that holds none says [0, 0)."""
    ranges = () if held is None else held or ((0, 0),)
    return [pb.RowRange(first=first, last=last) for first, last in ranges]


def _store_order(source: pb.StoreSource) -> StoreOrder:
    if not source.master or not source.ref.model:
        raise InvalidArgument("store: master (host:port) and the name of a model")
    return StoreOrder(source.master, source.protocol or "tcp", source.ref.model, source.ref.version)


def _models(listing: Sequence[Listed]) -> list[pb.Model]:
    return [_model(listed) for listed in listing]


def _model(listed: Listed) -> pb.Model:
    resident = listed.resident
    return pb.Model(
        ref=pb.ModelRef(model=resident.name, version=resident.version), current=listed.current,
        manifest_json=resident.model.to_json(), segment_bytes=resident.stored.stored_bytes, readers=listed.readers,
        loaded_at_seconds=resident.stored.loaded_at_seconds, warm_state=_WARM_STATES[resident.warm_state],
        damaged_at_ns=resident.damaged_at_ns,
    )  # fmt: skip


def _progress(progress: Progress) -> pb.Progress:
    return pb.Progress(bytes_done=progress.bytes_done, bytes_total=progress.bytes_total, step=progress.step)
