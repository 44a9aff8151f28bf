"""What a scenario saw: counts, times and goals; for people, for programs, and as a page of results/."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treadle_bench.report import Goal, Row, command_line, machine

REASONS_SHOWN = 8


@dataclass(slots=True)
class Report:
    """One run of a scenario.

    counts: by name, what was counted
    times:  by name, seconds of each time that something was measured
    reasons: of what went wrong, in words
    caveat: what of this machine may be why a goal was missed, stands beside each that was
    notes:  what else a reader must know
    """

    title: str
    params: Mapping[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    reasons: Sequence[str] = ()
    caveat: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """True if every goal is."""
        return all(goal.met for goal in self.goals)

    def rows(self) -> list[Row]:
        """The times as measurements."""
        return [
            Row(name, self.params, "s", float(np.median(seconds)), float(np.percentile(seconds, 99)), len(seconds))
            for name, seconds in self.times.items()
            if seconds
        ]

    def document(self) -> dict[str, Any]:
        """As JSON values, in the shape of the benchmarks'."""
        fields = ("name", "params", "unit", "median", "p99", "n", "baseline", "ratio", "ratio_ci95")
        return {
            "command": command_line(), "machine": machine(), "versions": {"python": platform.python_version()},
            "params": dict(self.params), "counts": self.counts,
            "rows": [{name: getattr(row, name) for name in fields} | {"max": max(self.times[row.name])} for row in self.rows()],
            "goals": [{"text": g.text, "value": g.value, "limit": g.limit, "met": g.met} for g in self.goals],
            "reasons": list(self.reasons[:REASONS_SHOWN]), "caveat": self.caveat, "notes": self.notes,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For people."""
        about = machine()
        lines = [f"{self.title}: {about['cpu']}, {about['cores']} cores, kernel {about['kernel']}"]
        lines += [f"$ {command_line()}", ""]
        lines += [f"{name.replace('_', ' '):<28}{count:>14,}" for name, count in self.counts.items()]
        for row in self.rows():
            longest = max(self.times[row.name])
            times = f"{_time(row.median):>12} median, {_time(row.p99)} p99, {_time(longest)} longest"
            lines.append(f"{row.name:<28}{times}, {row.n} times")
        lines.append("")
        for goal in self.goals:
            sign = ">=" if goal.at_least else "<="
            lines.append(f"{'met   ' if goal.met else 'MISSED'} {goal.text}: {goal.value:.4g} (goal {sign} {goal.limit:g})")
            if self.caveat and not goal.met:
                lines[-1] += f"; {self.caveat}"
        lines += ["", *self.notes] if self.notes else []
        lines += ["", *self.reasons[:REASONS_SHOWN]] if self.reasons else []
        return lines

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        sys.stdout.write(json.dumps(self.document()) + "\n" if as_json else "\n".join(self.lines()) + "\n")

    def save(self, folder: Path) -> Path:
        """Write a page, named after the day, the scenario and the machine; its path."""
        folder.mkdir(parents=True, exist_ok=True)
        chip = re.sub(r"[^a-z0-9]+", "-", machine()["cpu"].lower()).strip("-")
        path = folder / f"{time.strftime('%Y-%m-%d')}-{self.title}-{chip}.md"
        path.write_text(f"# {self.title}, {time.strftime('%Y-%m-%d %H:%M')}\n\n```\n" + "\n".join(self.lines()) + "\n```\n")
        return path


def _time(seconds: float) -> str:
    """For people: in the unit that leaves some digits before the point."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
