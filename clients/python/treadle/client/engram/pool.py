"""Calls an engram pool from plain code: load, open, list, watch, promote, verify, remove. The same from asyncio: async_pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.client.endpoint import Endpoint, check_protocol
from treadle.client.engram import pool_types as types
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.load_messages import (
    LOAD_SECONDS_MAX,
    LoadAnswers,
    ProgressCallback,
    grown_request,
    load_request,
    placed,
    report,
    store_request,
)
from treadle.client.engram.mooncake_push import Pushed, PushOptions, push_version
from treadle.client.engram.mooncake_store import SegmentStore
from treadle.client.engram.owners import OwnerList, OwnerWatch
from treadle.client.engram.pool_types import model_ref
from treadle.client.engram.table_reading import describe_table, read_table
from treadle.client.engram.transport_choice import row_source
from treadle.contract import EngramModel
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

FUSION_SECONDS_MAX = 60.0  # weights are megabytes; the pool ends a call after its own `gather_seconds_max`
WATCH_SECONDS_MAX = 24 * 3600.0  # a watch is renewed daily


class EngramPool:
    """A pool, called from plain code. Owns its channel; `close()` or use as a context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._channel = endpoint, endpoint.channel()
        self._stub = pb_grpc.EngramPoolServiceStub(self._channel)

    def open(
        self, model: str, version: str | None = None, *, transport: str = "auto", expected: Mapping[str, str] | None = None,
        workers: int = 1,
    ) -> EngramHandle:  # fmt: skip
        """Pin a version and make its rows reachable.

        version:   None: the current one
        transport: auto (mapped if the pool is on this host and lets us, else its ring, its socket door, or rpc), mapped, local, ring, socket,
                   mooncake or rpc
        expected:  fingerprint fields that must be so, e.g. {"token_map": digest}
        workers:   native gather threads of a mapped or local handle
        Raises NotFound, FingerprintMismatch naming the field, DataLoss, ProtocolMismatch, Unavailable.
        """
        self.status()
        request = pb.OpenModelRequest(ref=model_ref(model, version), expected_fingerprint=dict(expected or {}))
        opened = types.opened_model(self._endpoint.call(self._stub.OpenModel, request))
        source = row_source(self._endpoint, opened, transport, workers)
        return EngramHandle(opened.resident.model, opened.resident.version, source, opened.card)

    def load_random(
        self, model: EngramModel, token_map: NDArray[np.int32] | None = None, *, seed: int = 0, keep_previous: bool = False,
        placement: types.OwnerShare | None = None, progress: ProgressCallback | None = None, timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> types.ResidentModel:  # fmt: skip
        """Load seeded random rows for a template, or an owner's share of them.

        Raises ResourceExhausted when there is no room, before anything is allocated.
        """
        request = load_request(model, token_map, keep_previous)
        request.random.CopyFrom(pb.RandomSource(seed=seed))
        return self._load(placed(request, placement), progress, timeout_seconds)

    def load_checkpoint(
        self, path: Path, model: EngramModel | None = None, token_map: NDArray[np.int32] | None = None, *,
        tensors: Mapping[str, str] | None = None, name: str = "", row_dtype: str = "", keep_previous: bool = False,
        placement: types.OwnerShare | None = None, progress: ProgressCallback | None = None, timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> types.ResidentModel:  # fmt: skip
        """Load tables from safetensors on the pool's host; `placement`: an owner's share of them.

        model:     template to load for; None: derived from the checkpoint's config.json (DeepSeek-V4.1, Qwen PLE) and tensors
        tensors:   role -> tensor name where names do not match by suffix, e.g. {"1.rows": "engram.shard_*.weight"}
        name, row_dtype: where the model is derived: the name to load it under ("": the folder's), and what U8 rows hold: nf4, int4
        Raises InvalidArgument listing the tensors found when roles stay open, NotFound, ResourceExhausted, FingerprintMismatch
        for a checkpoint that hashes otherwise.
        """
        source = pb.CheckpointSource(path=str(path), tensors=dict(tensors or {}), name=name, row_dtype=row_dtype)
        request = load_request(model, token_map, keep_previous)
        request.checkpoint.CopyFrom(source)
        return self._load(placed(request, placement), progress, timeout_seconds)

    def load_grown(
        self, path: Path, name: str | None = None, *, keep_previous: bool = True, progress: ProgressCallback | None = None,
        timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> types.ResidentModel:  # fmt: skip
        """Load a grown memory: a folder on the pool's host with manifest.json, rows, fusion weights and card.

        name:          to load it under; None: its manifest's own
        keep_previous: keep the version that is current now, so that `promote` can go back to it; the pool keeps a few
        Raises NotFound and InvalidArgument naming the file, DataLoss for one that is not what the manifest says, ResourceExhausted.
        """
        return self._load(grown_request(path, name, keep_previous), progress, timeout_seconds)

    def load_peers(
        self, endpoints: Sequence[str], model: str, version: str | None = None, *, placement: types.OwnerShare | None = None,
        keep_previous: bool = False, progress: ProgressCallback | None = None, timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> types.ResidentModel:  # fmt: skip
        """Load a version that other pools hold, whole or in parts.

        endpoints: their addresses, asked in this order; version: None: the one that is current at the first that answers
        placement: keep an owner's rows only; the digests of all chunks are compared with the version all the same
        Raises NotFound, Unavailable naming each peer's reason, DataLoss for bytes that do not fit, ResourceExhausted.
        """
        request = pb.LoadTableRequest(
            peers=pb.PeerSource(endpoints=endpoints, ref=model_ref(model, version)), keep_previous=keep_previous
        )
        return self._load(placed(request, placement), progress, timeout_seconds)

    def describe(self, model: str, version: str | None = None) -> types.OpenedModel:
        """Where a version lies and what it is, without opening it. Raises NotFound, DataLoss, Unavailable."""
        return types.opened_model(self._endpoint.call(self._stub.OpenModel, pb.OpenModelRequest(ref=model_ref(model, version))))

    def describe_table(self, model: str, layer: int, version: str | None = None) -> tuple[bytes, bytes]:
        """(sha256 of each chunk of a table, joined; its token map, int32 little-endian, or empty), for pools."""
        request = pb.ReadTableRequest(ref=model_ref(model, version), layer=layer)
        return describe_table(self._endpoint, self._stub, request, self._endpoint.timeout_seconds)

    def read_table(self, model: str, layer: int, first_byte: int, byte_count: int, version: str | None = None) -> bytes:
        """Bytes of a table as they lie in the pool, for pools; compare them with its digests.

        Raises RowOutOfRange where that pool does not hold them all, DataLoss for another number of bytes.
        """
        request = pb.ReadTableRequest(ref=model_ref(model, version), layer=layer, first_byte=first_byte, byte_count=byte_count)
        return read_table(self._endpoint, self._stub, request, self._endpoint.timeout_seconds)

    def load_store(
        self, store: str, model: str, version: str | None = None, *, protocol: str = "tcp", keep_previous: bool = True,
        progress: ProgressCallback | None = None, timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> types.ResidentModel:  # fmt: skip
        """Load a version that a Mooncake Store keeps; store: host:port of its master, as the pool reaches it.

        version: None: the one that was pushed last
        Raises NotFound, DataLoss for bytes that are not the version's, Unavailable, ResourceExhausted.
        """
        return self._load(store_request(store, protocol, model, version, keep_previous), progress, timeout_seconds)

    def push_store(
        self, store: str, model: str, version: str | None = None, *, options: PushOptions | None = None, protocol: str = "tcp",
        progress: ProgressCallback | None = None,
    ) -> Pushed:  # fmt: skip
        """Push a version of this host's pool into a Mooncake Store. Errors as in `push_version`; needs Mooncake in this process."""
        opened = self.describe(model, version)
        named = opened.resident.model.fusion
        fusion = self.read_fusion(model, opened.resident.version) if named is not None and named.weights is not None else b""
        with SegmentStore(store, protocol) as segments:
            return push_version(segments, opened, fusion, options or PushOptions(), progress)

    def promote(self, model: str, version: str | None = None) -> types.Promoted:
        """Make a resident version current. version: None: the one that was current before the present one. Raises NotFound."""
        request = pb.PromoteModelRequest(ref=model_ref(model, version))
        return types.promoted(self._endpoint.call(self._stub.PromoteModel, request))

    def read_fusion(self, model: str, version: str | None = None, *, timeout_seconds: float = FUSION_SECONDS_MAX) -> bytes:
        """The fusion weights of a version (None: the current one), a safetensors file of at most FUSION_BYTES_MAX, digest compared.

        Raises NotFound for no such version or one without weights, DataLoss, ResourceExhausted.
        """
        opened = self.describe(model, version)
        weights = types.FusionBytes(opened.resident.model)
        request = pb.ReadFusionRequest(ref=model_ref(model, opened.resident.version))
        for piece in self._endpoint.stream(self._stub.ReadFusion, request, timeout_seconds):
            weights.add(piece)
        return weights.whole()

    def list_models(self, timeout_seconds: float | None = None) -> list[types.ResidentModel]:
        """Resident versions, grouped by model, the current one first. timeout_seconds: None: the endpoint's."""
        answer = self._endpoint.call(self._stub.ListModels, pb.ListModelsRequest(), timeout_seconds)
        return [types.resident_model(model) for model in answer.models]

    def watch(self, timeout_seconds: float = WATCH_SECONDS_MAX) -> Iterator[list[types.ResidentModel]]:
        """The list now, then again after each change, until closed or the time is over (DeadlineExceeded)."""
        for answer in self._endpoint.stream(self._stub.WatchModels, pb.WatchModelsRequest(), timeout_seconds):
            yield [types.resident_model(model) for model in answer.models]

    def watch_owners(self, model: str = "", version: str = "", *, itself_only: bool = False) -> OwnerWatch:
        """The owners of the fabric as this pool knows them, now and after each change: iterate it, `cancel` it to end it.

        model, version: tell only what they hold of this version, both given; none: of all
        itself_only:    tell of this pool alone
        """
        request = pb.WatchOwnersRequest(ref=pb.ModelRef(model=model, version=version), itself_only=itself_only)
        call = self._stub.WatchOwners(request, timeout=WATCH_SECONDS_MAX, metadata=self._endpoint.metadata)
        return OwnerWatch(self._endpoint, call)

    def owners(self, model: str = "", version: str = "") -> OwnerList:
        """The owners now. Raises Unavailable."""
        with closing(iter(self.watch_owners(model, version))) as lists:
            return next(lists)

    def verify(
        self,
        model: str,
        version: str | None = None,
        progress: ProgressCallback | None = None,
        timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> int:
        """Have the pool read a version again; returns the bytes checked. Raises DataLoss if a checksum does not fit."""
        checked = 0
        request = pb.VerifyModelRequest(ref=model_ref(model, version))
        for answer in self._endpoint.stream(self._stub.VerifyModel, request, timeout_seconds):
            checked = answer.progress.bytes_done
            report(progress, answer.progress)
        return checked

    def reserve_bandwidth(self, name: str, bytes_per_second: int, seconds: float) -> types.ReservedBandwidth:
        """Keep bandwidth of the pool's memory free for other traffic, such as KV blocks: rows that the pool gathers yield to it.

        name:             who asks; a second reserve of the same name replaces the first
        bytes_per_second: bytes copied a second; 0 gives it back
        seconds:          it ends by itself; renew before
        Processes that map tables gather on their own and do not hear of it: their queue has a `reserve` of its own.
        Raises InvalidArgument, ResourceExhausted where rows would have too little, Unavailable without the native data plane.
        """
        request = pb.ReserveBandwidthRequest(name=name, bytes_per_second=bytes_per_second, seconds=seconds)
        return types.reserved_bandwidth(self._endpoint.call(self._stub.ReserveBandwidth, request))

    def hint_tokens(
        self, model: str, token_ids: Sequence[int], version: str | None = None, *, timeout_seconds: float | None = None
    ) -> int:
        """Tell the pool which tokens will be looked up soon, whatever the transport of those who will; returns at once.

        token_ids: of one sequence from its beginning, at most 65536
        version:   None: the current one. timeout_seconds: None: the endpoint's
        Returns how many of the first tokens it brings near while nothing with a deadline waits; 0: they are as near as they come, or as
        many hints as may wait already. Raises NotFound, DataLoss, InvalidArgument, Unavailable.
        """
        request = pb.HintTokensRequest(ref=model_ref(model, version), token_ids=token_ids)
        return self._endpoint.call(self._stub.HintTokens, request, timeout_seconds).tokens_taken

    def remove(self, model: str, version: str | None = None) -> tuple[list[str], int]:
        """Take a version (None: all) out of service. Returns the versions removed, and how many wait for their readers."""
        answer = self._endpoint.call(self._stub.RemoveModel, pb.RemoveModelRequest(ref=model_ref(model, version)))
        return [ref.version for ref in answer.removed], answer.awaiting_readers

    def status(self, timeout_seconds: float | None = None) -> types.PoolStatus:
        """How the pool is. Raises ProtocolMismatch if SDK and pool do not fit, Unavailable if it does not answer."""
        status = types.pool_status(self._endpoint.call(self._stub.Status, pb.StatusRequest(), timeout_seconds))
        check_protocol(f"engram-pool {self._endpoint.address}", status.proto_version)
        return status

    def close(self) -> None:
        """Close the channel. Handles go on working."""
        self._channel.close()

    def __enter__(self) -> EngramPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _load(self, request: pb.LoadTableRequest, progress: ProgressCallback | None, timeout_seconds: float) -> types.ResidentModel:
        answers = LoadAnswers(progress)
        for answer in self._endpoint.stream(self._stub.LoadTable, request, timeout_seconds):
            answers.add(answer)
        return answers.loaded()
