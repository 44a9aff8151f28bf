"""Two-level lookups beside a scan of all entries, on the queries that real questions ask: lists by how many are scanned.

Owns recall and the grid (paper, Figure 4). Recall@1 counts a lookup as right where it finds an entry as near as the nearest one is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from torch import Tensor

from treadle.nn.prefix_memory import Found, PrefixMemory
from treadle.nn.rope import Rope
from treadle_bench.asm.tables import Line

SAME = 1e-6  # of two cosines: equal entries stand in several lists, and either is right


class Watched:
    """A memory whose every lookup is compared with that of a scan; answers as the memory does. Fits where a PrefixMemory does."""

    def __init__(self, memory: PrefixMemory, scan: PrefixMemory) -> None:
        self._memory, self._scan = memory, scan
        self.dictionary, self.layers, self.position_offset = memory.dictionary, memory.layers, memory.position_offset
        self.lookups = self.right = 0

    @property
    def recall(self) -> float:
        """Share of the lookups so far that found a nearest entry."""
        return self.right / max(self.lookups, 1)

    def lookup(self, layer: int, queries: Tensor, rotated: Tensor, rope: Rope | None = None) -> Found | None:
        """As PrefixMemory.lookup."""
        found, nearest = (memory.lookup(layer, queries, rotated, rope) for memory in (self._memory, self._scan))
        if found is not None and nearest is not None:
            self.lookups += found.cosines.numel()
            self.right += int((found.cosines >= nearest.cosines - SAME).sum())
        return found


def grid_of(lines: Iterable[Line]) -> dict[tuple[int, int], tuple[float, float, float]]:
    """(lists, scanned) -> (recall@1, agreement, traffic in %)."""
    grid = {}
    for line in lines:
        if (name := re.search(r"-lists(\d+)-probed(\d+)$", line.method)) is not None:
            place = int(name[1]), int(name[2])
            grid[place] = float(line.notes["recall"]), line.figures["agreement"].value, line.traffic
    return grid


def show(console: Console, lines: Iterable[Line]) -> None:
    """Recall@1 / agreement by lists (down) and lists scanned (across)."""
    console.print(_table(lines))


def markdown(lines: Iterable[Line]) -> str:
    """The same grid as Markdown."""
    grid = grid_of(lines)
    across = sorted({probed for _, probed in grid})
    out = [f"| lists \\ scanned | {' | '.join(map(str, across))} |", f"| ---: |{' ---: |' * len(across)}"]
    out += [
        f"| {lists} | {' | '.join(_cell(grid, lists, probed) for probed in across)} |"
        for lists in sorted({lists for lists, _ in grid})
    ]
    return "\n".join(["Recall@1 / agreement.", "", *out, ""])


def _table(lines: Iterable[Line]) -> Table:
    grid = grid_of(lines)
    table = Table(
        box=None, pad_edge=False, title="recall@1 / agreement, lists (down) by lists scanned (across)", title_justify="left"
    )
    across = sorted({probed for _, probed in grid})
    for heading in ("lists", *map(str, across)):
        table.add_column(heading, justify="right")
    for lists in sorted({lists for lists, _ in grid}):
        table.add_row(str(lists), *(_cell(grid, lists, probed) for probed in across))
    return table


def _cell(grid: dict[tuple[int, int], tuple[float, float, float]], lists: int, probed: int) -> str:
    if (lists, probed) not in grid:
        return ""
    recall, agreement, _ = grid[lists, probed]
    return f"{recall:.3f} / {agreement:.3f}"
