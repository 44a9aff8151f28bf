"""What one worker could have done, computed afterwards from recorded arrivals, service times and deadlines. Pure.

A machine without overheads that takes the next piece of the request with the earliest deadline, as the queue does; a piece that
has begun runs to its end. For one that is preempted at any moment, give every request pieces of one nanosecond.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One request. All in nanoseconds; `piece_ns`: of its longest piece, at least 1."""

    arrival_ns: int
    service_ns: int
    deadline_ns: int
    piece_ns: int


def edf_finishes(jobs: Sequence[Job]) -> list[int]:
    """When each would be done, earliest deadline first, nobody refused. jobs: by arrival."""
    left, finished = [job.service_ns for job in jobs], [0] * len(jobs)
    waiting: list[tuple[int, int]] = []
    now_ns, coming = 0, 0
    while waiting or coming < len(jobs):
        if not waiting:
            now_ns = max(now_ns, jobs[coming].arrival_ns)
        while coming < len(jobs) and jobs[coming].arrival_ns <= now_ns:
            heapq.heappush(waiting, (jobs[coming].deadline_ns, coming))
            coming += 1
        at = waiting[0][1]
        until_ns = jobs[coming].arrival_ns if coming < len(jobs) else now_ns + left[at]
        ran_ns = _run(jobs[at], left[at], until_ns - now_ns)
        now_ns += ran_ns
        left[at] -= ran_ns
        if left[at] == 0:
            heapq.heappop(waiting)
            finished[at] = now_ns
    return finished


def feasible(jobs: Sequence[Job]) -> list[bool]:
    """Which requests are taken by whoever knows all service times beforehand: each one, in the order of arrival, that can be done
    in time without making one late that was taken before. Earliest deadline first then meets all of them. jobs: by arrival."""
    taken = [False] * len(jobs)
    waiting: list[tuple[int, int]] = []  # (deadline, job), rising
    left: dict[int, int] = {}
    now_ns = 0
    for index, job in enumerate(jobs):
        now_ns = _advance(jobs, waiting, left, now_ns, job.arrival_ns)
        insort(waiting, (job.deadline_ns, index))
        left[index] = job.service_ns
        done_ns, fits = now_ns, True
        for deadline_ns, other in waiting:
            done_ns += left[other]
            if done_ns > deadline_ns:
                fits = False
                break
        taken[index] = fits
        if not fits:
            waiting.remove((job.deadline_ns, index))
            del left[index]
    return taken


def _advance(jobs: Sequence[Job], waiting: list[tuple[int, int]], left: dict[int, int], now_ns: int, until_ns: int) -> int:
    """Run what waits until the next request comes; the moment at which a piece ends then, or `until_ns`."""
    while waiting and now_ns < until_ns:
        at = waiting[0][1]
        ran_ns = _run(jobs[at], left[at], until_ns - now_ns)
        now_ns += ran_ns
        left[at] -= ran_ns
        if left[at] == 0:
            waiting.pop(0)
            del left[at]
    return max(now_ns, until_ns)


def _run(job: Job, left_ns: int, span_ns: int) -> int:
    """How long a request runs that is not overtaken within `span_ns`: whole pieces, the last of which may reach beyond."""
    pieces = max(1, -(-span_ns // job.piece_ns))
    return min(left_ns, pieces * job.piece_ns)
