"""What `treadle bench gather` must show, from the rows it measured."""

from __future__ import annotations

from collections.abc import Sequence

from treadle_bench.gather_tables import SMALL
from treadle_bench.report import Goal, Row

GOAL_TOKENS = 256
BUSY = "busy core beside "  # before the name of what was measured so
LISTING1_RATIO_HUGE, LISTING1_RATIO_SMALL = 0.60, 0.88
TWO_THREADS_RATIO = 0.36
READ_ONLY_RATIO = 1.4
TODAY = ("np.take", "torch.index_select")
TODAY_FACTOR = 1.5  # np.take and torch.index_select over 4 KiB pages, as users have them, against ours on 2 MiB pages
ENGRAMDB_FACTOR = 25.0
P99_RATIO = 1.1  # of the p99 of Listing 1
BUSY_TAIL = 3.0  # p99 / p50 with one core busy


def goals_of(rows: Sequence[Row], profile: str) -> list[Goal]:
    """Goals of one profile at GOAL_TOKENS tokens; `rows` are those of that profile."""
    at_goal = [row for row in rows if row.params["tokens"] == GOAL_TOKENS]
    by_one = {row.name: row for row in at_goal if row.params["threads"] == 1}
    by_two = {row.name: row for row in at_goal if row.params["threads"] == 2}
    median = {name: row.median for name, row in by_one.items()}
    huge = next(
        name.removeprefix("read-only ") for name in by_one if name.startswith("read-only") and not name.endswith(f" {SMALL}")
    )
    what = f"{profile}, {GOAL_TOKENS} tokens"
    goals = [
        Goal(f"{what}, mapped {huge} / listing1 {SMALL}", _ratio(by_one[f"mapped {huge}"]), LISTING1_RATIO_HUGE),
        Goal(f"{what}, mapped {SMALL} / listing1 {SMALL}", _ratio(by_one[f"mapped {SMALL}"]), LISTING1_RATIO_SMALL),
        Goal(f"{what}, mapped {huge} by two threads / listing1 {SMALL}", _ratio(by_two[f"mapped {huge}"]), TWO_THREADS_RATIO),
    ]
    for pages in (SMALL, huge):
        ours = median[f"mapped {pages}"]
        goals.append(Goal(f"{what}, mapped {pages} / read-only {pages}", ours / median[f"read-only {pages}"], READ_ONLY_RATIO))
        goals += [
            Goal(f"{what}, {theirs} {pages} / mapped {pages}", median[f"{theirs} {pages}"] / ours, 1.0, at_least=True)
            for theirs in TODAY
        ]
        goals.append(
            Goal(f"{what}, p99 of mapped {pages} / p99 of listing1", by_one[f"mapped {pages}"].p99_ratio or 0.0, P99_RATIO)
        )
    for theirs in TODAY:
        factor = median[f"{theirs} {SMALL}"] / median[f"mapped {huge}"]
        goals.append(Goal(f"{what}, {theirs} {SMALL} / mapped {huge}", factor, TODAY_FACTOR, at_least=True))
    if f"engramdb {huge}" in by_one:
        factor = median[f"engramdb {huge}"] / median[f"mapped {huge}"]
        goals.append(Goal(f"{what}, engramdb {huge} / mapped {huge}", factor, ENGRAMDB_FACTOR, at_least=True))
    tails = {name: by_one[BUSY + name] for name in (f"mapped {SMALL}", f"mapped {huge}") if BUSY + name in by_one}
    return goals + [
        Goal(f"{what}, p99 / p50 of {name}, one core busy", row.p99 / row.median, BUSY_TAIL) for name, row in tails.items()
    ]


def _ratio(row: Row) -> float:
    assert row.ratio is not None
    return row.ratio
