"""The oracle of the deadline test against exhaustive search on small cases."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_loadtests.oracle import Job, edf_finishes, feasible

unit_jobs = st.lists(
    st.builds(
        lambda arrival, service, window: Job(arrival, service, arrival + window, 1), st.integers(0, 8), st.integers(1, 3), st.integers(1, 8)
    ),
    min_size=1, max_size=5,
).map(lambda jobs: sorted(jobs, key=lambda job: job.arrival_ns))  # fmt: skip
jobs_of_pieces = st.lists(
    st.builds(
        lambda arrival, service, window, piece: Job(arrival, service, arrival + window, piece),
        st.integers(0, 100), st.integers(1, 30), st.integers(1, 90), st.integers(1, 10),
    ),
    min_size=1, max_size=12,
).map(lambda jobs: sorted(jobs, key=lambda job: job.arrival_ns))  # fmt: skip


def some_schedule_meets_all(jobs: tuple[Job, ...]) -> bool:
    """By trying, at every unit of time, each request that is there, and none."""
    end = max(job.deadline_ns for job in jobs)

    @cache
    def meets(now: int, left: tuple[int, ...]) -> bool:
        if not any(left):
            return True
        if now >= end or any(units and now + units > job.deadline_ns for units, job in zip(left, jobs, strict=True)):
            return False
        ready = [at for at, job in enumerate(jobs) if left[at] and job.arrival_ns <= now]
        return any(meets(now + 1, (*left[:at], left[at] - 1, *left[at + 1 :])) for at in ready) or meets(now + 1, left)

    return meets(0, tuple(job.service_ns for job in jobs))


def meets_all(jobs: list[Job]) -> bool:
    return all(done <= job.deadline_ns for done, job in zip(edf_finishes(jobs), jobs, strict=True))


@settings(max_examples=200, deadline=None)
@given(unit_jobs)
def test_earliest_deadline_first_meets_all_exactly_where_some_schedule_does(jobs: list[Job]) -> None:
    assert meets_all(jobs) == some_schedule_meets_all(tuple(jobs))


@settings(max_examples=200, deadline=None)
@given(unit_jobs)
def test_what_is_taken_can_be_done_and_nobody_is_left_out_who_could_have_come(jobs: list[Job]) -> None:
    taken = feasible(jobs)
    kept: list[Job] = []
    for job, is_taken in zip(jobs, taken, strict=True):
        assert is_taken == some_schedule_meets_all((*kept, job)), "each decision is right for those who had come"
        if is_taken:
            kept.append(job)


@settings(max_examples=300, deadline=None)
@given(jobs_of_pieces)
def test_with_pieces_that_run_to_their_end_all_that_are_taken_are_in_time(jobs: list[Job]) -> None:
    taken = [job for job, is_taken in zip(jobs, feasible(jobs), strict=True) if is_taken]
    assert not taken or meets_all(taken)


@settings(max_examples=200, deadline=None)
@given(jobs_of_pieces)
def test_no_order_loses_time(jobs: list[Job]) -> None:
    last = 0
    for job in jobs:  # first come, first served
        last = max(last, job.arrival_ns) + job.service_ns
    finished = edf_finishes(jobs)
    assert max(finished) == last
    assert all(done >= job.arrival_ns + job.service_ns for done, job in zip(finished, jobs, strict=True))


@settings(max_examples=100, deadline=None)
@given(unit_jobs)
def test_the_oracle_never_takes_more_than_the_best_choice_could(jobs: list[Job]) -> None:
    choices = (chosen for size in range(1, len(jobs) + 1) for chosen in combinations(jobs, size))
    assert sum(feasible(jobs)) <= max((len(chosen) for chosen in choices if some_schedule_meets_all(chosen)), default=0)
