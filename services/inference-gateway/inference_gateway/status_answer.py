"""`/v1/treadle/status`: how gateway, workers and pools are, in one object, for the page and for programs.

Owns the answer. Everything in it is known already: no request waits for a worker or a pool here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal, cast

from typing_extensions import TypedDict

from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.member import Member
from inference_gateway.domain.pool_watch import PoolState, PoolWatch
from inference_gateway.domain.worker_figures import LayerFigures, WorkerFigures


class LayerStatus(TypedDict):
    """One Engram layer: counters since the worker's start, percentiles over its last tickets. Times in milliseconds."""

    layer: int
    tickets: int
    tickets_in_time: int
    gather_ms_p50: float
    gather_ms_p99: float
    slack_ms_p50: float
    slack_ms_p01: float
    stall_ms: float
    row_bytes: int
    rows_missing: int


class MemoryStatus(TypedDict):
    """One memory at one worker. `refusal`: why it cannot be chosen; empty: it can."""

    model: str
    version: str
    open: bool
    default: bool
    requests: int
    tokens: int
    transport: str
    fused: bool
    refusal: str


class PrefixStatusAnswer(TypedDict):
    """One long prefix at one worker. `refusal`: why it cannot be chosen; empty: it can. `fallbacks`: requests sent to its exact KV."""

    name: str
    version: str
    tokens: int
    open: bool
    requests: int
    mapped_bytes: int
    fallbacks: int
    refusal: str


class WorkerState(TypedDict):
    """A worker. `reason`: why it gets no requests, null: it does. Counters are since its start; the rest is of now.

    age_seconds: since it told this; in_flight: requests that this gateway has there
    """

    name: str
    ready: bool
    reason: str | None
    in_flight: int
    model: str
    engine: str
    engine_version: str
    dtype: str
    build_version: str
    pid: int
    age_seconds: float
    requests_running: int
    requests_running_max: int
    requests_waiting: int
    requests_waiting_max: int
    wait_seconds_predicted: float
    steps: int
    step_seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    engram_model: str
    engram_version: str
    engram_transport: str
    engram_fused: bool
    engram_layers: list[LayerStatus]
    memories: list[MemoryStatus]
    prefixes: list[PrefixStatusAnswer]


class UnknownWorker(TypedDict):
    """A worker that never answered."""

    name: str
    ready: Literal[False]
    reason: str | None
    in_flight: int


class TableStatus(TypedDict):
    """A resident version of the pool; `warm`: whether its pages are entered in the pool's process."""

    model: str
    version: str
    current: bool
    bytes: int
    readers: int
    warm: str


class PoolStatusAnswer(TypedDict):
    """A pool that the gateway was told of. `reason`: why its last answer is missing, null: it is not; bytes_max 0: no limit."""

    address: str
    ready: bool
    reason: str | None
    age_seconds: float
    bytes: int
    bytes_max: int
    page_bytes: int
    tables: list[TableStatus]


class GatewayStatus(TypedDict):
    """This process. `in_progress`: generations let in and not yet over; `waiting`: those of them that wait for a place at a worker."""

    version: str
    ready: bool
    reason: str | None
    draining: bool
    uptime_seconds: float
    in_progress: int
    waiting: int


class FabricStatus(TypedDict):
    """How everything is. Rates are for the caller to make, from two answers."""

    gateway: GatewayStatus
    workers: list[WorkerState | UnknownWorker]
    pools: list[PoolStatusAnswer]


def workers_status(fleet: Fleet) -> list[WorkerState | UnknownWorker]:
    """All members of the fleet, in the order in which they came."""
    return [_worker(member) for member in fleet.members]


def pools_status(watches: Sequence[PoolWatch]) -> list[PoolStatusAnswer]:
    """The pools that the gateway was told of."""
    return [_pool(watch.state()) for watch in watches]


def _worker(member: Member) -> WorkerState | UnknownWorker:
    reason, status = member.not_usable_because(), member.watch.status
    if status is None or status.figures is None:
        return {"name": member.name, "ready": False, "reason": reason, "in_flight": member.in_flight}
    figures = status.figures
    return {
        "name": member.name,
        "ready": reason is None,
        "reason": reason,
        "in_flight": member.in_flight,
        "model": status.model,
        "engine": figures.engine,
        "engine_version": figures.engine_version,
        "dtype": figures.dtype,
        "build_version": status.build_version,
        "pid": status.pid,
        "age_seconds": round(time.monotonic() - figures.taken_seconds, 3),
        "requests_running": figures.requests_running,
        "requests_running_max": figures.requests_running_max,
        "requests_waiting": figures.requests_waiting,
        "requests_waiting_max": figures.requests_waiting_max,
        "wait_seconds_predicted": figures.wait_seconds_predicted,
        "steps": figures.steps,
        "step_seconds": figures.step_seconds,
        "prompt_tokens": figures.prompt_tokens,
        "completion_tokens": figures.completion_tokens,
        "cached_tokens": figures.cached_tokens,
        "engram_model": figures.engram.model,
        "engram_version": figures.engram.version,
        "engram_transport": figures.engram.transport,
        "engram_fused": figures.engram.fused,
        "engram_layers": [_layer(layer) for layer in figures.engram.layers],
        "memories": _memories(figures),
        "prefixes": [cast("PrefixStatusAnswer", asdict(prefix)) for prefix in status.prefixes],
    }


def _layer(layer: LayerFigures) -> LayerStatus:
    return {
        "layer": layer.layer,
        "tickets": layer.tickets,
        "tickets_in_time": layer.tickets_in_time,
        "gather_ms_p50": _ms(layer.gather_seconds_p50),
        "gather_ms_p99": _ms(layer.gather_seconds_p99),
        "slack_ms_p50": _ms(layer.slack_seconds_p50),
        "slack_ms_p01": _ms(layer.slack_seconds_p01),
        "stall_ms": _ms(layer.stall_seconds),
        "row_bytes": layer.row_bytes,
        "rows_missing": layer.rows_missing,
    }


def _memories(figures: WorkerFigures) -> list[MemoryStatus]:
    return [
        {
            "model": memory.model,
            "version": memory.version,
            "open": memory.open,
            "default": memory.default,
            "requests": memory.requests,
            "tokens": memory.tokens,
            "transport": memory.transport,
            "fused": memory.fused,
            "refusal": memory.refusal,
        }
        for memory in figures.memories
    ]


def _pool(state: PoolState) -> PoolStatusAnswer:
    known = state.figures
    return {
        "address": state.address,
        "ready": known is not None and not state.reason and not known.draining,
        "reason": state.reason or ("the pool is draining" if known is not None and known.draining else None),
        "age_seconds": round(time.monotonic() - state.taken_seconds, 3),
        "bytes": known.bytes if known else 0,
        "bytes_max": known.bytes_max if known else 0,
        "page_bytes": known.page_bytes if known else 0,
        "tables": [
            {
                "model": table.model,
                "version": table.version,
                "current": table.current,
                "bytes": table.bytes,
                "readers": table.readers,
                "warm": table.warm,
            }
            for table in (known.tables if known else ())
        ],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)
