"""A store's figures for people: rich tables on a terminal, and the same as Markdown for docs/benchmarks.md.

Owns words and columns. All numbers come from `figures`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from treadle_bench.grow.figures import PARTS, SETS, WHOLES, Cell, Figures, Line
from treadle_bench.grow.goals import MeasuredGoal, goals_of, largest_changes
from treadle_bench.grow.intervals import Interval
from treadle_bench.grow.missing import missing_runs
from treadle_bench.grow.other_texts import OTHERS
from treadle_bench.grow.runs import Kind

WIDTH_IN_FILES = 200
UNITS = {"kjv": ("chapters", "books"), "python": ("modules", "packages")}
HEADINGS = ("what", "tokens", "seeds", "CPU-min", "MB", "blocks")

HOW = (
    "Change of perplexity from the frozen model on the same blocks, in %, with its 95 % interval: a bootstrap over blocks of 512 tokens "
    "(the same blocks for every seed) and over seeds, crossed. Three seeds say little about the spread of seeds, and blocks of one chapter "
    "resemble each other, so intervals are somewhat too narrow; those of one seed hold no spread of seeds at all.",
    "`blocks`: blocks of the held-out parts / of the held-out wholes / of each other book. Lines of different blocks are of different text: "
    "compare within a line, or lines of equal blocks.",
    "The memory's recipe was fixed before these runs, in an exploration that had looked at some King James chapters; nothing of it was "
    "picked here. The n-gram model's order and mixture weights and LoRA's learning rate are chosen on validation units that stand in no "
    "column.",
    "Marks below the last one are of a run whose learning rate has not fallen yet: its schedule is planned for 640,000 tokens. LoRA's falls "
    "within its own budget, the CPU time of one of the memory's marks. LoRA pays torch's attention backward out of that time, and sees as "
    "many tokens as it allows: those of its column.",
    "The n-gram model's mixture weights are fitted on the domain's validation text alone, and it sees none of the mixed text: its figures on "
    "other books are not comparable with those of a memory that had mixed text.",
    "`memory` and `toy`, and the memory shuffled, random and gate-fixed, are of fp32 rows, and their MB those of the int4 file; bf16, fp8 "
    "and int4 are of rows read back.",
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
        for text in notes_of(figures, domain):
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    for text in judgements(figures) if judged else []:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def markdown(figures: Figures, command: str, *, judged: bool = True) -> str:
    """The same as Markdown, with how it was measured."""
    out = [f"`{command}`", "", *(f"- {text}" for text in HOW), ""]
    for domain in figures.domains:
        headings = (*HEADINGS, *columns(domain))
        out += [f"### {domain}", "", _md(headings), _md(["---", *["---:"] * (len(headings) - 1)])]
        out += [_md([*_about(line), *(_cell(line.cells[name]) for name in SETS)]) for line in figures.lines(domain)]
        out += ["", *(f"- {text}" for text in notes_of(figures, domain)), ""]
    if judged:
        out += ["```", *judgements(figures), "```", ""]
    return "\n".join(out)


def write_markdown(figures: Figures, command: str, path: Path, *, judged: bool = True) -> None:
    """Write `markdown` to a file."""
    path.write_text(markdown(figures, command, judged=judged), encoding="utf-8")


def judgements(figures: Figures) -> list[str]:
    """Every goal that there are figures for, and every run that has none."""
    return [*map(goal_text, goals_of(figures)), *(f"not run: {text}" for text in missing_runs(figures))]


def goal_text(goal: MeasuredGoal) -> str:
    """A goal, met or not, with its interval and the number of seeds; where the interval crosses the limit that is said too."""
    verdict = (
        f"{'met' if goal.met else 'MISSED'}, the interval crosses the limit:"
        if goal.crossed
        else "met   "
        if goal.met
        else "MISSED"
    )
    figure = f"{goal.value:.4g}{_interval(goal.interval, '.4g')}, {_seeds(goal.seeds)}"
    return f"{verdict} {goal.text}: {figure} (goal {'>=' if goal.at_least else '<='} {goal.limit:g})"


def notes_of(figures: Figures, domain: str) -> list[str]:
    """Lines below a domain's table that are held against no goal."""
    return [*_toy_texts(figures, domain), *_change_texts(figures, domain), *_overlap_texts(figures, domain)]


def _toy_texts(figures: Figures, domain: str) -> list[str]:
    gains = figures.toy_gains(domain)
    if not gains:
        return []
    pieces = [
        f"{mark // 1000} K: {gain.points:+.1f}{_interval(gain.interval, '.1f')}, {_seeds(gain.seeds)}" for mark, gain in gains
    ]
    return [f"Points that the memory gains beyond the toy table, {columns(domain)[0]}, by tokens: {'; '.join(pieces)}."]


def _change_texts(figures: Figures, domain: str) -> list[str]:
    names = dict(zip(SETS, columns(domain), strict=True))
    return [
        f"{each.state} rows at {each.mark // 1000} K tokens, {each.text}, the largest of all sets: {100 * each.change:+.2f} %"
        f"{_interval(_percent(each.interval), '+.2f')} ({names[each.set_name]}), {_seeds(each.seeds)}; no goal."
        for each in largest_changes(figures, domain)
    ]


def _overlap_texts(figures: Figures, domain: str) -> list[str]:
    names, found = dict(zip(SETS, columns(domain), strict=True)), figures.overlaps(domain)
    pieces = [
        f"{names[name]}: {100 * each['held']:.1f} % of tokens lie in a {each['ngram_tokens']}-gram that the training text has too; "
        f"as many {UNITS.get(domain, ('parts', 'wholes'))[0]} of the training text itself: {100 * each['itself']:.1f} %"
        for name, each in found.items()
    ]
    return [f"Overlap. {'; '.join(pieces)}."] if pieces else []


def _about(line: Line) -> list[str]:
    if line.kind is Kind.FROZEN:
        return ["frozen model, perplexity", "", "", "", "", _blocks(line)]
    tokens = f"{line.tokens_seen / 1000:.0f} K"
    return [line.name, tokens, str(len(line.seeds)), f"{line.cpu_seconds / 60:.1f}", f"{line.file_bytes / 1e6:.1f}", _blocks(line)]


def _cell(cell: Cell) -> str:
    if cell.ratio is None:
        return f"{cell.perplexity:.2f}"
    interval = cell.ratio.interval
    change = None if interval is None else (interval[0] - 1, interval[1] - 1)
    return f"{100 * (cell.ratio.value - 1):+.1f}{_interval(_percent(change), '+.1f')}"


def _blocks(line: Line) -> str:
    """Blocks of held-out parts, wholes, and each other book, such as 125/35/31-32."""
    others = sorted({line.cells[name].blocks for name in OTHERS})
    ends = [str(others[0])] if len(others) == 1 else [str(others[0]), str(others[-1])]
    return f"{line.cells[PARTS].blocks}/{line.cells[WHOLES].blocks}/{'-'.join(ends)}"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _percent(interval: Interval | None) -> Interval | None:
    return None if interval is None else (100 * interval[0], 100 * interval[1])


def _interval(interval: Interval | None, digits: str) -> str:
    return "" if interval is None else f" [{interval[0]:{digits}}, {interval[1]:{digits}}]"


def _md(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
