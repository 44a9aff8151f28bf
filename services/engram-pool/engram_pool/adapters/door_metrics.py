"""What the native socket door counts, for Prometheus: read off when metrics are fetched."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.domain.ports import Doors

_COUNTERS = (
    ("socket_connections_opened", "connections_total", "Connections that the native socket door took"),
    ("socket_connections_cut", "cut_total", "Connections that ended within a message: a peer that stalled or left"),
    ("socket_requests", "requests_total", "Requests at the native socket door"),
    ("socket_refused", "refused_total", "Of these, and of connections, those that were answered with a fault"),
    ("socket_rows", "rows_total", "Rows handed out by the native socket door"),
    ("socket_bytes", "bytes_total", "Bytes of rows handed out by the native socket door"),
)


class DoorMetrics(Collector):
    """Exports the counters of `doors`; nothing for doors that have none."""

    def __init__(self, registry: CollectorRegistry, doors: Doors) -> None:
        self._doors = doors
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """One family for each counter."""
        if isinstance(self._doors, NativeDoors):
            yield from _dedup(self._doors)
        door = self._doors.socket if isinstance(self._doors, NativeDoors) else None
        if door is None:
            return
        stats = door.stats()
        for name, key, text in _COUNTERS:
            yield CounterMetricFamily(f"treadle_engram_{name}", text, value=stats[key])
        yield GaugeMetricFamily("treadle_engram_socket_connections", "Connections at the native socket door", stats["connections"])


def _dedup(doors: NativeDoors) -> Iterator[GaugeMetricFamily]:
    once = GaugeMetricFamily(
        "treadle_engram_dedup", "1: each row of a batch is fetched once, as measured at start", labels=["tier"]
    )
    text = "Measured cost of each id of a batch with repeats: as it is, and each row once"
    cost = GaugeMetricFamily("treadle_engram_dedup_nanoseconds", text, labels=["tier", "way"])
    for tier, decision in list(doors.stores.decisions.items()):
        once.add_metric([tier], decision.pays)
        cost.add_metric([tier, "plain"], decision.plain_nanoseconds)
        cost.add_metric([tier, "once"], decision.dedup_nanoseconds)
    yield from (once, cost)
