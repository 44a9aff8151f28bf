"""Which runs of the whole plan have no figures yet, in few lines.

Owns the words. What a whole run is measured at is told by `runs` and `memory_run`.
"""

from __future__ import annotations

from treadle_bench.grow.figures import Figures
from treadle_bench.grow.memory_run import states_of
from treadle_bench.grow.runs import ALL, Kind, Run, marks_kept, ordered_runs
from treadle_bench.grow.store import ON


def missing_runs(figures: Figures) -> list[str]:
    """Every run of `ordered_runs()` of which a figure is missing, with what is missing; seeds that miss the same share a line."""
    seeds: dict[tuple[str, Kind, str], list[int]] = {}
    for run in ordered_runs():
        absent = _absent(figures, run)
        if absent:
            seeds.setdefault((run.domain, run.kind, _marks_text(run, absent)), []).append(run.seed)
    return [f"{domain} {kind}{_seeds_text(kind, of)}{text}" for (domain, kind, text), of in seeds.items()]


def _absent(figures: Figures, run: Run) -> list[tuple[int, str]]:
    """(mark, state) of a run that no record has."""
    wanted = [(mark, state) for mark in marks_kept(run) for state in states_of(run, mark)]
    return [
        (mark, state)
        for mark, state in wanted
        if run.seed not in {record.seed for record in figures.records(run.domain, run.kind, mark, state)}
    ]


def _marks_text(run: Run, absent: list[tuple[int, str]]) -> str:
    if run.kind is Kind.FROZEN:
        return ""
    marks = [mark for mark, state in absent if state == ON]
    states = [state for _, state in absent if state != ON]
    if run.kind is Kind.LORA:
        return f": in the CPU time of the memory's {_tokens(marks)}"
    pieces = [_tokens(marks)] if marks else []
    pieces += [f"{', '.join(states)} at {_tokens([marks_kept(run)[-1]])}"] if states else []
    return f": {'; '.join(pieces)}"


def _tokens(marks: list[int]) -> str:
    return ", ".join("all" if mark == ALL else f"{mark // 1000} K" for mark in marks) + " tokens"


def _seeds_text(kind: Kind, seeds: list[int]) -> str:
    if kind is Kind.FROZEN:
        return ""
    return f", seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
