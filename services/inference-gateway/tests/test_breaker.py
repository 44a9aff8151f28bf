"""When a worker is left alone, and how it comes back. Time is a number that the test moves."""

from __future__ import annotations

import pytest

from inference_gateway.domain.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(
    failures_max=3, failure_share=0.5, outcomes_min=8, window_seconds=10.0, open_seconds=2.0, open_seconds_max=6.0, outcomes_kept=16
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(LIMITS, clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed(breaker.began())


def test_a_worker_that_fails_in_a_row_gets_no_more_requests(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker, 1)
    assert (breaker.allows(), breaker.state) == (False, BreakerState.OPEN)


def test_a_success_between_failures_begins_the_count_anew(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_a_worker_that_fails_half_of_the_time_gets_no_more_requests(breaker: Breaker) -> None:
    for _ in range(4):
        assert breaker.allows()
        breaker.succeeded()
        fail(breaker, 1)
    assert not breaker.allows()


def test_failures_of_long_ago_do_not_count(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.succeeded()
        fail(breaker, 1)
    clock.now += LIMITS.window_seconds + 1
    breaker.succeeded()
    fail(breaker, 1)
    assert breaker.allows()


def test_after_a_while_one_request_at_a_time_tries_the_worker(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += LIMITS.open_seconds
    assert (breaker.allows(), breaker.state) == (True, BreakerState.HALF_OPEN)
    breaker.began()
    assert not breaker.allows()
    breaker.succeeded()
    assert (breaker.allows(), breaker.state) == (True, BreakerState.CLOSED)
    fail(breaker, 2)
    assert breaker.allows()  # nothing of before counts any more


def test_each_probe_that_fails_doubles_the_rest_up_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for rest in (2.0, 4.0, 6.0, 6.0):
        clock.now += rest - 0.01
        assert not breaker.allows()
        clock.now += 0.01
        assert breaker.allows()
        fail(breaker, 1)


def test_a_probe_that_says_nothing_lets_another_try(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += LIMITS.open_seconds
    breaker.undecided(breaker.began())
    assert breaker.allows()


def test_only_the_probe_decides_while_it_is_out(breaker: Breaker, clock: Clock) -> None:
    before = breaker.began()
    fail(breaker, 3)
    clock.now += LIMITS.open_seconds
    probe = breaker.began()
    beside = breaker.began()  # sent all the same, where there is no other worker
    for other in (before, beside):
        breaker.undecided(other)
        assert not breaker.allows()
        breaker.failed(other)
        assert (breaker.allows(), breaker.state) == (False, BreakerState.HALF_OPEN)
    breaker.undecided(probe)
    assert breaker.allows()


def test_a_probe_of_an_earlier_time_is_none_any_more(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += LIMITS.open_seconds
    earlier = breaker.began()
    breaker.reset()  # another process
    fail(breaker, 3)
    clock.now += LIMITS.open_seconds
    breaker.began()
    breaker.undecided(earlier)
    assert not breaker.allows()


def test_calls_of_before_it_opened_do_not_prolong_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.0
    breaker.failed()
    clock.now += 1.0
    assert breaker.allows()


def test_it_remembers_no_more_outcomes_than_it_may(breaker: Breaker) -> None:
    for _ in range(100):
        breaker.succeeded()
    fail(breaker, 2)
    assert len(breaker._outcomes) == LIMITS.outcomes_kept
