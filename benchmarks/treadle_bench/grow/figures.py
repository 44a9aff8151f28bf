"""From the store's records to lines of a table and rows of the bench output.

Owns how seeds enter: a line has one run for each seed that was measured at that
mark, all against the one frozen model, block by block. Does not judge (`goals`), print (`tables`) or measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle_bench.grow.domains import Split
from treadle_bench.grow.intervals import (
    Floats,
    Interval,
    Ratio,
    gain_difference,
    gain_growth,
    paired,
    perplexity,
    ratio,
    tail_perplexity,
)
from treadle_bench.grow.measuring import OVERLAP_NOTE
from treadle_bench.grow.memory_run import GATE_STATE
from treadle_bench.grow.other_texts import OTHERS
from treadle_bench.grow.runs import Kind
from treadle_bench.grow.store import ON, Record, Store
from treadle_bench.report import Row

PARTS, WHOLES = Split.HELD_PARTS.value, Split.HELD_WHOLES.value
SETS = (PARTS, WHOLES, *OTHERS)
_STATE_ORDER = (ON, "bf16", "fp8", "int4", "shuffled", "random", GATE_STATE, "one-weight")
_KIND_ORDER = (Kind.FROZEN, Kind.MEMORY, Kind.TOY, Kind.NGRAM, Kind.LORA)


@dataclass(frozen=True, slots=True)
class Cell:
    """A set's figure: perplexity over seeds, and its ratio to the frozen model's on the same blocks (None: it is that)."""

    perplexity: float
    worst_block: float  # 99th percentile of single blocks' perplexity
    n: int  # blocks, those of every seed counted
    blocks: int  # that the figure is over: the ratio's, which every seed and the frozen model have
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Gain:
    """Points of perplexity (% of the frozen model's) on held-out parts beyond the toy table; 95 % interval; over so many seeds."""

    points: float
    interval: Interval | None
    seeds: int


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

    def gain_over_toy(self, domain: str, mark: int) -> Gain | None:
        """What the memory gains beyond the toy table, over the seeds that both have."""
        sides = self._toy_sides(domain, (mark,))
        return None if sides is None else Gain(*gain_difference(*sides[0]), len(sides[0][0]))

    def toy_growth(self, domain: str, early: int, late: int) -> Gain | None:
        """By how much that is more at mark `late` than at `early`, over the seeds and blocks that all four have."""
        sides = self._toy_sides(domain, (early, late))
        return None if sides is None else Gain(*gain_growth(sides[0], sides[1]), len(sides[0][0]))

    def toy_gains(self, domain: str) -> list[tuple[int, Gain]]:
        """Mark and gain over the toy table wherever both were measured."""
        gains = [(mark, self.gain_over_toy(domain, mark)) for mark in self.marks(domain, Kind.TOY)]
        return [(mark, gain) for mark, gain in gains if gain is not None]

    def marks(self, domain: str, kind: Kind, state: str = ON) -> list[int]:
        """Marks at which that was measured, rising."""
        return sorted(mark for of, each, this, mark in self._groups if (of, each, this) == (domain, kind, state))

    def overlaps(self, domain: str) -> Mapping[str, Mapping[str, float]]:
        """What of each held-out split the training text repeats, as `material.overlaps_of` measured it; empty if it was not."""
        notes: Mapping[str, Any] = self.records(domain, Kind.FROZEN, 0)[0].notes
        found: Mapping[str, Mapping[str, float]] = notes.get(OVERLAP_NOTE, {})
        return found

    def _toy_sides(self, domain: str, marks: Sequence[int]) -> list[tuple[Floats, Floats]] | None:
        """For each mark (memory, toy table) minus frozen, [seeds, blocks]: seeds and blocks that every side has; None if no seed."""
        groups = [self.records(domain, kind, mark) for mark in marks for kind in (Kind.MEMORY, Kind.TOY)]
        seeds = set.intersection(*({record.seed for record in group} for group in groups))
        if not seeds:
            return None
        frozen = self.records(domain, Kind.FROZEN, 0)[0]
        scores = [[record.sets[PARTS] for record in group if record.seed in seeds] for group in groups]
        shared = set.intersection(*(set(each.blocks) for group in scores for each in group))
        sides = [paired([each.only(shared) for each in group], [frozen.sets[PARTS]], frozen.tokens_a_block) for group in scores]
        return list(zip(sides[::2], sides[1::2], strict=True))

    def _line(self, domain: str, kind: Kind, state: str, mark: int) -> Line:
        records = self.records(domain, kind, mark, state)
        cells = {}
        for name in SETS:
            difference = None if kind is Kind.FROZEN else self.difference(domain, (kind, state), mark, name)
            scores = [record.sets[name] for record in records]
            of_frozen, size = None if difference is None else ratio(difference), records[0].tokens_a_block
            blocks = sum(len(each.blocks) for each in scores)
            shared = len(scores[0].blocks) if of_frozen is None else of_frozen.blocks
            cells[name] = Cell(perplexity(scores, size), tail_perplexity(scores, size), blocks, shared, of_frozen)
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


def _place(state: str) -> int:
    return _STATE_ORDER.index(state) if state in _STATE_ORDER else len(_STATE_ORDER)
