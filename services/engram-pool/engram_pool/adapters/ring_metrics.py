"""What the ring and the hot rows count, for Prometheus: read off when metrics are fetched."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.domain.ports import Doors

_RING = (
    ("requests", "Requests at the ring, one for each layer of a lookup"), ("refused", "Of these, those that were refused"),
    ("failed", "Of these, those that ended before all rows were there"), ("rows", "Rows handed out by the ring"),
)  # fmt: skip
_HOT = (
    ("hits", "Rows that the hot-row cache had"), ("misses", "Rows that it had not"), ("inserted", "Rows put into it"),
    ("evicted", "Rows that made room for others"),
)  # fmt: skip


class RingMetrics(Collector):
    """Exports the counters of `doors`; nothing for doors that have none. Hits of clients that look for themselves are not seen."""

    def __init__(self, registry: CollectorRegistry, doors: Doors) -> None:
        self._doors = doors
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """One family for each counter."""
        if not isinstance(self._doors, NativeDoors):
            return
        if self._doors.ring is not None:
            stats = self._doors.ring.stats()
            yield GaugeMetricFamily("treadle_engram_ring_clients", "Processes at the ring", stats["clients"])
            for name, text in _RING:
                yield CounterMetricFamily(f"treadle_engram_ring_{name}", text, stats[f"{name}_total"])
        if self._doors.stores.hot is not None:
            stats = self._doors.stores.hot.stats()
            yield GaugeMetricFamily("treadle_engram_hot_rows_bytes", "Memory of the hot-row caches", stats.get("bytes", 0))
            for name, text in _HOT:
                yield CounterMetricFamily(f"treadle_engram_hot_rows_{name}", text, stats.get(f"{name}_total", 0))
