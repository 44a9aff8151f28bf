"""Figures of the workers, read when they are asked for: a worker that left is in none of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from inference_gateway.domain.block_index import BLOCK_BYTES, Room
from inference_gateway.domain.directory import Directory
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.member import WorkerState


class FleetCollector(Collector):
    """Reads a fleet, the room that its block indexes share, and the directory that it follows. On the event loop, as everything of the gateway."""

    def __init__(self, registry: CollectorRegistry, fleet: Fleet, room: Room, directory: Directory | None) -> None:
        self._fleet, self._room, self._directory = fleet, room, directory
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One family for each figure; `worker` is a name of at most MEMBERS_MAX."""
        states = GaugeMetricFamily(
            "treadle_gateway_worker_state", "1 for the state in which a worker is", labels=["worker", "state"]
        )  # fmt: skip
        load = GaugeMetricFamily(
            "treadle_gateway_worker_requests", "Requests at a worker: ours, and others' by its last status", labels=["worker", "of"]
        )
        blocks = GaugeMetricFamily("treadle_gateway_index_blocks", "Cached blocks of a worker that are indexed", labels=["worker"])
        for member in self._fleet.members:
            for state in WorkerState:
                states.add_metric([member.name, state.value], float(member.state is state))
            load.add_metric([member.name, "us"], member.in_flight)
            load.add_metric([member.name, "others"], member.others)
            blocks.add_metric([member.name], len(member.blocks))
        yield from (states, load, blocks)
        yield GaugeMetricFamily(
            "treadle_gateway_index_bytes", "Memory of the indexed blocks, about", value=self._room.blocks * BLOCK_BYTES
        )
        left_out = "treadle_gateway_index_blocks_left_out"
        yield CounterMetricFamily(left_out, "Blocks that were told of and not indexed: index_blocks_max", value=self._room.left_out)
        if self._directory is not None:
            age, stale = self._directory.age_seconds, float(self._directory.stale)
            yield GaugeMetricFamily("treadle_gateway_directory_age_seconds", "Since the directory of workers answered", value=age)
            yield GaugeMetricFamily("treadle_gateway_directory_stale", "1 while it does not: the last list is used", value=stale)
