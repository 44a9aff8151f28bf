"""From the store's records to lines of a table, rows of the bench output and goals.

Owns which figure is held against which goal, and how seeds enter: a line has one run for each seed that was measured at that
mark, all against the one frozen model, block by block. Does not print (`tables`) or measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle_bench.grow.domains import Split
from treadle_bench.grow.intervals import Floats, Ratio, gain_difference, paired, perplexity, ratio, tail_perplexity
from treadle_bench.grow.memory_run import GATE_STATE, STATES
from treadle_bench.grow.other_texts import OTHERS
from treadle_bench.grow.runs import MAIN_TOKENS, Kind
from treadle_bench.grow.store import ON, Record, Store
from treadle_bench.report import Goal, Row

PARTS, WHOLES = Split.HELD_PARTS.value, Split.HELD_WHOLES.value
SETS = (PARTS, WHOLES, *OTHERS)
GOAL_DOMAIN = "kjv"
PARTS_RATIO_MAX, WHOLES_RATIO_MAX, OTHER_RATIO_MAX, CPU_MINUTES_MAX = 0.80, 0.85, 1.01, 25.0
TOY_POINTS_MIN, TOY_MARK, TOY_MARK_BEFORE = 4.0, 300_000, 100_000
PRECISION_CHANGE_MAX, WRONG_ROWS_CHANGE_MAX = 0.002, 0.01

_STATE_ORDER = (ON, "bf16", "fp8", "int4", "shuffled", "random", GATE_STATE, "one-weight")
_KIND_ORDER = (Kind.FROZEN, Kind.MEMORY, Kind.TOY, Kind.NGRAM, Kind.LORA)


@dataclass(frozen=True, slots=True)
class Cell:
    """A set's figure: perplexity over seeds, and its ratio to the frozen model's on the same blocks (None: it is that)."""

    perplexity: float
    worst_block: float  # 99th percentile of single blocks' perplexity
    n: int
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a domain's table."""

    domain: str
    kind: Kind
    state: str
    mark: int
    seeds: tuple[int, ...]
    tokens_seen: int
    cpu_seconds: float  # the longest of the seeds
    file_bytes: int
    cells: Mapping[str, Cell]

    @property
    def name(self) -> str:
        """What the line is of."""
        return str(self.kind) if self.state == ON else f"{self.kind}, {self.state}"


class Figures:
    """All lines that the records of a store give."""

    def __init__(self, store: Store) -> None:
        self._groups: dict[tuple[str, Kind, str, int], list[Record]] = {}
        for record in store:
            self._groups.setdefault((record.domain, record.kind, record.state, record.mark), []).append(record)
        for group in self._groups.values():
            group.sort(key=lambda record: record.seed)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains with a frozen baseline, without which there are no figures."""
        return tuple(sorted({domain for domain, kind, _, _ in self._groups if kind is Kind.FROZEN}))

    def records(self, domain: str, kind: Kind, mark: int, state: str = ON) -> list[Record]:
        """One record a seed, rising; empty if it was not measured."""
        return self._groups.get((domain, kind, state, mark), [])

    def lines(self, domain: str) -> list[Line]:
        """The table of a domain: the frozen model first, then memories, controls and rivals, by tokens seen."""
        keys = [key for key in self._groups if key[0] == domain]
        keys.sort(key=lambda key: (_KIND_ORDER.index(key[1]), _place(key[2]), key[3] or 1 << 62))
        return [self._line(*key) for key in keys]

    def difference(
        self,
        domain: str,
        mine: tuple[Kind, str],
        mark: int,
        set_name: str,
        base: tuple[Kind, str] = (Kind.FROZEN, ON),
        seeds: Sequence[int] = (),
    ) -> Floats | None:
        """Nats a token of one state minus another's, [seeds, blocks]; None if a side was not measured. seeds: only these."""
        ours = [record for record in self.records(domain, mine[0], mark, mine[1]) if not seeds or record.seed in seeds]
        theirs = self.records(domain, base[0], 0 if base[0] is Kind.FROZEN else mark, base[1])
        if base[0] is not Kind.FROZEN:
            both = {record.seed for record in ours} & {record.seed for record in theirs}
            ours, theirs = ([record for record in side if record.seed in both] for side in (ours, theirs))
        if not ours or not theirs:
            return None
        return paired([r.sets[set_name] for r in ours], [r.sets[set_name] for r in theirs], ours[0].tokens_a_block)

    def gain_over_toy(self, domain: str, mark: int) -> tuple[float, tuple[float, float] | None] | None:
        """Points of perplexity on held-out parts that the memory gains beyond the toy table, over the seeds that both have."""
        seeds = {r.seed for r in self.records(domain, Kind.MEMORY, mark)} & {r.seed for r in self.records(domain, Kind.TOY, mark)}
        if not seeds:
            return None
        frozen = self.records(domain, Kind.FROZEN, 0)[0]
        sides = []
        for kind, other in ((Kind.MEMORY, Kind.TOY), (Kind.TOY, Kind.MEMORY)):
            ours, theirs = ([r.sets[PARTS] for r in self.records(domain, each, mark) if r.seed in seeds] for each in (kind, other))
            shared = set.intersection(*(set(each.blocks) for each in (*ours, *theirs)))
            sides.append(paired([each.only(shared) for each in ours], [frozen.sets[PARTS]], frozen.tokens_a_block))
        return gain_difference(sides[0], sides[1])

    def toy_gains(self, domain: str) -> list[tuple[int, float, tuple[float, float] | None]]:
        """(mark, points over the toy table, 95 % interval) wherever both were measured."""
        marks = sorted({mark for of, kind, _, mark in self._groups if of == domain and kind is Kind.TOY})
        gains = [(mark, self.gain_over_toy(domain, mark)) for mark in marks]
        return [(mark, *gain) for mark, gain in gains if gain is not None]

    def _line(self, domain: str, kind: Kind, state: str, mark: int) -> Line:
        records = self.records(domain, kind, mark, state)
        cells = {}
        for name in SETS:
            difference = None if kind is Kind.FROZEN else self.difference(domain, (kind, state), mark, name)
            scores = [record.sets[name] for record in records]
            of_frozen, size = None if difference is None else ratio(difference), records[0].tokens_a_block
            blocks = sum(len(each.blocks) for each in scores)
            cells[name] = Cell(perplexity(scores, size), tail_perplexity(scores, size), blocks, of_frozen)
        return Line(
            domain, kind, state, mark, tuple(record.seed for record in records), max(record.tokens_seen for record in records),
            max(record.cpu_seconds for record in records), max(record.file_bytes for record in records), cells,
        )  # fmt: skip


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """Lines as rows of the bench output: one a set; `p99` is over blocks, `ratio` is to the frozen model."""
    rows = []
    for line in lines:
        for name, cell in line.cells.items():
            params = {
                "domain": line.domain, "set": name, "tokens": line.tokens_seen, "seeds": len(line.seeds),
                "cpu_seconds": line.cpu_seconds, "bytes": line.file_bytes,
            }  # fmt: skip
            row = Row(line.name, params, "perplexity", cell.perplexity, cell.worst_block, cell.n)
            if cell.ratio is not None:
                row = Row(
                    line.name, params, "perplexity", cell.perplexity, cell.worst_block, cell.n, baseline=str(Kind.FROZEN),
                    ratio=cell.ratio.value, ratio_ci95=cell.ratio.interval,
                )  # fmt: skip
            rows.append(row)
    return rows


def goals_of(figures: Figures) -> list[Goal]:
    """Every goal that the store has figures for."""
    goals = _main_goals(figures) + _toy_goals(figures)
    for domain in figures.domains:
        goals += _state_goals(figures, domain)
    return goals


def missing_goals(figures: Figures) -> list[str]:
    """What goals are about that was not measured yet."""
    wanted = [(Kind.MEMORY, ON, MAIN_TOKENS), (Kind.TOY, ON, TOY_MARK), *((Kind.MEMORY, state, MAIN_TOKENS) for state in STATES)]
    return [
        f"{GOAL_DOMAIN} {kind}, {state}, at {mark:,} tokens"
        for kind, state, mark in wanted
        if not figures.records(GOAL_DOMAIN, kind, mark, state)
    ]


def _main_goals(figures: Figures) -> list[Goal]:
    records = figures.records(GOAL_DOMAIN, Kind.MEMORY, MAIN_TOKENS)
    if not records or GOAL_DOMAIN not in figures.domains:
        return []
    goals = []
    limits = {PARTS: PARTS_RATIO_MAX, WHOLES: WHOLES_RATIO_MAX} | dict.fromkeys(OTHERS, OTHER_RATIO_MAX)
    for name, limit in limits.items():
        difference = figures.difference(GOAL_DOMAIN, (Kind.MEMORY, ON), MAIN_TOKENS, name)
        assert difference is not None
        goals.append(
            Goal(f"{GOAL_DOMAIN}, {MAIN_TOKENS:,} tokens, {name}: of the frozen perplexity", ratio(difference).value, limit)
        )
    minutes = max(record.cpu_seconds for record in records) / 60
    goals.append(Goal(f"{GOAL_DOMAIN}, {MAIN_TOKENS:,} tokens: CPU-minutes of the slowest seed", minutes, CPU_MINUTES_MAX))
    return goals


def _toy_goals(figures: Figures) -> list[Goal]:
    late, early = (figures.gain_over_toy(GOAL_DOMAIN, mark) for mark in (TOY_MARK, TOY_MARK_BEFORE))
    goals = []
    if late is not None:
        goals.append(Goal(f"{GOAL_DOMAIN}, {TOY_MARK:,} tokens: points over the toy table", late[0], TOY_POINTS_MIN, at_least=True))
    if late is not None and early is not None:
        text = f"{GOAL_DOMAIN}: points over the toy table, more at {TOY_MARK:,} than at {TOY_MARK_BEFORE:,} tokens by"
        goals.append(Goal(text, late[0] - early[0], 0.0, at_least=True))
    return goals


def _state_goals(figures: Figures, domain: str) -> list[Goal]:
    goals = []
    for state, base, limit, text in (
        ("fp8", (Kind.MEMORY, "bf16"), PRECISION_CHANGE_MAX, "change of perplexity from bf16 rows"),
        ("int4", (Kind.MEMORY, "bf16"), PRECISION_CHANGE_MAX, "change of perplexity from bf16 rows"),
        ("shuffled", (Kind.FROZEN, ON), WRONG_ROWS_CHANGE_MAX, "change from the frozen perplexity"),
        ("random", (Kind.FROZEN, ON), WRONG_ROWS_CHANGE_MAX, "change from the frozen perplexity"),
    ):
        difference = figures.difference(domain, (Kind.MEMORY, state), MAIN_TOKENS, PARTS, base)
        if difference is not None:
            goals.append(Goal(f"{domain}, {PARTS}, {state} rows: {text}", abs(ratio(difference).value - 1), limit))
    return goals


def _place(state: str) -> int:
    return _STATE_ORDER.index(state) if state in _STATE_ORDER else len(_STATE_ORDER)
