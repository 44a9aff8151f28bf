"""What the store counts, for Prometheus: treadle_asm_*."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from treadle.contract.errors import TreadleError

if TYPE_CHECKING:
    from asm_store.domain.ports import Sharing
    from asm_store.domain.room import Room
    from asm_store.domain.store import Store

MEASURED = {
    "publishes": "Publish calls ended", "promotes": "Promote calls ended", "extends": "Extend calls ended",
    "deletes": "Delete calls ended", "lookups": "Lookup calls ended", "opens": "Open calls ended",
    "gets": "Get calls ended", "fetches": "Versions copied from another replica, or not",
}  # fmt: skip
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)  # an Open takes 1 ms, a publish of gigabytes minutes


class PrometheusMeters:
    """Counts what the domain reports; `observe` adds what is read off a store when metrics are fetched."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._ended = {
            what: Counter(f"treadle_asm_{what}", f"{text}: ok, refused, cancelled or failed", ["outcome"], registry=registry)
            for what, text in MEASURED.items()
        }
        self._seconds = {
            what: Histogram(f"treadle_asm_{noun}_seconds", f"Seconds of a {noun}", registry=registry, buckets=_SECONDS)
            for what, noun in (
                ("publishes", "publish"),
                ("extends", "extend"),
                ("lookups", "lookup"),
                ("opens", "open"),
                ("fetches", "fetch"),
            )
        }
        self._evictions = Counter(
            "treadle_asm_evictions",
            "Versions evicted (ok), or passed over: a process maps them (read), or their files cannot be taken away (failed)",
            ["outcome"],
            registry=registry,
        )
        self._torn = Counter("treadle_asm_versions_torn", "Versions found torn or damaged and set aside", registry=registry)

    @contextmanager
    def measured(self, what: str) -> Iterator[None]:
        """See Meters."""
        begun, outcome = time.monotonic(), "failed"
        try:
            yield
            outcome = "ok"
        except TreadleError:
            outcome = "refused"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self._ended[what].labels(outcome).inc()
            if what in self._seconds:
                self._seconds[what].observe(time.monotonic() - begun)

    def evicted(self, outcome: str) -> None:
        """See Meters."""
        self._evictions.labels(outcome).inc()

    def torn(self, versions: int) -> None:
        """See Meters."""
        self._torn.inc(versions)

    def observe(self, store: Store, room: Room, sharing: Sharing) -> None:
        """Export the state of `store`."""
        for name, text, read in (
            ("versions", "Versions kept here", lambda: len(store.catalogue.all())),
            ("versions_pinned", "Versions that are pinned", lambda: _pinned(store)),
            ("file_bytes_limit", "Most bytes of versions", lambda: room.file_bytes_max),
            ("open_readers", "Processes that map a version, counted for each version, and Hold calls", store.open_readers),
            ("watchers", "Watch calls in progress", lambda: store.pointers.watchers),
            ("pointers", "Names that mean a version", lambda: sum(bool(pointer.version) for pointer in store.pointers.all())),
            ("sharing_stale", "1 where the Redis that replicas share does not answer", lambda: sharing.stale),
        ):
            Gauge(f"treadle_asm_{name}", text, registry=self._registry).set_function(read)
        replicas = Gauge(
            "treadle_asm_replicas", "Other replicas, by whether they renew their lease", ["state"], registry=self._registry
        )
        replicas.labels("reachable").set_function(lambda: sum(replica.alive for replica in sharing.others))
        replicas.labels("unreachable").set_function(lambda: sum(not replica.alive for replica in sharing.others))
        self._registry.register(_TenantBytes(store))


class _TenantBytes:
    """Bytes of each tenant that has any now; tenants come and go, so that no gauge can be made for each."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("treadle_asm_file_bytes", "Bytes of versions kept here, by tenant", labels=["tenant"])
        for tenant, nbytes in self._store.catalogue.tenants().items():
            family.add_metric([tenant], nbytes)
        yield family


def _pinned(store: Store) -> int:
    now = time.time()
    return sum(kept.pin.until_seconds > now for kept in store.catalogue.all())
