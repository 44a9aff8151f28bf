"""What a pool says of itself, as plain values, and the messages of both directions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, EngramModel, NotFound, ResourceExhausted, Windows
from treadle.contract.engram_model import FUSION_BYTES_MAX
from treadle.contract.placement import Spread
from treadle.contract.warm_state import WarmState
from treadle.engram.v1 import engram_pool_pb2 as pb

_WARM_STATES = {
    pb.WARM_STATE_COLD: WarmState.COLD, pb.WARM_STATE_WARMING: WarmState.WARMING, pb.WARM_STATE_WARM: WarmState.WARM,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """One version that a pool holds.

    readers:       processes on its host that hold it now
    warm_state:    in the pool's own process
    damaged_at_ns: when damage was last found in it, since the epoch; 0: never. Copies of rows from before are to be dropped
    """

    model: EngramModel
    version: str
    current: bool
    segment_bytes: int
    readers: int
    loaded_at_seconds: float
    warm_state: WarmState = WarmState.UNKNOWN
    damaged_at_ns: int = 0


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where one table lies on the pool's host.

    segment_offset_bytes: from the start of the file or device to the segment; `rows_offset_bytes`: from there to the rows
    held:                 ranges [first, last) of the rows that the pool holds; empty: all
    """

    layer: int
    path: Path
    rows_offset_bytes: int
    rows: int
    row_bytes: int
    file_bytes: int
    segment_offset_bytes: int = 0
    held: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Door:
    """A native way to the rows of a pool. transport: socket, ring or mooncake; address: host:port, or unix:PATH."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A version and where it lies. A reader holds flock(LOCK_SH) on `lock_path` while it maps.

    card:  of a grown memory
    doors: native ways to its rows, the fastest first
    """

    resident: ResidentModel
    segments: tuple[SegmentPlace, ...]
    fingerprint: Mapping[str, str]
    lock_path: Path
    card: Mapping[str, Any] | None = None
    card_json: bytes = b""
    doors: tuple[Door, ...] = ()

    def door(self, transport: str) -> Door:
        """The pool's door for `transport`. Raises NotFound saying which there are."""
        for door in self.doors:
            if door.transport == transport:
                return door
        there = ", ".join(door.transport for door in self.doors) or "none"
        raise NotFound(f"the pool has no {transport} door; there is {there} (beside mapped, local and rpc)")


@dataclass(frozen=True, slots=True)
class OwnerShare:
    """The rows that one owner keeps of tables that are spread over several."""

    owner: str
    spread: Spread


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """The pool's background pass over all checksums, since its start. `pass_ended_at_seconds`: since the epoch; 0: no whole pass."""

    chunks_checked: int
    chunks_bad: int
    chunks_repaired: int
    pass_ended_at_seconds: float


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
class TenantStatus:
    """How one tenant stands, since the start of the pool. `rows_per_second_max` 0: no quota."""

    name: str
    rows_total: int
    refused_total: int
    late_total: int
    rows_per_second_max: int


@dataclass(frozen=True, slots=True)
class ReservedBandwidth:
    """Bandwidth of a pool's memory, bytes copied a second: kept by all reserves, and left to rows."""

    reserved_bytes_per_second: int
    left_bytes_per_second: int


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
    scrub: ScrubStatus = ScrubStatus(0, 0, 0, 0.0)
    doors: tuple[Door, ...] = ()
    tenants: tuple[TenantStatus, ...] = ()


def resident_model(message: pb.Model) -> ResidentModel:
    """Read one. Raises InvalidArgument for a manifest that this SDK does not understand."""
    return ResidentModel(
        EngramModel.from_json(message.manifest_json), message.ref.version, message.current, message.segment_bytes,
        message.readers, message.loaded_at_seconds, _WARM_STATES.get(message.warm_state, WarmState.UNKNOWN),
        message.damaged_at_ns,
    )  # fmt: skip


def opened_model(message: pb.OpenModelResponse) -> OpenedModel:
    """Read one."""
    places = tuple(
        SegmentPlace(
            s.layer, Path(s.path), s.rows_offset_bytes, s.rows, s.row_bytes, s.file_bytes, s.segment_offset_bytes,
            tuple((r.first, r.last) for r in s.held),
        )
        for s in message.segments
    )  # fmt: skip
    return OpenedModel(
        resident_model(message.model), places, dict(message.fingerprint), Path(message.lock_path), _card(message.card_json),
        message.card_json, _doors(message.doors),
    )  # fmt: skip


def _doors(messages: Iterable[pb.Door]) -> tuple[Door, ...]:
    return tuple(Door(message.transport, message.address) for message in messages)


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
        ScrubStatus(
            message.scrub.chunks_checked_total, message.scrub.chunks_bad_total, message.scrub.chunks_repaired_total,
            message.scrub.pass_ended_at_seconds,
        ),
        _doors(message.doors),
        tuple(TenantStatus(t.name, t.rows_total, t.refused_total, t.late_total, t.rows_per_second_max) for t in message.tenants),
    )  # fmt: skip


def reserved_bandwidth(message: pb.ReserveBandwidthResponse) -> ReservedBandwidth:
    """Read one."""
    return ReservedBandwidth(message.reserved_bytes_per_second, message.left_bytes_per_second)


def model_ref(model: str, version: str | None) -> pb.ModelRef:
    """Write one; None: the current version."""
    return pb.ModelRef(model=model, version=version or "")


def windows_message(windows: Windows) -> pb.Windows:
    """Write one: little-endian arrays."""
    return pb.Windows(
        tokens=windows.tokens.astype("<i8", copy=False).tobytes(), starts=windows.starts.astype("<i4", copy=False).tobytes(),
        lookback=windows.lookback.astype("<i8", copy=False).tobytes(), dead=_mask(windows.dead), lookback_dead=_mask(windows.lookback_dead),
    )  # fmt: skip


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
