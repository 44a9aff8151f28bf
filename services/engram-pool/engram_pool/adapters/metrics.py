"""The pool's metrics for Prometheus, on a registry that is handed in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from treadle.contract.warm_state import WarmState
from treadle.kernels.numa import nodes

if TYPE_CHECKING:
    from engram_pool.domain.directory import Directory
    from engram_pool.domain.pool import Pool
    from engram_pool.domain.scrubbing import Scrubber

_TRANSPORT = "rpc"  # mapped readers gather in their own process, and count there
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)  # an RPC takes 2 ms, a queue seconds


class PrometheusMeters:
    """Counts what the domain reports; `observe` adds what is read off a pool when metrics are fetched."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gathers = Counter(
            "treadle_engram_gathers", "Gather and Lookup calls ended", ["transport", "outcome"], registry=registry
        )
        self._rows = Counter("treadle_engram_rows", "Rows handed out", ["transport"], registry=registry)
        self._seconds = Histogram(
            "treadle_engram_gather_seconds",
            "Seconds of a Gather or Lookup call",
            ["transport"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._loads = Counter("treadle_engram_loads", "Loads ended", ["outcome"], registry=registry)
        self._load_bytes = Counter("treadle_engram_load_bytes", "Bytes of rows written by loads", registry=registry)
        self._corrupt = Counter(
            "treadle_engram_segments_corrupt",
            "Segments found corrupt or torn, one for each version: the first ends its check",
            registry=registry,
        )
        self._promotes = Counter("treadle_engram_promotes", "Versions made current by name", registry=registry)
        self._fusion_bytes = Counter("treadle_engram_fusion_bytes", "Bytes of fusion weights handed out", registry=registry)
        self._scrubbed = Counter(
            "treadle_engram_scrub_chunks",
            "Chunks checked in the background: ok or bad, and those repaired",
            ["outcome"],
            registry=registry,
        )
        self._left = Counter(
            "treadle_engram_versions_left",
            "Versions left unserved at a start, as they could not be read then or by this release",
            registry=registry,
        )

        self._hinted = Counter(
            "treadle_engram_hint_tokens",
            "Tokens told before their lookups: near already, refused as full, brought near, dropped as late, failed",
            ["outcome"],
            registry=registry,
        )

    def hinted(self, outcome: str, tokens: int) -> None:
        """Count tokens of hints."""
        self._hinted.labels(outcome).inc(tokens)

    def scrubbed(self, outcome: str, chunks: int) -> None:
        """Count chunks checked in the background, or repaired."""
        self._scrubbed.labels(outcome).inc(chunks)

    def observe_scrubber(self, scrubber: Scrubber) -> None:
        """Export how far `scrubber` is."""
        name, text = (
            "treadle_engram_scrub_pass_ended_seconds",
            "When the last whole pass over all checksums ended, since the epoch; 0: none",
        )
        Gauge(name, text, registry=self._registry).set_function(lambda: scrubber.figures.pass_ended_at_seconds)

    def observe(self, pool: Pool) -> None:
        """Export the state of `pool`."""
        gauge = Gauge(
            "treadle_engram_table_bytes",
            "Bytes of segments and what is kept beside them, by tier",
            ["tier"],
            registry=self._registry,
        )
        gauge.labels("memory" if pool.occupancy.in_memory else "disk").set_function(lambda: pool.occupancy.table_bytes)
        gauge.labels("corrupt").set_function(lambda: pool.occupancy.set_aside_bytes)
        for name, text, read in (
            ("page_bytes", "Smallest page size in use for a table's mapping", lambda: pool.occupancy.page_bytes),
            ("warm_bytes", "Bytes of tables whose pages are entered in the pool's process", lambda: pool.occupancy.warm_bytes),
            ("models_resident", "Versions that can be opened", lambda: pool.occupancy.models_resident),
            ("open_readers", "Processes that hold a version, counted for each version", pool.readers.open_readers),
            ("watchers", "Watches in progress", lambda: pool.readers.watchers),
        ):
            Gauge(f"treadle_engram_{name}", text, registry=self._registry).set_function(read)

        warm = Gauge(
            "treadle_engram_versions", "Versions in memory, by how far their pages are entered", ["warm"], registry=self._registry
        )
        for state in (WarmState.COLD, WarmState.WARMING, WarmState.WARM):
            warm.labels(str(state)).set_function(partial(pool.occupancy.versions_in, state))

        placed = Gauge(
            "treadle_engram_node_bytes",
            "Bytes of segments by memory node, from a sample of pages",
            ["node"],
            registry=self._registry,
        )
        for node in nodes():
            placed.labels(str(node)).set_function(partial(pool.occupancy.node_bytes, node))

    def observe_device(self, device_nodes: Mapping[str, int]) -> None:
        """Export which nodes a DAX device belongs to, by kind: numa (nearest), target (its own); -1: not told."""
        if device_nodes:
            gauge = Gauge("treadle_engram_dax_node", "Memory node of the DAX device", ["kind"], registry=self._registry)
            for kind, node in device_nodes.items():
                gauge.labels(kind).set(node)

    def observe_directory(self, directory: Directory) -> None:
        """Export what `directory` knows of the owners."""
        owners = Gauge(
            "treadle_engram_owners", "Owners of the fabric, this pool included, by state", ["state"], registry=self._registry
        )
        for state in ("reachable", "unreachable", "leaving"):
            owners.labels(state).set_function(partial(_owners_in, directory, state))
        for name, text, read in (
            ("directory_stale", "1 where the directory does not answer and the last list known is used", lambda: directory.stale),
            ("directory_age_seconds", "Seconds since the directory answered", lambda: directory.age_seconds),
        ):
            Gauge(f"treadle_engram_{name}", text, registry=self._registry).set_function(read)

    def load_ended(self, outcome: str) -> None:
        """Count a load: ok, refused, cancelled or failed."""
        self._loads.labels(outcome).inc()

    def rows_loaded(self, byte_count: int) -> None:
        """Count bytes of rows written."""
        self._load_bytes.inc(byte_count)

    def gather_ended(self, outcome: str, rows: int, seconds: float) -> None:
        """Count a Gather or Lookup."""
        self._gathers.labels(_TRANSPORT, outcome).inc()
        self._rows.labels(_TRANSPORT).inc(rows)
        self._seconds.labels(_TRANSPORT).observe(seconds)

    def corrupt(self, segments: int) -> None:
        """Count versions found corrupt or torn."""
        self._corrupt.inc(segments)

    def left(self, versions: int) -> None:
        """Count versions left unserved at a start."""
        self._left.inc(versions)

    def promoted(self) -> None:
        """Count a version made current by name."""
        self._promotes.inc()

    def fusion_read(self, byte_count: int) -> None:
        """Count bytes of fusion weights handed out."""
        self._fusion_bytes.inc(byte_count)


def _owners_in(directory: Directory, state: str) -> int:
    owners = directory.listing().owners
    states = ["leaving" if owner.leaving else "reachable" if owner.reachable else "unreachable" for owner in owners]
    return states.count(state)
