"""What lookups over owners on other hosts count in this process, for Prometheus: read off when metrics are fetched."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from treadle.dataplane import remote_stats

_TEXTS = {
    "requests": "Lookups that asked owners by socket",
    "hedges": "Requests to a second owner because the first was slow",
    "hedges_won": "Of these, those that came first",
    "hedges_unpaid": "Hedges left out because too many were sent before",
    "failovers": "Requests passed on to another owner after a failure",
    "late": "Layers that came past their deadline",
    "bytes": "Bytes of rows received from owners",
    "connects": "Connections begun to owners",
    "losses": "Connections to owners that broke",
}


class RemoteMetrics(Collector):
    """Exports the process's counters; all 0 while no owner was ever asked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One family for each counter."""
        stats = remote_stats()
        for name, text in _TEXTS.items():
            yield CounterMetricFamily(f"treadle_worker_engram_remote_{name}", text, value=stats[f"{name}_total"])
