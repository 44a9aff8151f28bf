"""What a pool says of itself, as plain values, and the messages of both directions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, EngramModel, NotFound, ResourceExhausted, Windows
from treadle.contract.engram_model import FUSION_BYTES_MAX
from treadle.engram.v1 import engram_pool_pb2 as pb


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """One version that a pool holds. `readers`: processes on its host that hold it now."""

    model: EngramModel
    version: str
    current: bool
    segment_bytes: int
    readers: int
    loaded_at_seconds: float


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where one table lies on the pool's host; `rows_offset_bytes` from the start of the file."""

    layer: int
    path: Path
    rows_offset_bytes: int
    rows: int
    row_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class PoolDoor:
    """Another way to a pool's rows than gRPC. `transport`: what to speak at `address`."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A version and where it lies. A reader holds flock(LOCK_SH) on `lock_path` while it maps.

    card:  of a grown memory
    doors: of the pool, the fastest first
    """

    resident: ResidentModel
    segments: tuple[SegmentPlace, ...]
    fingerprint: Mapping[str, str]
    lock_path: Path
    card: Mapping[str, Any] | None = None
    doors: tuple[PoolDoor, ...] = ()

    def door(self, transport: str) -> PoolDoor:
        """The pool's door for `transport`. Raises NotFound saying which there are."""
        for door in self.doors:
            if door.transport == transport:
                return door
        there = ", ".join(door.transport for door in self.doors) or "none"
        raise NotFound(f"the pool has no {transport} door; there is {there} (beside mapped, local and rpc)")


@dataclass(frozen=True, slots=True)
class Promoted:
    """What is current now, and the version that was until then: the same where nothing changed, empty where none was."""

    now: ResidentModel
    previous_version: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long piece of work is."""

    bytes_done: int
    bytes_total: int
    step: str


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """How a pool is. `table_bytes_max` 0: as much as its file system holds."""

    build_version: str
    proto_version: str
    pid: int
    table_bytes: int
    table_bytes_max: int
    segment_dir: Path
    page_bytes: int
    draining: bool


def resident_model(message: pb.Model) -> ResidentModel:
    """Read one. Raises InvalidArgument for a manifest that this SDK does not understand."""
    return ResidentModel(
        EngramModel.from_json(message.manifest_json), message.ref.version, message.current, message.segment_bytes,
        message.readers, message.loaded_at_seconds,
    )  # fmt: skip


def opened_model(message: pb.OpenModelResponse) -> OpenedModel:
    """Read one."""
    places = tuple(
        SegmentPlace(s.layer, Path(s.path), s.rows_offset_bytes, s.rows, s.row_bytes, s.file_bytes) for s in message.segments
    )
    return OpenedModel(
        resident_model(message.model), places, dict(message.fingerprint), Path(message.lock_path), _card(message.card_json),
        tuple(PoolDoor(door.transport, door.address) for door in message.doors),
    )  # fmt: skip


def promoted(message: pb.PromoteModelResponse) -> Promoted:
    """Read one."""
    return Promoted(resident_model(message.model), message.previous_version)


class FusionBytes:
    """Fusion weights of a version as they come in."""

    def __init__(self, model: EngramModel) -> None:
        """Raises NotFound if the manifest names no weights."""
        if model.fusion is None or model.fusion.weights is None:
            raise NotFound(f"{model.name} {model.version}: its manifest names no fusion weights")
        self._name, self._digest = f"{model.name} {model.version}", model.fusion.weights
        self._data, self._total = bytearray(), 0

    def add(self, piece: pb.ReadFusionResponse) -> None:
        """Take one piece, in order. Raises ResourceExhausted beyond FUSION_BYTES_MAX."""
        self._total = self._total or piece.bytes_total
        if max(self._total, len(self._data) + len(piece.data)) > FUSION_BYTES_MAX:
            raise ResourceExhausted(f"{self._name}: {self._total} bytes of fusion weights, the limit is {FUSION_BYTES_MAX}")
        self._data += piece.data

    def whole(self) -> bytes:
        """All of it. Raises DataLoss if it is not what the manifest names."""
        data = bytes(self._data)
        if len(data) != self._total or hashlib.sha256(data).hexdigest() != self._digest:
            raise DataLoss(f"{self._name}: the pool sent {len(data)} bytes that are not the fusion weights of the manifest")
        return data


def pool_status(message: pb.StatusResponse) -> PoolStatus:
    """Read one."""
    return PoolStatus(
        message.build_version, message.proto_version, message.pid, message.table_bytes, message.table_bytes_max,
        Path(message.segment_dir), message.page_bytes, message.draining,
    )  # fmt: skip


def windows_message(windows: Windows) -> pb.Windows:
    """Write one: little-endian arrays."""
    return pb.Windows(
        tokens=windows.tokens.astype("<i8", copy=False).tobytes(), starts=windows.starts.astype("<i4", copy=False).tobytes(),
        lookback=windows.lookback.astype("<i8", copy=False).tobytes(), dead=_mask(windows.dead), lookback_dead=_mask(windows.lookback_dead),
    )  # fmt: skip


def load_request(model: EngramModel | None, token_map: NDArray[np.int32] | None, keep_previous: bool) -> pb.LoadTableRequest:
    """Write one, without its source."""
    return pb.LoadTableRequest(
        manifest_json=model.template.to_json() if model else b"",
        token_map=b"" if token_map is None else token_map.astype("<i4").tobytes(), keep_previous=keep_previous,
    )  # fmt: skip


def grown_request(path: Path, name: str | None, keep_previous: bool) -> pb.LoadTableRequest:
    """Write one."""
    return pb.LoadTableRequest(grown=pb.GrownSource(path=str(path), name=name or ""), keep_previous=keep_previous)


def store_request(store: str, protocol: str, model: str, version: str | None, keep_previous: bool) -> pb.LoadTableRequest:
    """Write one."""
    source = pb.StoreSource(master=store, protocol=protocol, ref=pb.ModelRef(model=model, version=version or ""))
    return pb.LoadTableRequest(store=source, keep_previous=keep_previous)


def _mask(mask: NDArray[np.bool_] | None) -> bytes:
    return b"" if mask is None else mask.astype(np.uint8).tobytes()


def _card(text: bytes) -> dict[str, Any] | None:
    if not text:
        return None
    try:
        card = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataLoss("the pool sent a card that is not JSON") from error
    if not isinstance(card, dict):
        raise DataLoss("the pool sent a card that is no object")
    return card
