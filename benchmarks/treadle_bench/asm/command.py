"""What `treadle bench asm eval`, `sweep`, `chunks` and `heatmap` do with their options: measure what is missing, then print all there is.

Owns default places and the printing of a whole answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from treadle.contract.errors import InvalidArgument, NotFound
from treadle.nn import model_fetch
from treadle.nn.model import CausalLM
from treadle_bench.asm import heatmap, sweeps, tables
from treadle_bench.asm.cells import Cells
from treadle_bench.asm.evaluation import Outcome, Plan, run
from treadle_bench.asm.goals import goals_of
from treadle_bench.asm.methods import Method
from treadle_bench.asm.options import settings_of
from treadle_bench.asm.tasks import TASKS, Split, Task
from treadle_bench.report import Goal, command_line, console_with_heading, document

MODEL = "smollm2-135m"
REPORT_FILE = "report.md"
WIDTH_IN_FILES = 180  # characters: a line holds four figures with their intervals
MethodsOf = Callable[[Task, CausalLM], Sequence[Method]]


@dataclass(frozen=True, slots=True)
class AsmOptions:
    """The command line. out, model_dir: None: the default place."""

    data: Path
    out: Path | None
    model_dir: Path | None
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    only: tuple[str, ...]
    changes: tuple[str, ...]
    split: Split
    quick: bool
    as_json: bool
    report: bool = False


def compare(options: AsmOptions) -> list[Goal]:
    """Every method on every task; returns the goals, none for a quick run or for validation questions."""
    return _run_and_show(options, "eval", options.tasks or TASKS, None)


def sweep(options: AsmOptions) -> list[Goal]:
    """Settings side by side."""
    settings = settings_of(options.changes)
    return _run_and_show(
        options,
        "sweep",
        options.tasks or TASKS[:1],
        lambda task, model: sweeps.settings_methods(task, model, settings, quick=options.quick),
    )


def chunks(options: AsmOptions) -> list[Goal]:
    """Prefixes encoded in chunks."""
    settings = settings_of(options.changes)
    return _run_and_show(
        options,
        "chunks",
        options.tasks or TASKS[:1],
        lambda task, model: sweeps.chunk_methods(task, model, settings, quick=options.quick),
    )


def lists(options: AsmOptions) -> list[Goal]:
    """Two-level lookups."""
    settings = settings_of(options.changes)
    return _run_and_show(
        options,
        "heatmap",
        options.tasks or TASKS[:1],
        lambda task, model: sweeps.list_methods(task, model, settings, quick=options.quick),
    )


def model_folder(model_dir: Path | None) -> Path:
    """Where the language model lies; fetched where it is not there yet."""
    return model_dir or model_fetch.fetch(MODEL)


def out_folder(out: Path | None, what: str, *, quick: bool) -> Path:
    """Where figures lie. Quick ones have a folder of their own: they must never stand in a table beside whole ones."""
    folder = (out or model_fetch.treadle_home() / "bench" / "asm") / what
    return folder / "quick" if quick else folder


def say(text: str) -> None:
    """A line of progress, beside the figures."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def _run_and_show(options: AsmOptions, what: str, tasks: Sequence[str], methods: MethodsOf | None) -> list[Goal]:
    unknown = set(tasks) - set(TASKS)
    if unknown:
        raise InvalidArgument(f"--task {min(unknown)}: one of {', '.join(TASKS)} expected")
    out = out_folder(options.out, what, quick=options.quick) / options.split
    plan = Plan(
        options.data, model_folder(options.model_dir), out, settings_of(options.changes), tuple(tasks), options.seeds, options.only,
        options.split, quick=options.quick,
    )  # fmt: skip
    outcome = Outcome() if options.report else run(plan, say, methods)
    cells = [cell for cell in Cells(out) if cell.task in tasks and cell.seed in options.seeds]
    lines = tables.lines_of(cells)
    if not lines:
        raise NotFound(f"{out}: no figures yet; the same command without --report makes them")
    judged = what == "eval" and not options.quick and options.split is Split.TEST
    goals = goals_of(cells) if judged else []
    failures = [f"{name}: no figure: {why}" for name, why in outcome.failed.items()]
    _print(options, what, out, lines, goals, failures)
    return goals


def _print(
    options: AsmOptions, what: str, out: Path, lines: Sequence[tables.Line], goals: Sequence[Goal], failures: Sequence[str]
) -> None:
    about = {"quick": options.quick, "split": str(options.split), "out": str(out), "not_measured": list(failures)}
    whole = document([], goals, about | {"lines": tables.rows_of(lines)})
    text = tables.markdown(what, lines, command_line(), failures) + (heatmap.markdown(lines) if what == "heatmap" else "")
    if goals:
        text += "\n".join(["```", *(goal.line for goal in goals), "```", ""])
    (out / REPORT_FILE).write_text(text, encoding="utf-8")
    if options.as_json:
        sys.stdout.write(json.dumps(whole | {"goals": [goal.to_json() for goal in goals]}) + "\n")
        return
    heading = console_with_heading(f"asm {what}", whole)
    console = heading if sys.stdout.isatty() else Console(width=WIDTH_IN_FILES)
    tables.show(console, what, lines)
    if what == "heatmap":
        heatmap.show(console, lines)
    for line in (*failures, *(goal.line for goal in goals)):
        console.print(line, highlight=False, markup=False)
    say(f"as Markdown: {out / REPORT_FILE}")
