"""A plan: everything that follows from a model, a workload, prices, room and figures. Reads bench files, prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.cli.plan.cost import Cost, Prices, break_even, cost_of
from treadle.cli.plan.demand import Demand, Workload, demands
from treadle.cli.plan.fabric import Bench, Estimate, estimates, read_bench
from treadle.cli.plan.models import PlannedModel
from treadle.cli.plan.placement import Placement, Room, placements

PAPER_HOSTS = (2, 4, 8, 16)  # of Table 5


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it. `estimates` by reading, for each of `benches`; `break_even_hosts` None: never."""

    model: PlannedModel
    workload: Workload
    demands: tuple[Demand, ...]
    benches: tuple[Bench, ...]
    estimates: dict[str, tuple[tuple[Estimate, ...], ...]]
    placements: tuple[Placement, ...]
    prices: Prices
    costs: tuple[Cost, ...]
    break_even_hosts: int | None


def make_plan(model: PlannedModel, workload: Workload, prices: Prices, room: Room, bench_paths: Sequence[Path] = ()) -> Plan:
    """The plan; costs for the hosts asked for and those of Table 5. Raises what `read_bench` and `placements` raise."""
    benches = tuple(read_bench(path) for path in bench_paths)
    asked, table_bytes = demands(model, workload), model.table_bytes
    return Plan(
        model, workload, asked, benches, {each.reading.name: tuple(estimates(bench, each) for bench in benches) for each in asked},
        placements(table_bytes, workload.hosts, room), prices,
        tuple(cost_of(table_bytes, hosts, prices) for hosts in sorted({workload.hosts, *PAPER_HOSTS})), break_even(table_bytes, prices),
    )  # fmt: skip
