"""Metrics of the mooncake door, on a registry that is handed in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engram_pool.adapters.mooncake_slots import SlotRing

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)


class MooncakeMeters:
    """Counts requests; `observe` adds what is read off the slots when metrics are fetched."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "treadle_engram_mooncake_requests", "Requests to stage rows ended, by outcome", ["outcome"], registry=registry
        )
        self._rows = Counter("treadle_engram_mooncake_rows", "Rows staged for Mooncake to read", registry=registry)
        self._seconds = Histogram(
            "treadle_engram_mooncake_stage_seconds", "Seconds to gather rows into a slot", registry=registry, buckets=_SECONDS
        )
        self.connections = Gauge("treadle_engram_mooncake_connections", "Clients connected", registry=registry)

    def observe(self, slots: SlotRing) -> None:
        """Export the state of `slots`."""
        in_use = Gauge("treadle_engram_mooncake_slots_in_use", "Slots being filled or lent", registry=self._registry)
        in_use.set_function(lambda: slots.in_use)
        expired = Gauge(
            "treadle_engram_mooncake_leases_expired",
            "Slots taken back from clients that did not release them",
            registry=self._registry,
        )
        expired.set_function(lambda: slots.leases_expired)

    def request_ended(self, outcome: str, rows: int, seconds: float) -> None:
        """Count a request: ok, or the name of the error."""
        self._requests.labels(outcome).inc()
        if outcome == "ok":
            self._rows.inc(rows)
            self._seconds.observe(seconds)
