"""What vLLM's engine core reports of each step, as our StepReports and load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from inference_worker.domain.report import EngineTotals, StepReport


class Steps:
    """Counts steps as they are reported; on the event loop alone.

    told: hears of each step
    """

    def __init__(self, told: Callable[[StepReport], None]) -> None:
        self._told = told
        self.totals = EngineTotals()
        self.running, self.waiting = 0, 0
        self._hits = 0

    def hit(self) -> None:
        """A request found a beginning of its prompt in the prefix cache; counted with the next step."""
        self._hits += 1

    def factory(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """What AsyncLLM makes its logger with."""
        return _Listener(config, engine_index, self)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """One message of the engine core: at most one step."""
        if scheduler is None:
            return
        self.running = scheduler.num_running_reqs
        self.waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
        details = scheduler.iteration_details
        if details is None or details.is_dummy:
            return
        hits, self._hits = self._hits, 0
        report = StepReport(
            details.elapsed_ms / 1e3, details.num_ctx_requests + details.num_generation_requests, details.num_ctx_tokens,
            details.num_generation_tokens, iteration.num_generation_tokens if iteration is not None else 0,
            iteration.prompt_token_stats.cached_tokens if iteration is not None else 0, hits,
        )  # fmt: skip
        self.totals.add(report)
        self._told(report)


class _Listener(StatLoggerBase):  # type: ignore[misc,unused-ignore]  # vllm is not installed where this is checked
    """vLLM's way of telling its front process what the engine core reports."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int, steps: Steps) -> None:
        self._steps = steps

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:  # fmt: skip
        self._steps.record(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
