"""Decode and prefill gathers at 80 % of what one worker can do: earliest deadline first with admission, and plain FIFO beside it.

The same arrivals go to both. What was met is held against an oracle that knows the recorded service times (`oracle`). "Feasible" is
what it takes: greedily, in the order of arrival, so another choice might have room for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from treadle.client.engram.sources import private_copy
from treadle.dataplane import DeadlineQueue
from treadle_bench.report import Goal
from treadle_loadtests import refusals
from treadle_loadtests.arrivals import Alone, Kind, draw
from treadle_loadtests.driving import Driver, Seen, apart, jobs_of
from treadle_loadtests.oracle import Job, edf_finishes, feasible
from treadle_loadtests.report import Report

ROW_BYTES, ROWS_PER_TOKEN = 320, 16
DECODE, PREFILL = 0, 1
KINDS = (
    Kind("decode", 64 * ROWS_PER_TOKEN, (2.0, 4.0, 8.0)),
    Kind("prefill", 2048 * ROWS_PER_TOKEN, (16.0, 32.0)),  # its chunk computes for far longer than its rows take
)
PIECE_ROWS = 512  # about 15 us: what a decode gather may find in its way
FEASIBLE_MET_MIN, PREFILL_KEPT_MIN, ERROR_MAX = 0.999, 0.9, 0.2
REFUSE_SECONDS_MAX, REFUSE_RATIO_MAX = 5e-6, 1.2
MANY_STANDING = 1000  # a decision walks along all that are admitted: what that takes is told, and no goal


@dataclass(frozen=True, slots=True)
class Plan:
    """seconds: of each order; load: part of the worker's time; decode_part: of the load."""

    seconds: float = 25.0
    table_bytes: int = 1 << 30
    load: float = 0.8
    decode_part: float = 0.25
    refusals: int = 2000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """What one order of the queue did with the arrivals."""

    seen: Sequence[Seen]
    jobs: Sequence[Job]

    @property
    def met(self) -> int:
        """Requests done by their deadline."""
        return sum(each.in_time for each in self.seen)

    def met_of(self, kind: int) -> float:
        """Part of a kind's requests that was done by its deadline."""
        own = [each.in_time for each in self.seen if each.arrival.kind == kind]
        return sum(own) / max(1, len(own))

    @property
    def prefill_rows_per_second(self) -> float:
        """Rows of prefill that were gathered, over the time from the first request to the last row."""
        done = [each for each in self.seen if each.arrival.kind == PREFILL and each.finished_ns]
        span_ns = max(each.finished_ns for each in self.seen) - self.seen[0].submitted_ns
        return len(done) * KINDS[PREFILL].rows / (span_ns / 1e9)


def run(plan: Plan) -> Report:
    """Both orders, then the refusals. Raises Unavailable where the native data plane was not built."""
    table = private_copy(np.ones((plan.table_bytes // ROW_BYTES, ROW_BYTES), dtype=np.uint8))
    driver = Driver(table, KINDS, plan.seed)
    report = Report("deadlines", asdict(plan))
    with apart() as part, DeadlineQueue(piece_rows=PIECE_ROWS, piece_seconds=0.01, implementation="native") as queue:
        report.counts["cores_apart"] = int(part())
        if not report.counts["cores_apart"]:
            report.caveat = "one core for sender and queue (cores apart 0): they take turns"
        alone = driver.alone(queue)
    loads = (plan.load * plan.decode_part, plan.load * (1 - plan.decode_part))
    arrivals = draw(KINDS, alone, loads, plan.seconds, plan.seed)
    orders = {}
    for name in ("edf", "fifo"):
        with apart() as part, _queue(name) as queue:
            part()
            driver.alone(queue)  # costs are learnt, caches and clocks are as in the middle of a run
            seen = sorted(driver.drive(queue, arrivals, alone), key=lambda each: each.submitted_ns)
        orders[name] = Order(seen, jobs_of(seen, KINDS, PIECE_ROWS))
    _judge(report, orders["edf"], orders["fifo"], alone)
    _time_refusals(report, driver, plan)
    return report


def _queue(name: str) -> DeadlineQueue:
    if name == "fifo":
        return DeadlineQueue(piece_rows=PIECE_ROWS, piece_seconds=0.01, order="fifo", tickets_max=1 << 16)
    return DeadlineQueue(piece_rows=PIECE_ROWS, piece_seconds=0.01, admission=True, tickets_max=1 << 16)


def _judge(report: Report, edf: Order, fifo: Order, alone: Sequence[Alone]) -> None:
    """Counts, times and goals of the two orders."""
    could = feasible(edf.jobs)
    met = sum(each.in_time and can for each, can in zip(edf.seen, could, strict=True))
    ideal = sum(feasible([Job(job.arrival_ns, job.service_ns, job.deadline_ns, 1) for job in edf.jobs]))
    admitted = [each for each in edf.seen if each.finished_ns]
    late, late_by_load = _late(edf)
    errors = [abs(each.predicted_ns - each.finished_ns) / (each.finished_ns - each.submitted_ns) for each in admitted]
    report.counts |= {
        "requests": len(edf.seen), "feasible": sum(could), "feasible_if_preempted_anywhere": ideal, "edf_met": edf.met,
        "edf_met_of_the_feasible": met, "edf_refused": len(edf.seen) - len(admitted), "edf_admitted_and_late": late,
        "edf_admitted_and_late_by_load": late_by_load, "fifo_met": fifo.met, "fifo_late": len(fifo.seen) - fifo.met,
    }  # fmt: skip
    for number, kind in enumerate(KINDS):
        report.counts[f"permille_met_edf_{kind.name}"] = round(1000 * edf.met_of(number))
        report.counts[f"permille_met_fifo_{kind.name}"] = round(1000 * fifo.met_of(number))
        report.times[f"{kind.name} alone"] = [alone[number].seconds]
        for name, order in (("edf", edf), ("fifo", fifo)):
            report.times[f"{kind.name} {name}"] = [
                (each.finished_ns - each.submitted_ns) / 1e9
                for each in order.seen
                if each.finished_ns and each.arrival.kind == number
            ]
    kept = edf.prefill_rows_per_second / fifo.prefill_rows_per_second
    report.goals += [
        Goal("edf met of the feasible / feasible", met / max(1, sum(could)), FEASIBLE_MET_MIN, at_least=True),
        Goal("prefill rows a second, edf / fifo", kept, PREFILL_KEPT_MIN, at_least=True),
        Goal("error of the predicted finish, p90, part of the time it took", float(np.percentile(errors, 90)), ERROR_MAX),
        Goal("admitted and late because of overload", late_by_load, 0),
    ]


def _late(order: Order) -> tuple[int, int]:
    """Admitted requests that were late, and how many of them had to be: too much was admitted for the usual service times.

    The others met a moment in which the machine did something else: the same requests at the mean service time of their kind
    would all have been in time.
    """
    admitted = [each for each in order.seen if each.finished_ns]
    usual = edf_finishes(jobs_of(admitted, KINDS, PIECE_ROWS, usual=True))
    late = [done > each.deadline_ns for each, done in zip(admitted, usual, strict=True) if not each.in_time]
    return len(late), sum(late)


def _time_refusals(report: Report, driver: Driver, plan: Plan) -> None:
    report.times["refusal in process"] = refusals.in_process(driver, DECODE, times=plan.refusals)
    report.times[f"refusal, {MANY_STANDING:,} queued"] = refusals.in_process(driver, DECODE, MANY_STANDING, times=plan.refusals)
    refused, empty = refusals.end_to_end(times=plan.refusals)
    report.times |= {"refusal by socket": refused, "empty round trip": empty}
    report.goals += [
        Goal(
            "decision to refuse in process, p50, us",
            float(np.median(report.times["refusal in process"])) * 1e6,
            REFUSE_SECONDS_MAX * 1e6,
        ),
        Goal("refusal by socket / empty round trip, p50", float(np.median(refused)) / float(np.median(empty)), REFUSE_RATIO_MAX),
    ]
