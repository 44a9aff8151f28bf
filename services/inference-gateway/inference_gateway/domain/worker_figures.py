"""What a worker tells of its work, for people who look: steps, tokens, and each Engram layer's tickets and slack.

Owns the shapes. No request depends on any of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One Engram layer. Counters since the worker's start, percentiles over its last tickets; times in seconds.

    tickets_in_time: done when the layer would have begun
    slack_seconds_…: deadline minus completion, median and the tight end
    stall_seconds:   that the engine waited at this layer
    row_bytes:       bytes of rows that came
    """

    layer: int
    tickets: int
    tickets_in_time: int
    gather_seconds_p50: float
    gather_seconds_p99: float
    slack_seconds_p50: float
    slack_seconds_p01: float
    stall_seconds: float
    row_bytes: int
    rows_missing: int


@dataclass(frozen=True, slots=True)
class EngramFigures:
    """The memory of requests that choose none, and how rows of all memories come. model "": there is no default."""

    model: str
    version: str
    transport: str
    fused: bool
    layers: tuple[LayerFigures, ...]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One memory as it is used now."""

    model: str
    version: str
    open: bool
    default: bool
    requests: int
    tokens: int
    transport: str
    fused: bool
    refusal: str


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Counters since the worker's start, and how many requests it has. taken_seconds: time.monotonic() of the answer."""

    engine: str
    engine_version: str
    dtype: str
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
    engram: EngramFigures
    memories: tuple[MemoryUse, ...]
    taken_seconds: float = field(default_factory=time.monotonic, compare=False)
