"""A store's figures for people: rich tables on a terminal, and the same as Markdown for docs/benchmarks.md.

Owns words and columns. All numbers come from `figures`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from treadle_bench.grow.figures import PARTS, SETS, WHOLES, Cell, Figures, Line, goals_of, missing_goals
from treadle_bench.grow.runs import Kind
from treadle_bench.report import Goal

WIDTH_IN_FILES = 170
UNITS = {"kjv": ("chapters", "books"), "python": ("modules", "packages")}
HEADINGS = ("what", "tokens", "seeds", "CPU-min", "MB")

HOW = (
    "Change of perplexity from the frozen model on the same blocks, in %, with its 95 % interval: a bootstrap over blocks of 512 tokens "
    "(the same blocks for every seed) and over seeds, crossed. Three seeds say little about the spread of seeds, and blocks of one chapter "
    "resemble each other, so intervals are somewhat too narrow. Hyperparameters, n-gram orders, mixture weights and LoRA's learning rate "
    "were picked on validation units that stand in no other column."
)


def columns(domain: str) -> list[str]:
    """Headings of the sets of a domain."""
    part, whole = UNITS.get(domain, ("parts", "wholes"))
    return [f"held-out {part}" if name == PARTS else f"held-out {whole}" if name == WHOLES else name for name in SETS]


def show(figures: Figures, command: str, *, judged: bool = True) -> None:
    """Print every table, and every goal unless these are quick figures, which are not held against goals."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_IN_FILES)
    console.print(f"$ {command}", highlight=False)
    for domain in figures.domains:
        table = Table(box=None, pad_edge=False, title=domain, title_justify="left")
        for number, heading in enumerate((*HEADINGS, *columns(domain))):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for line in figures.lines(domain):
            table.add_row(*_about(line), *(_cell(line.cells[name]) for name in SETS))
        console.print(table)
        for text in _toy_texts(figures, domain):
            console.print(text, highlight=False)
    if not judged:
        return
    for text in goal_texts(goals_of(figures)):
        console.print(text, highlight=False)
    for text in missing_goals(figures):
        console.print(f"not measured yet: {text}", highlight=False)


def markdown(figures: Figures, command: str) -> str:
    """The same as Markdown."""
    out = [f"`{command}`", "", HOW, ""]
    for domain in figures.domains:
        headings = (*HEADINGS, *columns(domain))
        out += [f"### {domain}", "", _md(headings), _md(["---", *["---:"] * (len(headings) - 1)])]
        out += [_md([*_about(line), *(_cell(line.cells[name]) for name in SETS)]) for line in figures.lines(domain)]
        out += ["", *_toy_texts(figures, domain), ""]
    out += ["```", *goal_texts(goals_of(figures)), *(f"not measured yet: {text}" for text in missing_goals(figures)), "```", ""]
    return "\n".join(out)


def write_markdown(figures: Figures, command: str, path: Path) -> None:
    """Write `markdown` to a file."""
    path.write_text(markdown(figures, command), encoding="utf-8")


def goal_texts(goals: Sequence[Goal]) -> list[str]:
    """One line for each goal, met or not."""
    return [
        f"{'met   ' if goal.met else 'MISSED'} {goal.text}: {goal.value:.4g} (goal {'>=' if goal.at_least else '<='} {goal.limit:g})"
        for goal in goals
    ]


def _toy_texts(figures: Figures, domain: str) -> list[str]:
    gains = figures.toy_gains(domain)
    if not gains:
        return []
    pieces = [f"{mark // 1000} K: {value:+.1f}{_interval(interval, '.1f')}" for mark, value, interval in gains]
    return [f"Points that the memory gains beyond the toy table, {columns(domain)[0]}, by tokens: {'; '.join(pieces)}."]


def _about(line: Line) -> list[str]:
    if line.kind is Kind.FROZEN:
        return ["frozen model, perplexity", "", "", "", ""]
    tokens = f"{line.tokens_seen / 1000:.0f} K"
    return [line.name, tokens, str(len(line.seeds)), f"{line.cpu_seconds / 60:.1f}", f"{line.file_bytes / 1e6:.1f}"]


def _cell(cell: Cell) -> str:
    if cell.ratio is None:
        return f"{cell.perplexity:.2f}"
    interval = cell.ratio.interval
    change = None if interval is None else (100 * (interval[0] - 1), 100 * (interval[1] - 1))
    return f"{100 * (cell.ratio.value - 1):+.1f}{_interval(change, '+.1f')}"


def _interval(interval: tuple[float, float] | None, digits: str) -> str:
    return "" if interval is None else f" [{interval[0]:{digits}}, {interval[1]:{digits}}]"


def _md(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
