"""Where the rows of a demo came from: what each answer reported, the worker's own figures and the pool's, held side by side.

Owns the comparison, and what of the pool's metrics it needs. Does not print or ask (demo).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treadle.cli.held_out import Score

if TYPE_CHECKING:
    from treadle.cli.demo_answers import Pair
    from treadle.client.engram.pool_types import ResidentModel
    from treadle.inference.v1.worker_pb2 import StatusResponse

COUNTS = ("tickets", "tickets_in_time", "rows_missing")
ROWS_SENT, WEIGHTS_SENT = 'treadle_engram_rows_total{transport="rpc"}', "treadle_engram_fusion_bytes_total"


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """What a pool has counted since its start.

    readers:       processes that hold a version, by version
    rows_sent:     rows sent over gRPC; a process that maps a version reads them in place and is counted as a reader alone
    weights_bytes: bytes of fusion weights sent
    """

    readers: Mapping[str, int]
    rows_sent: int
    weights_bytes: int

    @classmethod
    def of(cls, resident: Iterable[ResidentModel], metrics: str) -> PoolCounters:
        """From the pool's list and the text of its metrics; a counter that is not there yet is 0."""
        values = dict(line.rpartition(" ")[::2] for line in metrics.splitlines() if not line.startswith("#"))
        rows, weights = (int(float(values.get(name, "0"))) for name in (ROWS_SENT, WEIGHTS_SENT))
        return cls({model.version: model.readers for model in resident}, rows, weights)

    def since(self, before: PoolCounters) -> PoolCounters:
        """What was added after `before` was taken."""
        readers = {version: count - before.readers.get(version, 0) for version, count in self.readers.items()}
        return PoolCounters(readers, self.rows_sent - before.rows_sent, self.weights_bytes - before.weights_bytes)


@dataclass(slots=True)
class Served:
    """One memory over the whole demo.

    versions, transports, counts, shadowed: as the answers reported them
    tokens, fused:                          the worker's figures
    rows_a_token:                           of all layers together, as its manifest has it
    pool_version, bytes:                    the pool's
    readers:                                the pool's count of processes that hold it, before the first question and now
    """

    name: str
    versions: set[str] = field(default_factory=set)
    transports: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    shadowed: bool = False
    tokens: int = 0
    fused: bool = False
    rows_a_token: int = 0
    pool_version: str = ""
    bytes: int = 0
    readers: tuple[int, int] = (0, 0)

    @property
    def version(self) -> str:
        """The one version that all answers reported; all of them, where they differ."""
        return ", ".join(sorted(self.versions))

    @property
    def rows(self) -> int:
        """Rows that the worker looked up."""
        return self.tokens * self.rows_a_token

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "memory": self.name, "versions": sorted(self.versions), "transports": sorted(self.transports),
            **{name: self.counts[name] for name in COUNTS}, "shadowed": self.shadowed,
            "worker": {"tokens": self.tokens, "rows": self.rows, "fused": self.fused},
            "pool": {"version": self.pool_version, "bytes": self.bytes, "readers_before": self.readers[0], "readers": self.readers[1]},
        }  # fmt: skip

    def wrong(self, expected_version: str, transport: str) -> list[str]:
        """What does not fit together, in words. transport: how rows had to come; `auto`: any way."""
        found = []
        if self.versions != {expected_version}:
            found.append(f"{self.name}: answers report version {self.version or 'none'}, its folder is {expected_version}")
        if self.pool_version != expected_version:
            found.append(f"{self.name}: the pool holds version {self.pool_version or 'none'}, its folder is {expected_version}")
        if transport != "auto" and self.transports != {transport}:
            found.append(f"{self.name}: rows came by {', '.join(sorted(self.transports)) or 'nothing'}, not by {transport}")
        if not self.counts["tickets"] or not self.tokens:
            found.append(f"{self.name}: {self.counts['tickets']} tickets, {self.tokens} tokens looked up")
        if self.readers[1] <= self.readers[0]:
            found.append(f"{self.name}: the pool counts {self.readers[1]} readers, before the first question {self.readers[0]}")
        if self.counts["rows_missing"]:
            found.append(f"{self.name}: {self.counts['rows_missing']} rows never came")
        if self.shadowed or not self.fused:
            found.append(f"{self.name}: its rows are shadowed, they change nothing")
        return found


def gathered(
    pairs: Iterable[Pair],
    scores: Mapping[str, Score],
    worker: StatusResponse,
    resident: Iterable[ResidentModel],
    before: PoolCounters,
) -> dict[str, Served]:
    """What was served, by memory, in the order of `scores`."""
    served = {name: Served(name) for name in scores if name}
    for name, one in served.items():
        one.versions, one.transports = set(scores[name].versions), set(scores[name].transports)
        one.counts.update(scores[name].served)
    for report in (report for pair in pairs for report in pair.informed.memories if report.get("name") in served):
        one = served[report["name"]]
        one.versions.add(report["version"])
        one.transports.add(report["transport"])
        one.counts.update({name: report[name] for name in COUNTS})
        one.shadowed |= bool(report["shadowed"])
    for memory in worker.engram_models:
        if memory.model in served:
            served[memory.model].tokens, served[memory.model].fused = memory.tokens, memory.fused
    for model in resident:
        if model.current and model.model.name in served:
            one = served[model.model.name]
            one.pool_version, one.bytes = model.version, model.segment_bytes
            one.rows_a_token = model.model.columns * len(model.model.layers)
            one.readers = (before.readers.get(model.version, 0), model.readers)
    return served


def wrong_counts(served: Iterable[Served], added: PoolCounters) -> list[str]:
    """What the pool has counted too little for what was served, in words."""
    found = []
    if not added.weights_bytes:
        found.append("the pool has sent no fusion weights: the worker has them from somewhere else")
    looked_up = sum(one.rows for one in served if one.transports == {"rpc"})
    if added.rows_sent < looked_up:
        found.append(f"the pool has sent {added.rows_sent} rows, the worker looked up {looked_up} over gRPC")
    return found
