"""Cells as tables: for people on a terminal, as Markdown for docs/benchmarks.md, and as JSON rows.

Owns words and columns. Numbers come from `scores`; nothing is left out because a rival is better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from treadle.contract.errors import InvalidArgument
from treadle_bench.asm import scores
from treadle_bench.asm.cells import Cell
from treadle_bench.asm.scores import Figure

HEADINGS = ("method", "seeds x questions", "storage %", "traffic %", "accuracy", "calibrated", "agreement", "KL")
HOW = (
    "Mean over prefix seeds and questions with its 95 % interval: a bootstrap over questions (the same for every seed) and seeds, crossed; "
    "few seeds say little about the spread of seeds.",
    "Storage: numbers kept; traffic: numbers read for one token; both in per cent of the prefix's whole KV, number against number.",
    "calibrated: batch-calibrated accuracy, each label's mean log-probability over the questions taken off. agreement and KL are with "
    "the whole prefix's answer; KL(full || method) over the labels, in nats.",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One method on one task, over seeds."""

    task: str
    method: str
    seeds: tuple[int, ...]
    questions: int
    storage: float
    traffic: float
    figures: Mapping[str, Figure]
    notes: Mapping[str, Any]


def lines_of(cells: Iterable[Cell]) -> list[Line]:
    """A line for each task and method (a note `line` names those of several seeds that are one), from all seeds that have it and the
    whole prefix's cell of the same questions."""
    by_method: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    whole: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        by_method[cell.task, str(cell.notes.get("line", cell.method))].append(cell)
        if cell.method == "full":
            whole[cell.task, cell.seed] = cell
    lines = []
    for (task, method), found in by_method.items():
        paired = [cell for cell in found if (task, cell.seed) in whole and whole[task, cell.seed].digest == cell.digest]
        if paired:
            lines.append(_line(task, method, paired, whole))
    return sorted(lines, key=lambda line: (line.task, line.storage, line.method))


def per_question(cell: Cell, full: Cell) -> dict[str, scores.Floats]:
    """Every metric of a cell, question by question."""
    return scores.of_questions(cell.scores, full.scores, cell.answers)


def rows_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Lines as JSON values."""
    return [asdict(line) | {"figures": {name: asdict(each) for name, each in line.figures.items()}} for line in lines]


def show(console: Console, title: str, lines: Sequence[Line]) -> None:
    """One table for each task."""
    for task in dict.fromkeys(line.task for line in lines):
        table = Table(box=None, pad_edge=False, title=f"{title}: {task}", title_justify="left")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
        for line in lines:
            if line.task == task:
                table.add_row(*texts_of(line))
        console.print(table)


def markdown(title: str, lines: Sequence[Line], command: str, notes: Sequence[str] = ()) -> str:
    """The same, with how it was measured."""
    out = [f"`{command}`", "", *(f"- {text}" for text in (*HOW, *notes)), ""]
    for task in dict.fromkeys(line.task for line in lines):
        out += [f"### {title}: {task}", "", _row(HEADINGS), _row(["---", *["---:"] * (len(HEADINGS) - 1)])]
        out += [_row(texts_of(line)) for line in lines if line.task == task]
        out.append("")
    return "\n".join(out)


def texts_of(line: Line) -> list[str]:
    """A line's cells as text."""
    figures = [_figure(line.figures[metric]) for metric in scores.METRICS]
    count = f"{len(line.seeds)} x {line.questions}"
    return [line.method, count, f"{line.storage:.1f}", f"{line.traffic:.1f}", *figures]


def _line(task: str, method: str, cells: Sequence[Cell], whole: Mapping[tuple[str, int], Cell]) -> Line:
    ordered = sorted(cells, key=lambda cell: cell.seed)
    counts = {len(cell.answers) for cell in ordered}
    if len(counts) != 1:
        raise InvalidArgument(f"{task} {method}: cells of {sorted(counts)} questions; measure them anew in a folder of their own")
    figures = scores.figures([per_question(cell, whole[task, cell.seed]) for cell in ordered])
    return Line(
        task, method, tuple(cell.seed for cell in ordered), counts.pop(), fmean(cell.storage for cell in ordered),
        fmean(cell.traffic for cell in ordered), figures, ordered[0].notes,
    )  # fmt: skip


def _figure(figure: Figure) -> str:
    interval = "" if figure.interval is None else f" [{figure.interval[0]:.3f}, {figure.interval[1]:.3f}]"
    return f"{figure.value:.3f}{interval}"


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
