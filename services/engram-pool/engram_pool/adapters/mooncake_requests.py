"""Requests at the mooncake door, read and checked: how many rows, and what writes them.

Does not choose where they are written (`mooncake_door`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from engram_pool.adapters.mooncake_tables import HeldVersion
from engram_pool.domain.held_rows import check_held
from engram_pool.domain.windows_bytes import read_ids, read_windows
from treadle.client.engram.mooncake_wire import Frame, Kind
from treadle.contract import FingerprintMismatch, InvalidArgument, ProtocolMismatch, Windows
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.kernels import gather_rows, lookup, row_ids


class Work:
    """Checked work: `rows` rows of `row_bytes`; `fill` writes them into u8 [rows, row_bytes]."""

    def __init__(self, held: HeldVersion, rows: int, fill: Callable[[NDArray[np.uint8]], None]) -> None:
        self.rows, self.row_bytes, self.fill = rows, held.resident.model.row.bytes, fill


def _gather(held: HeldVersion, body: bytes) -> Work:
    request = pb.GatherRequest()
    _parse(request, body)
    _check_ref(held, request.ref)
    held.resident.model.layer_position(request.layer)
    table, ids = held.tables[request.layer], read_ids(request.rows)
    check_held(ids, held.ranges(request.layer), request.layer)
    return Work(held, ids.size, lambda out: gather_rows(table, ids, out))


def _lookup(held: HeldVersion, body: bytes) -> Work:
    request = pb.LookupRequest()
    _parse(request, body)
    _check_ref(held, request.ref)
    model, sent, layers = held.resident.model, request.windows, tuple(request.layers)
    if not layers or len(set(layers)) != len(layers):
        raise InvalidArgument(f"layers: one or more, each one once, got {list(layers)[:16]}")
    for layer in layers:
        model.layer_position(layer)
    windows = read_windows(
        model.order_max, tokens=sent.tokens, starts=sent.starts, lookback=sent.lookback, dead=sent.dead, lookback_dead=sent.lookback_dead
    )  # fmt: skip
    each = windows.token_count * model.columns

    def fill(out: NDArray[np.uint8]) -> None:
        for place, layer in enumerate(layers):
            _fill_layer(held, layer, windows, out[place * each : (place + 1) * each])

    return Work(held, each * len(layers), fill)


def _fill_layer(held: HeldVersion, layer: int, windows: Windows, out: NDArray[np.uint8]) -> None:
    model = held.resident.model
    if (ranges := held.ranges(layer)) is not None:
        ids = row_ids(held.plan(layer), windows).reshape(-1)
        check_held(ids, ranges, layer)
        gather_rows(held.tables[layer], ids, out)
        return
    lookup(held.plan(layer), held.tables[layer], windows, out.reshape(windows.token_count, model.columns, model.row.bytes))


def read_work(held: HeldVersion, frame: Frame) -> Work:
    """What a client asks for. Raises InvalidArgument, RowOutOfRange, FingerprintMismatch, ProtocolMismatch."""
    if frame.kind is Kind.GATHER:
        return _gather(held, frame.body)
    if frame.kind is Kind.LOOKUP:
        return _lookup(held, frame.body)
    raise ProtocolMismatch(f"{frame.kind.name} from a client")


def _parse(request: pb.GatherRequest | pb.LookupRequest, body: bytes) -> None:
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise ProtocolMismatch("a request that cannot be read") from error


def _check_ref(held: HeldVersion, ref: pb.ModelRef) -> None:
    resident = held.resident
    for field, asked, opened in (("model", ref.model, resident.name), ("version", ref.version, resident.version)):
        if asked != opened:
            raise FingerprintMismatch(field, opened, asked)
