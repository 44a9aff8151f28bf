"""What `treadle bench grow` does with its options: run and report, report alone, or the shipped memory alone.

Owns default places and the printing of a whole answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from treadle.contract.errors import NotFound
from treadle.nn import model_fetch
from treadle_bench.grow import shipped, tables
from treadle_bench.grow.driver import Place, drive, is_met
from treadle_bench.grow.figures import Figures, rows_of
from treadle_bench.grow.goals import goals_of
from treadle_bench.grow.other_texts import texts_folder
from treadle_bench.grow.runs import Run, needs, ordered_runs
from treadle_bench.grow.store import Store
from treadle_bench.report import Goal, command_line, document, show

REPORT_FILE = "report.md"
MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class GrowOptions:
    """The command line. None: the default place."""

    work: Path | None
    texts: Path | None
    model_dir: Path | None
    only: tuple[str, ...]
    budget_minutes: float
    jobs: int
    stop_at: int
    quick: bool
    as_json: bool


def run_and_show(options: GrowOptions, *, run: bool) -> list[Goal]:
    """Do what is missing if `run`, then print the table of all there is and write it as Markdown; returns the goals."""
    work = _work(options)
    if run:
        place = Place(work, texts_folder(options.texts), _model(options))
        budget = options.budget_minutes * 60 or None
        left = drive(
            chosen_runs(options, Store(work)), place, jobs=options.jobs, budget_seconds=budget, quick=options.quick, say=_say
        )
        if left:
            _say(f"not done: {', '.join(each.key for each in left)}; the same command goes on with them")
    figures = Figures(Store(work))
    if not figures.domains:
        raise NotFound(f"{work}: no figures yet; `treadle bench grow --work {work}` makes them, `--quick` makes a few in minutes")
    goals, command = [] if options.quick else goals_of(figures), command_line()
    if options.as_json:
        lines = [line for domain in figures.domains for line in figures.lines(domain)]
        extra = {"quick": options.quick, "work": str(work), "goals": [goal.to_json() for goal in goals]}
        sys.stdout.write(json.dumps(document(rows_of(lines), goals, extra)) + "\n")
    else:
        tables.show(figures, command, judged=not options.quick)
        tables.write_markdown(figures, command, work / REPORT_FILE, judged=not options.quick)
        _say(f"as Markdown: {work / REPORT_FILE}")
    return list(goals)


def evaluate_shipped(options: GrowOptions) -> list[Goal]:
    """Measure and print the memory that comes with treadle; returns the goals."""
    rows, goals, extra = shipped.measure(_model(options), options.texts, quick=options.quick)
    show(rows, goals, as_json=options.as_json, title="grow --shipped", quick=options.quick, extra=extra)
    if not extra["held_out_of_its_text"]:
        _say("the memory's card names another text than this split's: held-out figures may be of text that it has learnt")
    if extra["sets_missing"]:
        _say(f"not measured, for want of the books (--texts): {', '.join(extra['sets_missing'])}")
    return [] if options.quick else goals


def chosen_runs(options: GrowOptions, store: Store) -> list[Run]:
    """Runs in their order; with `only`, those whose key begins so, and what they need and is not there."""
    runs = ordered_runs(quick=options.quick, stop_at=options.stop_at)
    if not options.only:
        return runs
    wanted = {run for run in runs if run.key.startswith(options.only)}
    if not wanted:
        raise NotFound(f"--only {' '.join(options.only)}: no run begins so; there are {', '.join(run.key for run in runs)}")
    wanted |= {need for need in _needed(wanted) if not is_met(need, store)}
    return [run for run in runs if run in wanted]


def _needed(runs: Sequence[Run] | set[Run]) -> set[Run]:
    needed = {need for run in runs for need in needs(run)}
    return needed | _needed(needed) if needed else needed


def _work(options: GrowOptions) -> Path:
    """Quick figures have a folder of their own: they must never stand in a table beside whole ones."""
    work = options.work or model_fetch.treadle_home() / "bench" / "grow"
    return work / "quick" if options.quick else work


def _model(options: GrowOptions) -> Path:
    return options.model_dir or model_fetch.fetch(MODEL)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
