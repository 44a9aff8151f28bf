"""A measurement, what it is compared with, and how both are printed: for people as a table, for programs as JSON.

Baselines are measured in the same run, interleaved round by round, so that a busy machine is busy for both.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

WIDTH_IN_FILES = 120  # characters, where there is no terminal to ask
Step = TypeVar("Step")
ROUNDS_MIN = 8  # for an interval
BOOTSTRAP_DRAWS = 2000  # of rounds, for the interval of a ratio
ROOT = Path(__file__).resolve().parents[2]  # the project's


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `ratio`: median over rounds of (this / baseline) with its 95 % bootstrap interval; None: is the baseline."""

    name: str
    params: Mapping[str, Any]
    unit: str
    median: float
    p99: float
    n: int
    baseline: str | None = None
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    p99_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit on one figure, printed with what was measured whether it was met or not.

    not_comparable: why there is no figure; `value` is nan then, and the goal is missed
    """

    text: str
    value: float
    limit: float
    at_least: bool = False
    not_comparable: str = ""

    @property
    def met(self) -> bool:
        """True if the figure is within its limit."""
        if self.not_comparable:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def line(self) -> str:
        """As it is printed."""
        found = f"not comparable, {self.not_comparable}" if self.not_comparable else f"{self.value:.4g}"
        return f"{'met   ' if self.met else 'MISSED'} {self.text}: {found} (goal {'>=' if self.at_least else '<='} {self.limit:g})"

    def to_json(self) -> dict[str, Any]:
        """Its fields and whether it was met; value: None where there is none."""
        return asdict(self) | {"value": None if self.not_comparable else self.value, "met": self.met}


def progress(steps: Iterable[Step], total: int, what: str) -> Iterable[Step]:
    """`steps` under a bar with the time left, on standard error; nothing where that is no terminal."""
    console = Console(stderr=True)
    return track(steps, what, total, console=console, transient=True, disable=not console.is_terminal)


def interleave(
    variants: Mapping[str, Callable[[int], float]], rounds: int, *, seed: int = 0, what: str = "measuring"
) -> dict[str, list[float]]:
    """Call every variant once a round, in an order drawn anew, each with the number of the round; collect what they return."""
    order, chance = list(variants), random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for number in progress(range(rounds), rounds, what):
        chance.shuffle(order)
        for name in order:
            samples[name].append(variants[name](number))
    return samples


def rows_of(samples: Mapping[str, Sequence[float]], params: Mapping[str, Any], unit: str, baseline: str) -> list[Row]:
    """One Row for each variant, compared with `baseline` round by round."""
    base = np.asarray(samples[baseline])
    base_p99 = float(np.percentile(base, 99))
    rows = []
    for name, values in samples.items():
        mine = np.asarray(values)
        row = Row(name, params, unit, float(np.median(mine)), float(np.percentile(mine, 99)), len(mine))
        if name != baseline:
            ratio, interval = paired_ratio(mine, base)
            row = replace(row, baseline=baseline, ratio=ratio, ratio_ci95=interval, p99_ratio=row.p99 / base_p99)
        rows.append(row)
    return rows


def paired_ratio(
    mine: NDArray[np.float64], base: NDArray[np.float64], *, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """Median of mine/base over rounds, and its 95 % interval by bootstrap; None below ROUNDS_MIN, where that would be the range."""
    ratios = mine / base
    if len(ratios) < ROUNDS_MIN:
        return float(np.median(ratios)), None
    draws = np.random.default_rng(seed).integers(0, len(ratios), size=(BOOTSTRAP_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The command that runs, as another machine may read it; `arguments`: default those of this process.

    Paths in the project are relative to its root; of others the last part is told: `--data FOLDER/traces`.
    """
    parts = sys.argv[1:] if arguments is None else arguments
    return " ".join(["treadle", *(_told(part) for part in parts)])


def _told(part: str) -> str:
    option, equals, value = part.rpartition("=") if part.startswith("-") else ("", "", part)
    path = Path(value)
    if path.is_absolute():
        path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path("FOLDER", path.name)
        value = str(path)
    return f"{option}{equals}{value}"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), platform.machine())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "memory_bytes": memory_bytes}


def document(rows: Sequence[Row], goals: Sequence[Goal], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The figures as JSON values."""
    fields = ("name", "params", "unit", "median", "p99", "n", "baseline", "ratio", "ratio_ci95", "p99_ratio")
    return {
        "command": command_line(), "machine": machine(),
        "versions": {name: version(name) for name in ("treadle", "numpy", "torch")} | {"python": platform.python_version()},
        "rows": [{field: getattr(row, field) for field in fields} for row in rows],
        "goals": [goal.to_json() for goal in goals], **(extra or {}),
    }  # fmt: skip


def show(
    rows: Sequence[Row], goals: Sequence[Goal], *, as_json: bool, title: str, quick: bool, extra: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the figures. A quick run is an impression: it is not held against the goals. notes: what else a reader must know."""
    whole = document(rows, [] if quick else goals, {"quick": quick, **({"notes": list(notes)} if notes else {}), **(extra or {})})
    if as_json:
        sys.stdout.write(json.dumps(whole) + "\n")
        return
    console = console_with_heading(title, whole)
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "with", "median", "p99", "n", "ratio", "95 %"):
        table.add_column(heading, justify="left" if heading in ("what", "with") else "right")
    alone = "" if all(row.ratio is None for row in rows) else "1"  # the baseline itself; nothing where there is none
    for row in rows:
        ratio = alone if row.ratio is None else f"{row.ratio:.3f}"
        interval = "" if row.ratio_ci95 is None else f"{row.ratio_ci95[0]:.3f}-{row.ratio_ci95[1]:.3f}"
        params = " ".join(f"{key}={value}" for key, value in row.params.items())
        table.add_row(row.name, params, f"{digits(row.median)} {row.unit}", digits(row.p99), str(row.n), ratio, interval)
    console.print(table)
    for note in notes:
        console.print(f"note   {note}", highlight=False)
    for goal in [] if quick else goals:
        console.print(goal.line, highlight=False)


def console_with_heading(title: str, whole: Mapping[str, Any]) -> Console:
    """A console on standard output that has printed what `document` says of machine and command."""
    console, about = Console() if sys.stdout.isatty() else Console(width=WIDTH_IN_FILES), whole["machine"]
    console.print(
        f"{title}: {about['cpu']}, {about['cores']} cores, kernel {about['kernel']}\n$ {whole['command']}", highlight=False
    )
    return console


def digits(value: float) -> str:
    """A figure with three digits or so."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
