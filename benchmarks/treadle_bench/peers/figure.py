"""The figures of a run as tables for people, and as a plot: microseconds against tokens, one panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from treadle.contract import InvalidArgument, Unavailable
from treadle_bench.peers.layouts import LAYOUTS
from treadle_bench.report import Row, digits

ENDINGS = (".svg", ".png")
PANEL_INCHES, DOTS_PER_INCH, PANELS_A_LINE = (5.4, 4.2), 110, 3
LEGEND_INCHES, COLOURS = 1.9, 10  # matplotlib's own cycle of colours
OURS_WIDTH, THEIRS_WIDTH = 2.2, 1.0  # of lines, points


def tables(rows: Sequence[Row], ours: Sequence[str]) -> dict[str, Table]:
    """One for each model, by title: a line for each peer, the fastest at most tokens first, a column for each number of tokens."""
    made = {}
    for model, lines in by_model(rows).items():
        counts = sorted({tokens for line in lines.values() for tokens in line})
        table = Table(box=None, pad_edge=False)
        table.add_column("tokens")
        for count in counts:
            table.add_column(str(count), justify="right")
        for name, line in sorted(lines.items(), key=lambda item: _speed(item[1])):
            style = "bold" if name in ours else ""
            table.add_row(name, *(digits(line[count]) if count in line else "" for count in counts), style=style)
        made[f"{title_of(model)}: us, median"] = table
    return made


def by_model(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, float]]]:
    """Medians: model -> name -> tokens -> microseconds. Of the baseline, that one which was measured beside the calls of one process."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        line = found.setdefault(row.params["model"], {}).setdefault(row.name, {})
        if row.baseline is not None or "beside" not in row.params:
            line[row.params["tokens"]] = row.median
    return {model: {name: line for name, line in lines.items() if line} for model, lines in found.items()}


def check_plot(path: Path) -> None:
    """Raises InvalidArgument for a file that cannot be written, Unavailable without matplotlib: before anything is measured."""
    if path.suffix not in ENDINGS:
        raise InvalidArgument(f"--plot {path}: a file that ends in {' or '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"--plot {path}: there is no folder {path.absolute().parent}")
    _matplotlib()


def plot(rows: Sequence[Row], ours: Sequence[str], path: Path) -> None:
    """Write the plot, without a display."""
    panels = by_model(rows)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    across = min(PANELS_A_LINE, len(panels))
    down = -(-len(panels) // across)
    figure = _matplotlib().Figure(figsize=(PANEL_INCHES[0] * across + LEGEND_INCHES, PANEL_INCHES[1] * down), layout="constrained")
    drawn: dict[str, Any] = {}
    for panel, (model, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(down, across, panel, xscale="log", yscale="log")
        axes.set(title=title_of(model), xlabel="tokens", ylabel="µs, median")
        for name, line in lines.items():
            width, counts = OURS_WIDTH if name in ours else THEIRS_WIDTH, sorted(line)
            (drawn[name],) = axes.plot(
                counts, [line[count] for count in counts], marker="o", markersize=3, linewidth=width,
                color=f"C{names.index(name) % COLOURS}", linestyle="-" if names.index(name) < COLOURS else "--",
            )  # fmt: skip
        counts = counts_of(lines)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def title_of(model: str) -> str:
    """Of the layout of that model."""
    return next((layout.title for layout in LAYOUTS if layout.model == model), model)


def counts_of(lines: dict[str, dict[int, float]]) -> list[int]:
    """Every number of tokens that any line has."""
    return sorted({count for line in lines.values() for count in line})


def _speed(line: dict[int, float]) -> float:
    """Microseconds a token, where most are asked."""
    most = max(line)
    return line[most] / most


def _matplotlib() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise Unavailable(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
    return figure
