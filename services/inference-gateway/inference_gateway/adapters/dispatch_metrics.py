"""Figures of what happens between the gateway and its workers, in Prometheus: queue, retries, hedges, silences, breakers, drain.

Counters are told; gauges are read from the parts themselves whenever somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inference_gateway.domain.breaker import BreakerState

if TYPE_CHECKING:
    from inference_gateway.domain.dispatch import Dispatch
    from inference_gateway.domain.fleet import Fleet
    from inference_gateway.domain.lifetime import Admission

_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class PrometheusDispatch:
    """Fits domain.ports.DispatchFigures. One for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._retries = Counter(
            "treadle_gateway_retries", "Generations asked of another worker before their first piece, by why", ["reason"],
            registry=registry,
        )  # fmt: skip
        self._hedges = Counter(
            "treadle_gateway_hedges", "Second workers asked for a first piece, by outcome", ["outcome"], registry=registry
        )
        self._stalls = Counter(
            "treadle_gateway_worker_stalls", "Workers that sent nothing in time: no first piece, or none after it", ["when"],
            registry=registry,
        )  # fmt: skip
        self._refusals = Counter(
            "treadle_gateway_queue_refusals", "Requests refused for want of a place, by why", ["reason"], registry=registry
        )
        self._waits = Histogram(
            "treadle_gateway_queue_wait_seconds", "From a request's plan to its place", registry=registry, buckets=_WAIT_BUCKETS
        )

    def waited(self, seconds: float) -> None:
        """Observe a wait."""
        self._waits.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._refusals.labels(reason).inc()

    def retried(self, reason: str) -> None:
        """Count a retry."""
        self._retries.labels(reason).inc()

    def hedged(self, outcome: str) -> None:
        """Count a hedge."""
        self._hedges.labels(outcome).inc()

    def stalled(self, when: str) -> None:
        """Count a silence."""
        self._stalls.labels(when).inc()


class DispatchGauges(Collector):
    """What stands in the line, on the workers' breakers and in the drain at this moment."""

    def __init__(self, registry: CollectorRegistry, dispatch: Dispatch, fleet: Fleet, admission: Admission) -> None:
        self._dispatch, self._fleet, self._admission = dispatch, fleet, admission
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges as they are."""
        waiting = GaugeMetricFamily("treadle_gateway_queue_requests", "Requests that wait for a place", labels=["model"])
        taken = GaugeMetricFamily("treadle_gateway_generations", "Generations given to workers", labels=["model"])
        predicted = GaugeMetricFamily(
            "treadle_gateway_queue_predicted_wait_seconds", "How long a request that came now would wait", labels=["model"]
        )
        for model, line in self._dispatch.lines.items():
            waiting.add_metric([model], line.waiting)
            taken.add_metric([model], line.taken)
            predicted.add_metric([model], line.predicted_wait_seconds())
        breakers = GaugeMetricFamily(
            "treadle_gateway_breaker_state", "0: the worker gets requests, 1: one at a time, 2: none", labels=["worker"]
        )
        for member in self._fleet.members:
            breakers.add_metric([member.name], _STATES[member.breaker.state])
        drain = GaugeMetricFamily(
            "treadle_gateway_drain_state", "0: ready, 1: not ready and takes late requests, 2: takes none",
            value=2 if self._admission.draining else int(self._admission.leaving),
        )  # fmt: skip
        yield from (waiting, taken, predicted, breakers, drain)
