"""What a step did, and what the engine has done so far: plain numbers for status, metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One Engram ticket: a layer of one memory of a step.

    transport:      how its rows travel
    rows:           rows that came
    slack_seconds:  deadline minus completion; None when the lookup could not begin, or ended with an error
    gather_seconds: from submission to the last row; None unless all rows came
    """

    layer: int
    transport: str
    in_time: bool
    rows: int
    rows_missing: int
    stall_seconds: float
    slack_seconds: float | None
    gather_seconds: float | None

    @property
    def gather_outcome(self) -> str:
        """ok: all rows came, however late; missing: some had not when the wait was over; failed: the lookup raised an error."""
        return "failed" if self.slack_seconds is None else "missing" if self.rows_missing else "ok"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step.

    seconds:           from planning to the last token chosen
    prefill_tokens:    prompt tokens computed
    decode_tokens:     tokens computed that the model had chosen itself
    completion_tokens: tokens chosen in this step
    cached_tokens:     prompt tokens that the prefix cache saved the requests that began in this step
    cached_requests:   requests that began in this step and found something in it
    requests:          requests that took part
    layers:            one for each Engram layer of each memory
    """

    seconds: float
    requests: int
    prefill_tokens: int
    decode_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached_requests: int = 0
    layers: tuple[LayerReport, ...] = ()
    failed: bool = False


@dataclass(slots=True)
class EngineTotals:
    """Sums over all steps. Written by whoever runs the steps; numbers read from another thread may be one step old."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self.steps += 1
        self.step_seconds += report.seconds
        self.prompt_tokens += report.prefill_tokens
        self.completion_tokens += report.completion_tokens
        self.cached_tokens += report.cached_tokens


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is now."""

    requests_running: int
    requests_waiting: int
    prefix_cache_bytes: int
