"""Figures of the demo as tables: answers side by side, perplexities, where rows came from, and tokens/s with and without.

Owns layout for 80 columns. Does not measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.cli.terminal import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from treadle.cli.demo_answers import Pair
    from treadle.cli.demo_evidence import PoolCounters, Served
    from treadle.cli.held_out import Score
    from treadle.cli.memories import GrownMemory

VERSION_DIGITS_SHOWN = 12
ROUNDS_MIN = 8  # an interval of fewer rounds would be no more than their range: their number is told instead
NAMES = {"local": "Engram, local", "mapped": "Engram, mapped", "rpc": "Engram, rpc"}


def answers_title(model: str, memory: GrownMemory) -> str:
    """What the next tables show."""
    from rich.markup import escape

    return (
        f"\n[bold]The same prompts to {escape(model)}, without and with the memory {escape(memory.name)}[/] "
        f"(version {memory.model.version[:VERSION_DIGITS_SHOWN]}), likeliest tokens, both in one batch\n"
    )


def pair_view(pair: Pair) -> RenderableType:
    """One prompt and its two answers side by side, with the version that the answer itself reports."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    report = next(iter(pair.informed.memories), {})
    told = f"{report.get('name', '?')} {str(report.get('version', '?'))[:VERSION_DIGITS_SHOWN]}, {report.get('transport', '?')}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(Text("without", style="dim"), ratio=1)
    table.add_column(Text(f"with {told}", style="dim"), ratio=1)
    table.add_row(Text(_in_lines(pair.plain.text)), Text(_in_lines(pair.informed.text)))
    return Group(Text(f"> {pair.prompt}", style="bold cyan"), table, "")


def perplexity_view(scores: Sequence[Score], shuffled_band: str) -> RenderableType:
    """Without first, then each memory with its difference, the shuffled one last.

    shuffled_band: how far the perplexity with shuffled rows may be from that without
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    without = scores[0]
    title = f"Perplexity of {without.tokens:,} tokens kept from learning (lower: foreseen better)"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rows of")
    table.add_column("perplexity", justify="right")
    table.add_column("against none", justify="right")
    for score in scores:
        change = "" if score is without else f"{score.perplexity / without.perplexity - 1:+.1%}"
        table.add_row(score.memory or "none", f"{score.perplexity:.2f}", change)
    note = (
        f"{scores[-1].memory}: the same rows in each other's places, as from a fabric that delivers wrong ones; "
        f"within {shuffled_band} of none expected on so few tokens"
    )
    return Group(Text(title, style="bold"), table, Text(note, style="dim"), "")


def served_table(served: Sequence[Served]) -> Table:
    """What the answers, the worker and the pool say of each memory's rows."""
    from rich import box
    from rich.table import Table

    title = "Where the rows came from"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for one in served:
        table.add_column(one.name, justify="right")
    lines = {
        "answers: version": [one.version[:VERSION_DIGITS_SHOWN] for one in served],
        "answers: by": [", ".join(sorted(one.transports)) for one in served],
        "answers: lookups in time": [f"{one.counts['tickets_in_time']:,} of {one.counts['tickets']:,}" for one in served],
        "answers: rows missing": [f"{one.counts['rows_missing']:,}" for one in served],
        "worker: tokens looked up": [f"{one.tokens:,}" for one in served],
        "worker: rows looked up": [f"{one.rows:,}" for one in served],
        "pool: version": [one.pool_version[:VERSION_DIGITS_SHOWN] for one in served],
        "pool: size": [size_text(one.bytes) for one in served],
        "pool: readers, before → now": [f"{one.readers[0]} → {one.readers[1]}" for one in served],
    }
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def counted_words(counted: PoolCounters) -> str:
    """What the pool's own counters say of the time since the first question."""
    rows = f"{counted.rows_sent:,} rows over gRPC" if counted.rows_sent else "no row over gRPC, as readers that map read in place"
    return f"since the first question the pool has sent {size_text(counted.weights_bytes)} of fusion weights and {rows}"


def processes_words(processes: Mapping[str, int]) -> str:
    """That one process of each service did all of it."""
    return "one process of each did all of this: " + ", ".join(f"{name} {pid}" for name, pid in processes.items())


def bench_table(document: dict[str, Any]) -> Table:
    """Measurements in the bench format: a column for each variant, a line for each setting of the parameters that differ.

    Rows in another unit than the first (what lies behind the figures, not the figures) stay in the JSON document.
    """
    from rich import box
    from rich.table import Table

    rows = [row for row in document["rows"] if row["unit"] == document["rows"][0]["unit"]]
    varying = _varying(rows)
    variants = list(dict.fromkeys(row["name"] for row in rows))
    spread = "rounds" if any(map(_few_rounds, rows)) else "its 95 % interval"
    title = f"{rows[0]['unit']} on {document.get('machine', {}).get('cpu', 'this machine')}: median, ratio, {spread}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for variant in variants:
        table.add_column(NAMES.get(variant, variant), justify="right")
    settings: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {tuple(_param(row, name) for name in varying): {} for row in rows}
    for row in rows:
        settings[tuple(_param(row, name) for name in varying)][row["name"]] = row
    for setting, measured in settings.items():
        label = "\n".join(value if name == "phase" else f"{name} {value}" for name, value in zip(varying, setting, strict=True))
        table.add_row(label, *(_cell(measured.get(variant)) for variant in variants))
    return table


def bench_goals(document: dict[str, Any]) -> list[str]:
    """The goals that the bench holds its figures against, one line each.

    A quick run is an impression: of its goals only the stall share, which counts every step, is held against anything.
    """
    quick = bool(document.get("quick"))
    lines = ["a quick run is an impression: `treadle bench chat` measures speed against its goals"] if quick else []
    return lines + [
        f"{'met' if goal['met'] else 'missed'}: {goal['text']} ({goal['value']:.4g}, goal {goal['limit']:g})"
        for goal in document.get("goals", [])
        if not quick or "stall share" in goal["text"]
    ]


def _varying(rows: list[dict[str, Any]]) -> list[str]:
    """Parameters that are not the same everywhere."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("params", {})))
    return [name for name in names if len({_param(row, name) for row in rows}) > 1]


def _param(row: dict[str, Any], name: str) -> str:
    return str(row.get("params", {}).get(name, ""))


def _cell(row: dict[str, Any] | None) -> str:
    """Median, ratio to the baseline of the same run, interval; below ROUNDS_MIN the number of rounds instead."""
    if row is None:
        return ""
    if row.get("ratio") is None:
        return f"{row['median']:,.4g}\nbaseline"
    interval = row.get("ratio_ci95")
    lines = [f"{row['median']:,.4g}", f"{row['ratio']:.3f}x"]
    if _few_rounds(row):
        lines.append(f"of {row['n']} rounds")
    elif interval:
        lines.append(f"{interval[0]:.3f}-{interval[1]:.3f}")
    return "\n".join(lines)


def _few_rounds(row: dict[str, Any]) -> bool:
    return row.get("ratio") is not None and row.get("n", ROUNDS_MIN) < ROUNDS_MIN


def _in_lines(text: str) -> str:
    """An answer without the blank lines that a small model likes to begin with."""
    return "\n".join(line for line in text.strip().splitlines() if line.strip())
