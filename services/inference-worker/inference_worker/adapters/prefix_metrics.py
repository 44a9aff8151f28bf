"""Counts openings of long prefixes, and shows what is open, for Prometheus: `treadle_worker_prefix_*`; and the cache of a store elsewhere,
`treadle_worker_asm_cache_*`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from inference_worker.domain.prefix_catalogue import PrefixCatalogue
from treadle.client.asm import DictionaryCache

OPEN_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)  # a dictionary alone to the digest of a long prefix's KV


class PrefixMetrics:
    """An OpeningObserver and a CacheObserver that counts into `registry`. No label names a prefix: their number is the store's affair."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._opens = Counter("treadle_worker_prefix_opens", "Openings of prefixes, by outcome", ("outcome",), registry=registry)
        self._refused = Counter(
            "treadle_worker_prefix_choices_refused", "Choices of a prefix that could not be had, by reason", ("reason",),
            registry=registry,
        )  # fmt: skip
        self._open_seconds = Histogram(
            "treadle_worker_prefix_open_seconds", "Seconds of an opening", buckets=OPEN_SECONDS, registry=registry
        )

        def cache_counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"treadle_worker_asm_cache_{name}", text, labels, registry=registry)

        self._cache_fetches = cache_counter("fetches", "Versions brought from a store whose files cannot be mapped", "outcome")
        self._cache_fetched_bytes = cache_counter("fetched_bytes", "Bytes of versions that were brought")
        self._cache_hits = cache_counter("hits", "Openings of versions that had been brought before")
        self._cache_evictions = cache_counter("evictions", "Versions removed: for others, or because the store keeps them no more")

    def watch(self, catalogue: PrefixCatalogue) -> None:
        """Show what is open and whether the store answers, read whenever the metrics are."""

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"treadle_worker_{name}", text, registry=self._registry)

        gauge("prefix_versions_open", "Prefix versions that are open").set_function(lambda: catalogue.open_count)
        gauge("prefix_mapped_bytes", "Bytes of their files that are mapped").set_function(lambda: catalogue.mapped_bytes)
        gauge("prefix_copied_bytes", "Bytes of them in this process's own memory: matched keys as fp32, graphs").set_function(
            lambda: catalogue.copied_bytes
        )
        gauge("asm_store_answers", "1 while the asm-store answers, else 0").set_function(lambda: catalogue.source_answers)

    def watch_cache(self, cache: DictionaryCache) -> None:
        """Show what lies in a cache, whoever brought it, read whenever the metrics are."""
        bytes_here = Gauge(
            "treadle_worker_asm_cache_bytes",
            "Bytes of versions brought, by all workers that share the folder",
            registry=self._registry,
        )
        bytes_here.set_function(lambda: cache.nbytes)

    def cache_hit(self) -> None:
        """See CacheObserver."""
        self._cache_hits.inc()

    def cache_fetched(self, outcome: str, nbytes: int) -> None:
        """See CacheObserver."""
        self._cache_fetches.labels(outcome).inc()
        self._cache_fetched_bytes.inc(nbytes)

    def cache_evicted(self) -> None:
        """See CacheObserver."""
        self._cache_evictions.inc()

    def opened(self, outcome: str, seconds: float) -> None:
        """See OpeningObserver."""
        self._opens.labels(outcome).inc()
        self._open_seconds.observe(seconds)

    def choice_refused(self, reason: str) -> None:
        """See OpeningObserver."""
        self._refused.labels(reason).inc()
