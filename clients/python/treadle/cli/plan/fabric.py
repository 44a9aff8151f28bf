"""What this fabric gives: times that `treadle bench … --json` measured, carried over to a model's rows.

A time is carried over in proportion to the rows, and to their bytes where those are more than were measured. That is a reading of
one machine's figures, not a measurement of the machine that is planned.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.cli.plan.demand import Demand
from treadle.contract import InvalidArgument, NotFound

BENCH_BYTES_MAX = 16 << 20
# First words of a measurement's name that are ways of this fabric; the others are baselines and peers.
WAYS = ("mapped", "local", "ring", "host-agent", "socket", "mooncake", "rpc", "disk")
_LAYOUT = re.compile(r"(\d+)x(\d+)")
_MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rows that a way took `median_us` for (99 of 100 times at most `p99_us`)."""

    way: str
    tokens: int
    rows_per_token: int
    row_bytes: int
    median_us: float
    p99_us: float

    @property
    def rows(self) -> int:
        """Rows of one gather."""
        return self.tokens * self.rows_per_token


@dataclass(frozen=True, slots=True)
class Bench:
    """A file of measurements, and the machine they are of."""

    path: str
    machine: str
    measurements: tuple[Measurement, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        """What was measured, in the file's order."""
        return tuple(dict.fromkeys(measurement.way for measurement in self.measurements))


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layer by one way. Layers are gathered one after the other, the earliest window first.

    takes_us, p99_us:     for its own rows
    finishes_us:          after the start of the step, the layers before it included
    bytes_second:         payload over `takes_us`
    in_time, in_time_p99: (2) holds: it finishes within the window, by the medians and by the 99th percentiles
    """

    way: str
    layer: int
    measured: Measurement
    takes_us: float
    p99_us: float
    finishes_us: float
    bytes_second: float
    in_time: bool
    in_time_p99: bool


def read_bench(path: Path) -> Bench:
    """The measurements of ours in a file. Raises NotFound, InvalidArgument for a file of another kind, or without any of ours."""
    try:
        with path.open("rb") as file:
            data = file.read(BENCH_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > BENCH_BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than {BENCH_BYTES_MAX} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON; `treadle bench gather --json` writes it") from error
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise InvalidArgument(f"{path} is no output of `treadle bench … --json`: it has no list of rows")
    found = tuple(measurement for row in rows if (measurement := _measurement(row)) is not None)
    if not found:
        raise InvalidArgument(
            f"{path} holds {len(rows)} rows, none of them a gather of ours ({', '.join(WAYS)}, with tokens and row layout); "
            "`treadle bench gather --json` writes some"
        )
    return Bench(str(path), _machine(document.get("machine")), found)


def estimates(bench: Bench, demand: Demand) -> tuple[Estimate, ...]:
    """Every way of the file for every layer of a demand."""
    return tuple(estimate for way in bench.ways for estimate in _by_way(bench, way, demand))


def _by_way(bench: Bench, way: str, demand: Demand) -> list[Estimate]:
    made, clock_us, p99_clock_us = [], 0.0, 0.0
    candidates = [measurement for measurement in bench.measurements if measurement.way == way]
    for asked in sorted(demand.layers, key=lambda layer: layer.window_seconds):
        layer = asked.layer
        rows = asked.payload_bytes // layer.row_bytes
        near = _nearest(candidates, rows, layer.row_bytes)
        factor = rows / near.rows * max(1.0, layer.row_bytes / near.row_bytes)
        takes, p99, window_us = near.median_us * factor, near.p99_us * factor, asked.window_seconds * 1e6
        clock_us, p99_clock_us = clock_us + takes, p99_clock_us + p99
        made.append(
            Estimate(
                way, layer.index, near, takes, p99, clock_us, asked.payload_bytes / takes * 1e6, clock_us < window_us, p99_clock_us < window_us
            )
        )  # fmt: skip
    return made


def _nearest(measurements: Sequence[Measurement], rows: int, row_bytes: int) -> Measurement:
    """The one of the nearest row size, then of the nearest number of rows, both as ratios."""
    return min(
        measurements, key=lambda one: (abs(math.log(one.row_bytes / row_bytes)), abs(math.log(one.rows / rows)), one.median_us)
    )


def _measurement(row: object) -> Measurement | None:
    """A row of the file as a measurement; None for baselines, peers, and rows that are no gathers."""
    if not isinstance(row, dict) or not isinstance(row.get("params"), dict):
        return None
    name, params, unit = row.get("name"), row["params"], _MICROSECONDS.get(str(row.get("unit")))
    layout, tokens, median = _layout(params), params.get("tokens"), row.get("median")
    if not isinstance(name, str) or name.split(" ")[0] not in WAYS or unit is None or layout is None:
        return None
    if not isinstance(tokens, int) or tokens < 1 or not isinstance(median, (int, float)) or not 0 < median < math.inf:
        return None
    tail = row.get("p99")
    p99 = float(tail) if isinstance(tail, (int, float)) and math.isfinite(tail) else float(median)
    threads = params.get("threads")
    pages = params.get("pages")
    details = [str(pages)] if pages and str(pages) not in name else []
    details += [f"{threads} threads"] if isinstance(threads, int) and threads > 1 else []
    way = " ".join([name, *details])
    return Measurement(way, tokens, layout[0], layout[1], float(median) * unit, p99 * unit)


def _layout(params: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows of a token and bytes of a row: as two numbers, or as `16x320`."""
    both = params.get("rows_per_token"), params.get("row_bytes")
    match = _LAYOUT.fullmatch(str(params.get("rows")))
    columns, row_bytes = (int(match[1]), int(match[2])) if match else both
    if not isinstance(columns, int) or not isinstance(row_bytes, int) or columns < 1 or row_bytes < 1:
        return None
    return columns, row_bytes


def _machine(machine: object) -> str:
    if not isinstance(machine, dict):
        return "a machine that is not named"
    return f"{machine.get('cpu', 'unknown CPU')}, {machine.get('cores', '?')} cores"
