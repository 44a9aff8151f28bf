"""Counts what the engine does for Prometheus: `treadle_worker_*`."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from inference_worker.adapters.remote_metrics import RemoteMetrics
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.report import EngineLoad, LayerReport, StepReport
from treadle.client.engram.mooncake_landing import landing_figures

STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # one decode on a laptop to a large chunk
GATHER_SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # one token mapped to a chunk by rpc
OPEN_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)  # a small memory that is mapped to a large one that is copied
SLACK_SECONDS = (-1.0, -0.1, -0.01, -0.001, 0.0, 0.0001, 0.001, 0.01, 0.1, 1.0)  # negative: late


class Loaded(Protocol):
    """An engine that says how busy it is."""

    @property
    def load(self) -> EngineLoad: ...


class WorkerMetrics:
    """An Observer and OpeningObserver that counts into `registry`. No label names a memory: their number is the pool's affair."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"treadle_worker_{name}", text, labels, registry=registry)

        self._registry = registry
        self._steps = counter("steps", "Engine steps")
        self._step_seconds = Histogram("treadle_worker_step_seconds", "Seconds of a step", buckets=STEP_SECONDS, registry=registry)
        self._step_tokens = counter("step_tokens", "Tokens that ran through the model", ("phase",))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens computed, not those from the prefix cache")
        self._completion_tokens = counter("completion_tokens", "Tokens generated")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens taken from the prefix cache")
        self._cache_hits = counter("prefix_cache_hits", "Requests that found a beginning of theirs in the prefix cache")
        self._requests = counter("requests", "Requests ended, by outcome", ("outcome",))
        self._failed_steps = counter("steps_failed", "Steps that raised an error; their requests failed")
        self._tickets = counter("engram_tickets", "Engram tickets (a layer of a step), by outcome", ("layer", "outcome"))
        self._rows_missing = counter("engram_rows_missing", "Engram rows that never came", ("layer",))
        self._stalls = counter("engram_stall_seconds", "Seconds that the engine waited for rows", ("layer",))
        self._slack = Histogram(
            "treadle_worker_engram_slack_seconds", "Deadline minus completion of a ticket", ("layer",), buckets=SLACK_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._rows = counter("engram_rows", "Engram rows that came", ("transport",))
        self._gathers = counter("engram_gathers", "Engram gathers (a layer of a step), by outcome", ("transport", "outcome"))
        self._gather_seconds = Histogram(
            "treadle_worker_engram_gather_seconds", "Seconds from submission to the last row of a gather", ("transport",),
            buckets=GATHER_SECONDS, registry=registry,
        )  # fmt: skip

        self._prefixed = counter("prefix_requests", "Requests with a long prefix, by what answered them", ("outcome",))
        self._lookups = counter("prefix_lookups", "Lookups in dictionaries: a query of a layer and a codebook")
        self._lookups_outside = counter("prefix_lookups_outside", "Those of them that found nothing like themselves")
        self._fallbacks = counter("prefix_fallbacks", "Requests that the guard sent to the exact KV of their prefix")
        self._hinted = counter("engram_hint_tokens", "Prompt tokens whose rows were brought near before their step")
        self._opens = counter("engram_opens", "Openings of Engram memories, by outcome", ("outcome",))
        self._refused = counter(
            "engram_choices_refused", "Choices of an Engram memory that could not be had, by reason", ("reason",)
        )
        self._open_seconds = Histogram(
            "treadle_worker_engram_open_seconds", "Seconds of an opening", buckets=OPEN_SECONDS, registry=registry
        )

    def watch(self, engine: Loaded) -> None:
        """Show the engine's load, read whenever the metrics are."""

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"treadle_worker_{name}", text, registry=self._registry)

        gauge("requests_running", "Requests in the batch").set_function(lambda: engine.load.requests_running)
        gauge("requests_waiting", "Requests waiting for a place in it").set_function(lambda: engine.load.requests_waiting)
        gauge("prefix_cache_bytes", "Bytes of KV kept for later requests").set_function(lambda: engine.load.prefix_cache_bytes)

    def watch_memories(self, catalogue: Catalogue) -> None:
        """Show how many memories are open, whether their pool answers and how other hosts do, read whenever the metrics are."""
        RemoteMetrics(self._registry)
        gauge = Gauge("treadle_worker_engram_memories_open", "Engram memory versions that are open", registry=self._registry)
        gauge.set_function(lambda: catalogue.open_count)
        answers = Gauge("treadle_worker_engram_pool_answers", "1 while the Engram pool answers, else 0", registry=self._registry)
        answers.set_function(lambda: catalogue.source_answers)
        quarantined = Gauge(
            "treadle_worker_engram_quarantined_bytes", "Bytes that are never used again, as a failed Mooncake read may still write there",
            registry=self._registry,
        )  # fmt: skip
        quarantined.set_function(lambda: landing_figures().quarantined_bytes)

    def opened(self, outcome: str, seconds: float) -> None:
        """See OpeningObserver."""
        self._opens.labels(outcome).inc()
        self._open_seconds.observe(seconds)

    def choice_refused(self, reason: str) -> None:
        """See OpeningObserver."""
        self._refused.labels(reason).inc()

    def step(self, report: StepReport) -> None:
        """See Observer."""
        self._steps.inc()
        self._step_seconds.observe(report.seconds)
        self._step_tokens.labels("prefill").inc(report.prefill_tokens)
        self._step_tokens.labels("decode").inc(report.decode_tokens)
        self._prompt_tokens.inc(report.prefill_tokens)
        self._completion_tokens.inc(report.completion_tokens)
        self._cached_tokens.inc(report.cached_tokens)
        self._cache_hits.inc(report.cached_requests)
        self._failed_steps.inc(report.failed)
        self.tickets(report.layers)

    def tickets(self, layers: tuple[LayerReport, ...]) -> None:
        """Engram tickets; an engine in another process tells them apart from their steps."""
        for ticket in layers:
            layer = str(ticket.layer)
            outcome = "missing" if ticket.rows_missing else "in_time" if ticket.in_time else "late"
            self._tickets.labels(layer, outcome).inc()
            self._rows_missing.labels(layer).inc(ticket.rows_missing)
            self._stalls.labels(layer).inc(ticket.stall_seconds)
            if ticket.slack_seconds is not None:
                self._slack.labels(layer).observe(ticket.slack_seconds)
            self._rows.labels(ticket.transport).inc(ticket.rows)
            self._gathers.labels(ticket.transport, ticket.gather_outcome).inc()
            if ticket.gather_seconds is not None:
                self._gather_seconds.labels(ticket.transport).observe(ticket.gather_seconds)

    def hinted(self, tokens: int) -> None:
        """See Observer."""
        self._hinted.inc(tokens)

    def prefix_used(self, outcome: str, lookups: int, lookups_outside: int) -> None:
        """See Observer."""
        self._prefixed.labels(outcome).inc()
        self._lookups.inc(lookups)
        self._lookups_outside.inc(lookups_outside)
        self._fallbacks.inc(outcome == "exact")

    def ended(self, outcome: str) -> None:
        """See Observer."""
        self._requests.labels(outcome).inc()
