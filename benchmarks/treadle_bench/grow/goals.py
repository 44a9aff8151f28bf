"""Goals of the grow figures: which figure is held against which limit, over how many seeds, with what uncertainty.

Owns limits and the words of goals. All numbers come from `figures`; printing is `tables`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle_bench.grow.figures import PARTS, SETS, WHOLES, Figures
from treadle_bench.grow.intervals import Interval, Ratio, ratio
from treadle_bench.grow.other_texts import OTHERS
from treadle_bench.grow.runs import MAIN_TOKENS, Kind
from treadle_bench.grow.store import ON
from treadle_bench.report import Goal

GOAL_DOMAIN = "kjv"
PARTS_RATIO_MAX, WHOLES_RATIO_MAX, OTHER_RATIO_MAX, CPU_MINUTES_MAX = 0.80, 0.85, 1.01, 25.0
TOY_POINTS_MIN, TOY_MARK, TOY_MARK_BEFORE = 4.0, 300_000, 100_000
PRECISION_CHANGE_MAX, WRONG_ROWS_CHANGE_MAX = 0.002, 0.01

_FROZEN, _BF16 = (Kind.FROZEN, ON), (Kind.MEMORY, "bf16")
_STATES = (  # state, what it is compared with, in words, limit of the change
    ("fp8", _BF16, "change of perplexity from bf16 rows", PRECISION_CHANGE_MAX),
    ("int4", _BF16, "change of perplexity from bf16 rows", PRECISION_CHANGE_MAX),
    ("shuffled", _FROZEN, "change from the frozen perplexity", WRONG_ROWS_CHANGE_MAX),
    ("random", _FROZEN, "change from the frozen perplexity", WRONG_ROWS_CHANGE_MAX),
)


@dataclass(frozen=True, slots=True)
class MeasuredGoal(Goal):
    """A goal with what its figure rests on: the number of seeds, and the 95 % interval (None: the figure has none)."""

    seeds: int = 1
    interval: Interval | None = None

    @property
    def crossed(self) -> bool:
        """True if the interval lies on both sides of the limit: met or missed, these blocks and seeds do not settle it."""
        return self.interval is not None and self.interval[0] < self.limit < self.interval[1]


@dataclass(frozen=True, slots=True)
class LargestChange:
    """Of one state of a memory, the set whose perplexity it changes most; `change` is the ratio minus 1, as its interval is."""

    domain: str
    state: str
    mark: int
    text: str
    set_name: str
    change: float
    interval: Interval | None
    seeds: int


def goals_of(figures: Figures) -> list[MeasuredGoal]:
    """Every goal that the store has figures for."""
    goals = _main_goals(figures) + _toy_goals(figures) if GOAL_DOMAIN in figures.domains else []
    for domain in figures.domains:
        goals += _state_goals(figures, domain)
    return goals


def largest_changes(figures: Figures, domain: str) -> list[LargestChange]:
    """For each state that has a goal on one set alone: its largest change over all sets, at every mark it was measured at."""
    found = []
    for state, base, text, _ in _STATES:
        for mark in figures.marks(domain, Kind.MEMORY, state):
            ratios = {name: _ratio(figures, domain, (Kind.MEMORY, state), mark, name, base) for name in SETS}
            known = {name: each for name, each in ratios.items() if each is not None}
            if not known:
                continue
            name = max(known, key=lambda each: abs(known[each].value - 1))
            most = known[name]
            interval = None if most.interval is None else (most.interval[0] - 1, most.interval[1] - 1)
            found.append(LargestChange(domain, state, mark, text, name, most.value - 1, interval, len(most.by_seed)))
    return found


def _main_goals(figures: Figures) -> list[MeasuredGoal]:
    records = figures.records(GOAL_DOMAIN, Kind.MEMORY, MAIN_TOKENS)
    if not records:
        return []
    goals = []
    limits = {PARTS: PARTS_RATIO_MAX, WHOLES: WHOLES_RATIO_MAX} | dict.fromkeys(OTHERS, OTHER_RATIO_MAX)
    for name, limit in limits.items():
        found = _ratio(figures, GOAL_DOMAIN, (Kind.MEMORY, ON), MAIN_TOKENS, name, _FROZEN)
        assert found is not None
        text = f"{GOAL_DOMAIN}, {MAIN_TOKENS:,} tokens, {name}: of the frozen perplexity"
        goals.append(MeasuredGoal(text, found.value, limit, seeds=len(found.by_seed), interval=found.interval))
    minutes = max(record.cpu_seconds for record in records) / 60
    text = f"{GOAL_DOMAIN}, {MAIN_TOKENS:,} tokens: CPU-minutes of the slowest seed"
    return [*goals, MeasuredGoal(text, minutes, CPU_MINUTES_MAX, seeds=len(records))]


def _toy_goals(figures: Figures) -> list[MeasuredGoal]:
    gain, growth = figures.gain_over_toy(GOAL_DOMAIN, TOY_MARK), figures.toy_growth(GOAL_DOMAIN, TOY_MARK_BEFORE, TOY_MARK)
    goals = []
    if gain is not None:
        text = f"{GOAL_DOMAIN}, {TOY_MARK:,} tokens, {PARTS}: points over the toy table"
        goals.append(MeasuredGoal(text, gain.points, TOY_POINTS_MIN, at_least=True, seeds=gain.seeds, interval=gain.interval))
    if growth is not None:
        text = f"{GOAL_DOMAIN}, {PARTS}: points over the toy table, more at {TOY_MARK:,} than at {TOY_MARK_BEFORE:,} tokens by"
        goals.append(MeasuredGoal(text, growth.points, 0.0, at_least=True, seeds=growth.seeds, interval=growth.interval))
    return goals


def _state_goals(figures: Figures, domain: str) -> list[MeasuredGoal]:
    goals = []
    for state, base, text, limit in _STATES:
        found = _ratio(figures, domain, (Kind.MEMORY, state), MAIN_TOKENS, PARTS, base)
        if found is not None:
            interval = None if found.interval is None else _size(found.interval)
            words = f"{domain}, {state} rows, on {PARTS} alone: {text}"
            goals.append(MeasuredGoal(words, abs(found.value - 1), limit, seeds=len(found.by_seed), interval=interval))
    return goals


def _ratio(figures: Figures, domain: str, mine: tuple[Kind, str], mark: int, name: str, base: tuple[Kind, str]) -> Ratio | None:
    difference = figures.difference(domain, mine, mark, name, base)
    return None if difference is None else ratio(difference)


def _size(interval: Interval) -> Interval:
    """The sizes of change, whatever the direction, that an interval of ratios holds."""
    low, high = interval[0] - 1, interval[1] - 1
    return (0.0 if low < 0 < high else min(abs(low), abs(high))), max(abs(low), abs(high))
