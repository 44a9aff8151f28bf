"""The rule of admission and what it reckons with, in Python: the reference beside src/judge.hpp, src/costs.hpp and src/bandwidth.hpp.

Owns no ticket and no order. The fallback queue uses it; figures replay recorded arrivals by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np

from treadle.contract import DeadlineExceeded, ResourceExhausted, TreadleError
from treadle.dataplane.faults import Fault
from treadle.kernels import gather_rows

NO_DEADLINE = (1 << 63) - 1  # a hint: whenever nothing else is to do
COST_WEIGHT = 0.125  # of a new piece in the mean: eight pieces forget a change of load
COST_JUMP_MAX = 4.0  # a piece during which the thread lost its core says nothing of rows
LINE_NS = (15.0, 4000.0, 1000.0)  # by tier, until a piece has run
LINE_BYTES, LINE_CLASSES, ROW_CLASSES = 64, 12, 20
RESERVES_MAX = 64  # names at once
RESERVED_PART_MAX = 0.9  # rows never stop wholly: a missing row costs more than a late KV block
PACE_BURST_NS = 1_000_000  # idle time that may be made good for
PREDICTION_ERROR_PARTS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # bounds of a histogram, of the time from submission to finish
COPY_BYTES, COPY_ROUNDS = 32 << 20, 4


class Tier(IntEnum):
    """Where rows lie."""

    MEMORY = 0
    DISK = 1
    REMOTE = 2


class Reason(IntEnum):
    """Why a ticket was refused."""

    NONE = 0
    ROOM = 1
    HINTS = 2
    QUOTA = 3
    SHARE = 4
    LATE = 5


class Verdict(NamedTuple):
    """The answer to a submission. Times: CLOCK_MONOTONIC ns, 0: not known."""

    fault: int = Fault.NONE
    predicted_finish_ns: int = 0
    retry_after_ns: int = 0
    reason: int = Reason.NONE


class Work(NamedTuple):
    """Work of a ticket that nobody has claimed yet. `span_ns`: how long it takes at least, with all the workers it can use."""

    deadline_ns: int
    work_ns: int
    span_ns: int


def judge(now_ns: int, running_ns: int, workers: int, asked: Work, admitted: Sequence[Work]) -> Verdict:
    """Whether `asked` can be done in time without making one of `admitted` late, and when it would be done.

    running_ns: what is left of the pieces in flight, all workers together
    admitted:   in the order in which they will run; work of an earlier or the same deadline runs before `asked`
    Of several workers the prediction is short by at most one piece; a ticket that would be late anyway refuses nobody.
    """

    def finish_ns(before_ns: int, work: Work) -> int:
        return now_ns + (running_ns + before_ns) // workers + work.span_ns

    before_ns, at = 0, 0
    while at < len(admitted) and admitted[at].deadline_ns <= asked.deadline_ns:
        before_ns += admitted[at].work_ns
        at += 1
    finish = finish_ns(before_ns, asked)
    fits = asked.deadline_ns == NO_DEADLINE or finish <= asked.deadline_ns
    for work in admitted[at:]:
        if work.deadline_ns == NO_DEADLINE:
            break
        made_it = finish_ns(before_ns, work) <= work.deadline_ns
        makes_it = finish_ns(before_ns + asked.work_ns, work) <= work.deadline_ns
        before_ns += work.work_ns
        if made_it and not makes_it:  # it would have to run behind this one
            finish, fits = finish_ns(before_ns, asked), False
    return Verdict(predicted_finish_ns=finish) if fits else Verdict(Fault.LATE, finish, 0, Reason.LATE)


class Costs:
    """Nanoseconds a row, by tier, size of row and size of piece, learnt from the pieces that ran."""

    def __init__(self, line_ns: Sequence[float] = LINE_NS) -> None:
        self._line_ns = tuple(line_ns)
        self._known: dict[tuple[int, int], dict[int, tuple[float, int]]] = {}  # (tier, lines) -> piece -> (ns a row, samples)

    def row_ns(self, tier: int, row_bytes: int, rows: int) -> float:
        """What a row costs in a piece of `rows`."""
        known = self._known.get((tier, _class(_lines(row_bytes), LINE_CLASSES)), {})
        at = _class(rows, ROW_CLASSES)
        near = min(known, key=lambda size: (abs(size - at), -size), default=None)  # pieces of a like size cost alike
        return known[near][0] if near is not None else self.seed_ns(tier, row_bytes)

    def seed_ns(self, tier: int, row_bytes: int) -> float:
        """Of a row, before anything was learnt."""
        return self._line_ns[tier] * _lines(row_bytes)

    def piece_ns(self, tier: int, row_bytes: int, rows: int) -> float:
        """What a piece of `rows` costs."""
        return self.row_ns(tier, row_bytes, rows) * rows

    def learn(self, tier: int, row_bytes: int, rows: int, ns: int) -> None:
        """A piece of `rows` took `ns`."""
        if rows <= 0:
            return
        was, now = self.row_ns(tier, row_bytes, rows), max(1, ns) / rows
        known = self._known.setdefault((tier, _class(_lines(row_bytes), LINE_CLASSES)), {})
        at = _class(rows, ROW_CLASSES)
        samples = known.get(at, (0.0, 0))[1]
        if not samples:
            known[at] = (now, 1)
            return
        weight = max(COST_WEIGHT, 1.0 / (samples + 1.0))
        known[at] = (was + weight * (min(now, was * COST_JUMP_MAX) - was), min(samples + 1, 1 << 20))


class Bandwidth:
    """Reserves of bytes copied a second, and the pace that they leave to rows."""

    def __init__(self) -> None:
        self.total = 0
        self._reserves: dict[str, tuple[int, int]] = {}  # name -> (bytes a second, until)
        self._free_at_ns = 0

    def reserve(self, name: str, bytes_per_second: int, until_ns: int, now_ns: int) -> bool:
        """Reserve, replace, or give back (0). False: that leaves rows too little, or there are too many names."""
        others = self.reserved(now_ns) - self._reserves.get(name, (0, 0))[0]
        if bytes_per_second > 0:
            if others + bytes_per_second > self.total * RESERVED_PART_MAX:
                return False
            if name not in self._reserves and len(self._reserves) >= RESERVES_MAX:
                return False
            self._reserves[name] = (bytes_per_second, until_ns)
        else:
            self._reserves.pop(name, None)
        return True

    def reserved(self, now_ns: int) -> int:
        """Bytes a second, all reserves together."""
        self._reserves = {name: kept for name, kept in self._reserves.items() if kept[1] > now_ns}
        return sum(rate for rate, _ in self._reserves.values())

    def least_ns(self, byte_count: int, now_ns: int) -> int:
        """Nanoseconds that so many bytes take at least, all workers together; 0 without a reserve."""
        taken = self.reserved(now_ns)
        return int(byte_count * 1e9 / (self.total - taken)) if taken else 0

    def free_at_ns(self, now_ns: int) -> int:
        """When the next piece may start."""
        return max(now_ns, self._free_at_ns) if self.reserved(now_ns) else now_ns

    def starts(self, byte_count: int, now_ns: int) -> None:
        """A piece of so many bytes starts."""
        if self._reserves:
            self._free_at_ns = max(self._free_at_ns, now_ns - PACE_BURST_NS) + self.least_ns(byte_count, now_ns)


@cache
def measured_line_ns() -> tuple[float, float, float]:
    """LINE_NS with memory measured, once a process: random rows of a table beyond the nearer caches, by the loop in use."""
    row_bytes, count = 320, 1024
    table = np.ones((COPY_BYTES // row_bytes, row_bytes), dtype=np.uint8)
    out, random, best = np.empty((count, row_bytes), dtype=np.uint8), np.random.default_rng(0), math.inf
    for round_ in range(8):
        rows = random.integers(0, len(table), count)
        begun = time.perf_counter_ns()
        gather_rows(table, rows, out)
        if round_:  # the first one enters the pages of `out`
            best = min(best, time.perf_counter_ns() - begun)
    return (best / (count * _lines(row_bytes)), *LINE_NS[1:])


def measure_copy_bandwidth() -> int:
    """Bytes a second that one thread copies, best of some rounds beyond the caches."""
    source, target = np.ones(COPY_BYTES, dtype=np.uint8), np.empty(COPY_BYTES, dtype=np.uint8)
    best = 0.0
    for _ in range(COPY_ROUNDS):
        begun = time.perf_counter_ns()
        np.copyto(target, source)
        best = max(best, COPY_BYTES * 1e9 / max(1, time.perf_counter_ns() - begun))
    return int(best)


def refusal(verdict: Verdict, what: str, now_ns: int, deadline_ns: int) -> TreadleError:
    """The error that a refused caller gets. what: names the queue; now_ns: when it was submitted"""
    retry_seconds = verdict.retry_after_ns / 1e9 if verdict.retry_after_ns else None
    if verdict.reason == Reason.LATE:
        finish, left = max(0, verdict.predicted_finish_ns - now_ns) / 1e9, (deadline_ns - now_ns) / 1e9
        return DeadlineExceeded(
            f"{what}: refused at once: it would be done in {finish * 1e3:.3f} ms, its deadline is {left * 1e3:.3f} ms ahead; "
            "give it more time, ask for less, or try another owner",
            finish,
        )
    text = {
        Reason.ROOM: "so many tickets are queued as its limit tickets_max allows",
        Reason.HINTS: "so many tickets without a deadline are queued as its limit hints_max allows; give it a deadline, or leave it",
        Reason.QUOTA: "the tenant's quota of rows or bytes a second is used up",
        Reason.SHARE: "the load is more than there is time for, and this tenant has had its share",
    }[Reason(verdict.reason)]
    after = "" if retry_seconds is None else f"; try again in {retry_seconds:.3g} s"
    return ResourceExhausted(f"{what}: {text}{after}", retry_seconds)


def _lines(row_bytes: int) -> int:
    return max(1, -(-row_bytes // LINE_BYTES))


def _class(value: int, classes: int) -> int:
    return min(max(1, value).bit_length() - 1, classes - 1)
