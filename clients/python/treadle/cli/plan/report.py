"""A plan for people, as tables, and for programs, as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from treadle.cli.plan.demand import Demand
from treadle.cli.plan.planning import Plan
from treadle.cli.terminal import stdout

if TYPE_CHECKING:
    from rich.table import Table

NO_BENCH = "not measured: give --bench FILE, what `treadle bench gather --json` wrote on a machine of the kind that is planned"


def document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; bytes, seconds, microseconds and dollars as the names say."""
    model, workload = plan.model, plan.workload
    return {
        "model": {"name": model.name, "source": model.source, "decoder_layers": model.decoder_layers, "table_bytes": model.table_bytes},
        "workload": {
            "hosts": workload.hosts, "batch": workload.batch, "step_seconds": workload.step_seconds,
            "tokens_second": workload.throughput,
        },
        "demands": [_demand_document(demand) for demand in plan.demands],
        "fabric": [
            {
                "bench": bench.path, "machine": bench.machine,
                "estimates": [
                    {"reading": reading} | asdict(estimate) for reading, made in plan.estimates.items() for estimate in made[place]
                ],
            }
            for place, bench in enumerate(plan.benches)
        ],
        "placements": [asdict(placement) | {"fits": placement.fits} for placement in plan.placements],
        "cost": {
            "prices": asdict(plan.prices), "break_even_hosts": plan.break_even_hosts,
            "rows": [asdict(cost) | {"saving": cost.saving} for cost in plan.costs],
        },
    }  # fmt: skip


def _demand_document(demand: Demand) -> dict[str, Any]:
    return {
        "reading": demand.reading.name, "why": demand.reading.why, "average_bytes_second": demand.average_bytes_second,
        "layers": [
            {
                "layer": asked.layer.index, "rows": asked.layer.rows, "row_bytes": asked.layer.row_bytes,
                "rows_per_token": asked.layer.rows_per_token, "payload_bytes": asked.payload_bytes,
                "window_seconds": asked.window_seconds, "window_bytes_second": asked.bytes_second,
            }
            for asked in demand.layers
        ],
    }  # fmt: skip


def show(plan: Plan) -> None:
    """Print the plan."""
    console, workload, model = stdout(), plan.workload, plan.model
    console.print(f"{model.name}: {gigabytes(model.table_bytes)} of tables ({model.source})")
    console.print(
        f"{workload.hosts} host(s), {workload.batch:,} tokens a step of {workload.step_seconds * 1e3:g} ms, "
        f"{workload.throughput:,.0f} tokens/s in all, {model.decoder_layers} decoder layers"
    )
    for section in (_needed(plan), _given(plan), _where(plan), _dollars(plan)):
        for part in section:
            console.print(part)


def gigabytes(count: float) -> str:
    """Bytes as GB, of 10^9."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def dollars(amount: float) -> str:
    """Whole dollars, as in the paper's tables."""
    return f"{'-' if round(amount) < 0 else ''}${abs(round(amount)):,}"


def _needed(plan: Plan) -> list[str | Table]:
    rows = []
    for demand in plan.demands:
        for asked in demand.layers:
            rate = "no window" if asked.bytes_second is None else f"{gigabytes(asked.bytes_second)}/s"
            rows.append(
                (demand.reading.name, str(asked.layer.index), gigabytes(asked.layer.table_bytes), gigabytes(asked.payload_bytes),
                 f"{asked.window_seconds * 1e6:,.1f} us", rate)
            )  # fmt: skip
    lines: list[str | Table] = ["", "Needed (CXL paper, section 3.2)"]
    for demand in plan.demands:
        average = demand.average_bytes_second
        lines.append(
            f"(1) bandwidth > {gigabytes(average)}/s, {gigabytes(average / plan.workload.hosts)}/s a host; {demand.reading.name}: "
            f"{demand.reading.why}"
        )
    lines.append("(2) latency of a step's rows < window of their layer (layers from 0)")
    return [*lines, _table(("rows of a token", "layer", "table", "payload", "window", "to be in time"), rows)]


def _given(plan: Plan) -> list[str | Table]:
    lines: list[str | Table] = ["", "Given by this fabric"]
    if not plan.benches:
        return [*lines, NO_BENCH]
    for place, bench in enumerate(plan.benches):
        rows = [
            (reading, made.way, str(made.layer), f"{made.takes_us:,.1f} us", f"{made.finishes_us:,.1f} us", f"{gigabytes(made.bytes_second)}/s",
             "yes" if made.in_time_p99 else "median" if made.in_time else "no")
            for reading, estimates in plan.estimates.items() for made in estimates[place]
        ]  # fmt: skip
        lines.append(f"from {bench.path} ({bench.machine}), in proportion to rows; one layer after the other")
        lines.append(_table(("rows of a token", "way", "layer", "takes", "finishes", "rate", "in time"), rows))
    return [*lines, "medians; in time: yes where 99 of 100 are too. Far memory (CXL) takes longer than the DRAM of such a file."]


def _where(plan: Plan) -> list[str | Table]:
    rows = [
        (place.name, gigabytes(place.needed_bytes), gigabytes(place.room_bytes), "yes" if place.fits else "no", place.note)
        for place in plan.placements
    ]
    return ["", "What fits where", _table(("tables as", "needed", "room", "fits", ""), rows)]


def _dollars(plan: Plan) -> list[str | Table]:
    rows = [(str(cost.hosts), dollars(cost.local), dollars(cost.pool), dollars(cost.saving)) for cost in plan.costs]
    prices = plan.prices
    lines: list[str | Table] = [
        "", "Cost (CXL paper, Tables 4 and 5)",
        f"DRAM {_price(prices.dram_gb)} a GB, switch {_price(prices.switch)} for {prices.switch_ports} ports, adapter {_price(prices.adapter)} "
        f"and controller {_price(prices.controller)} a host",
        _table(("hosts", "local DRAM", "CXL pool", "the pool saves"), rows),
    ]  # fmt: skip
    hosts = plan.break_even_hosts
    lines.append("the pool never pays back" if hosts is None else f"the pool pays back from {hosts} host(s) on")
    if any(cost.switches > 1 for cost in plan.costs):
        lines.append(f"more than {prices.switch_ports // 2} hosts take another switch each time; the paper has one, for up to 16")
    return lines


def _price(amount: float) -> str:
    return f"${amount:,.2f}"


def _table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        numbers = heading not in ("rows of a token", "way", "tables as", "", "fits", "in time")
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
