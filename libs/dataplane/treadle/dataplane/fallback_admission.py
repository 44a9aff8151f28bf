"""What the Python queue reckons with: costs, pieces in flight, tenants and reserves; src/admission.hpp in Python.

Guarded by the queue's condition. Owns no ticket and no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treadle.dataplane.admission import (
    COST_WEIGHT,
    LINE_NS,
    NO_DEADLINE,
    PREDICTION_ERROR_PARTS,
    Bandwidth,
    Costs,
    Tier,
    Verdict,
    Work,
    judge,
    measured_line_ns,
)
from treadle.dataplane.tenants import Ledger

PIECE_ROWS_MIN = 64  # smaller pieces cost a slow tier its batches, and time to hand them out
WAKE_NS, OVERHEAD_NS_MAX = 20_000, 500_000  # of a sleeping worker until one was woken; what of it counts
RETRY_NS_MIN = 1_000_000
STRETCH_NS = 100_000_000  # what pieces took beyond their cost is forgotten with this time constant
STRETCH_PRIOR_NS = 1e6  # work at its cost that is always believed in: an idle worker is a whole one again
STRETCH_MAX = 100.0
PROBE_NS = 10_000_000  # between two tickets that an idle queue takes although what it learnt says no


class QueueOptions(NamedTuple):
    """What a queue is made with, in the order of the native one's arguments; see `DeadlineQueue`."""

    workers: int
    tickets_max: int
    piece_rows: int
    piece_ns: int
    fifo: bool
    admits: bool
    hints_max: int


@dataclass(frozen=True, slots=True)
class Size:
    """What a job costs by. units_per_piece: at most."""

    units: int
    units_per_piece: int
    rows_per_unit: int
    row_bytes: int

    @property
    def row_count(self) -> int:
        """Rows in all."""
        return self.units * self.rows_per_unit


class Admission:
    """The state of one queue's admission."""

    def __init__(self, options: QueueOptions, ledger: Ledger) -> None:
        self.ledger, self.admits = ledger, options.admits
        self.costs, self.bandwidth = Costs(measured_line_ns() if options.admits else LINE_NS), Bandwidth()
        self.error_parts, self.error_counts = 0.0, [0] * (len(PREDICTION_ERROR_PARTS) + 1)
        self._workers, self._piece_ns = options.workers, options.piece_ns
        self._in_flight = self._in_flight_ends_ns = self._waking_since_ns = self._end_ns = 0
        self._wake_ns, self._stretched_ns = WAKE_NS, 0
        self._expected_ns, self._took_ns, self._probed_ns = 0.0, 0.0, 0

    def piece_units(self, size: Size) -> int:
        """Units of the next piece: bounded by rows, and by time as it was measured."""
        most = size.units_per_piece
        least = min(most, max(1, PIECE_ROWS_MIN // size.rows_per_unit))
        row_ns = self.costs.row_ns(Tier.MEMORY, size.row_bytes, most * size.rows_per_unit)
        fit = self._piece_ns / max(1e-3, row_ns * size.rows_per_unit)
        return most if fit >= most else max(least, int(fit))

    def reckon(self, size: Size, deadline_ns: int, now_ns: int) -> Work:
        """What a ticket that comes now will take."""
        units = self.piece_units(size)
        pieces = -(-size.units // units)
        whole_ns = self._size_ns(size, units) * (pieces - 1) + self._size_ns(size, size.units - (pieces - 1) * units)
        least_ns = self.bandwidth.least_ns(size.row_count * size.row_bytes, now_ns)
        own_ns = max(int(whole_ns * self._stretch(now_ns)), self._workers * least_ns)
        return Work(deadline_ns, own_ns + self._end_ns, max(1, own_ns // min(self._workers, pieces)))

    def ask(self, size: Size, work: Work, admitted: Sequence[Work], tenant: int, *, idle: bool, now_ns: int) -> Verdict:
        """Whether it may join. idle: a worker must be woken for it."""
        verdict = Verdict()
        if self.admits:
            running_ns = self._running_ns(now_ns) + (self._workers * self._wake_ns if idle else 0)
            verdict = judge(now_ns, running_ns, self._workers, work, admitted)
            if verdict.fault and not (idle and self._probes(size, work.deadline_ns, now_ns)):
                if now_ns + work.span_ns <= work.deadline_ns:
                    self.ledger.overloaded(now_ns)
                return verdict
        work_ns = work.work_ns if self.admits else 0
        byte_count = size.row_count * size.row_bytes
        taken: Verdict = self.ledger.take(tenant, size.row_count, byte_count, work_ns, self._workers, now_ns)
        if idle and not taken.fault:
            self._waking_since_ns = now_ns
        return taken._replace(predicted_finish_ns=verdict.predicted_finish_ns)

    def starts(self, size: Size, work: Work, units: int, now_ns: int, *, wholly: bool) -> tuple[Work, int]:
        """So many units start: (work left to the ticket, when the piece should be done)."""
        expected_ns = int(self._size_ns(size, units) * self._stretch(now_ns))
        ends_ns = now_ns + expected_ns + (self._end_ns if wholly else 0)
        left_ns = max(0, work.work_ns - expected_ns)
        span_ns = work.span_ns * left_ns // work.work_ns if work.work_ns else 0
        self.bandwidth.starts(units * size.rows_per_unit * size.row_bytes, now_ns)
        self._in_flight += 1
        self._in_flight_ends_ns += ends_ns
        if self._waking_since_ns:
            self._wake_ns = _mean(self._wake_ns, min(max(0, now_ns - self._waking_since_ns), OVERHEAD_NS_MAX))
        self._waking_since_ns = 0
        return work._replace(work_ns=left_ns, span_ns=span_ns), ends_ns

    def finishes(self, size: Size, units: int, began_ns: int, ends_ns: int, now_ns: int, *, faulty: bool) -> None:
        """That piece is done."""
        self._in_flight -= 1
        self._in_flight_ends_ns -= ends_ns
        self._learn_stretch(self._size_ns(size, units), now_ns - began_ns, now_ns)
        if not faulty:
            self.costs.learn(Tier.MEMORY, size.row_bytes, units * size.rows_per_unit, now_ns - began_ns)

    def ends(
        self, size: Size, done_units: int, tenant: int, deadline_ns: int, predicted_ns: int, submitted_ns: int, now_ns: int, *, wholly: bool
    ) -> None:  # fmt: skip
        """A ticket is over."""
        rows, timed = done_units * size.rows_per_unit, wholly and deadline_ns != NO_DEADLINE
        slack_ns = deadline_ns - now_ns if timed else NO_DEADLINE
        self.ledger.count_served(tenant, Tier.MEMORY, rows, rows * size.row_bytes, slack_ns)
        if not timed or not predicted_ns:
            return
        part = abs(now_ns - predicted_ns) / max(1, now_ns - submitted_ns)
        self.error_parts += part
        bounds = enumerate(PREDICTION_ERROR_PARTS)
        self.error_counts[next((at for at, bound in bounds if part <= bound), len(PREDICTION_ERROR_PARTS))] += 1

    def ended_in(self, ns: int) -> None:
        """Telling those who wait for a ticket took its worker so long."""
        self._end_ns = _mean(self._end_ns, min(ns, OVERHEAD_NS_MAX))

    def delay_ns(self, work: Work) -> int:
        """By how much work that runs before them delays those behind."""
        return work.work_ns // self._workers

    def retry_after_ns(self, earliest: Work, now_ns: int) -> int:
        """When a place should be free in a queue that is full."""
        return max(RETRY_NS_MIN, (self._running_ns(now_ns) + earliest.work_ns) // self._workers)

    def _size_ns(self, size: Size, units: int) -> float:
        return self.costs.piece_ns(Tier.MEMORY, size.row_bytes, units * size.rows_per_unit)

    def _probes(self, size: Size, deadline_ns: int, now_ns: int) -> bool:
        """A bad moment must not be believed for ever: what it made look dear is refused, and never measured again. An idle queue harms
        nobody by trying what it could do at the costs that it began with."""
        seed_ns = int(self.costs.seed_ns(Tier.MEMORY, size.row_bytes) * size.row_count / self._workers)
        least_ns = max(seed_ns, self.bandwidth.least_ns(size.row_count * size.row_bytes, now_ns))
        if now_ns - self._probed_ns < PROBE_NS or now_ns + WAKE_NS + least_ns > deadline_ns:
            return False
        self._probed_ns = now_ns
        return True

    def _stretch(self, now_ns: int) -> float:
        """Costs leave out the time that a thread was kept from its core; where that happens all the time, it is less of a worker."""
        kept = math.exp(-max(0, now_ns - self._stretched_ns) / STRETCH_NS)
        ratio = (self._took_ns * kept + STRETCH_PRIOR_NS) / (self._expected_ns * kept + STRETCH_PRIOR_NS)
        return min(max(ratio, 1.0), STRETCH_MAX)

    def _learn_stretch(self, expected_ns: float, took_ns: int, now_ns: int) -> None:
        kept = math.exp(-max(0, now_ns - self._stretched_ns) / STRETCH_NS)
        self._stretched_ns = now_ns
        self._expected_ns = self._expected_ns * kept + expected_ns
        self._took_ns = self._took_ns * kept + took_ns

    def _running_ns(self, now_ns: int) -> int:
        waking_ns = max(0, self._waking_since_ns + self._wake_ns - now_ns) if self._waking_since_ns else 0
        return max(0, self._in_flight_ends_ns - self._in_flight * now_ns) + self._workers * waking_ns


def _mean(was: int, now: int) -> int:
    return was + math.floor((now - was) * COST_WEIGHT + 0.5)
