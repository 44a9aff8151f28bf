import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, WaitPolicy, Windows

I64, I32 = np.int64, np.int32


def tokens(*ids: int) -> NDArray[np.int64]:
    return np.array(ids, dtype=I64)


def starts(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=I32)


def none_before(requests: int, depth: int = 2) -> NDArray[np.int64]:
    return np.full((requests, depth), -1, dtype=I64)


def test_whole_sequences_become_flat_tokens_with_the_nearest_token_first() -> None:
    windows = Windows.of_sequences([([5, 6, 7, 8], 3), ([1, 2], 0), ([9, 4], 1)], depth=3)
    assert windows.tokens.tolist() == [8, 1, 2, 4]
    assert windows.starts.tolist() == [0, 1, 3, 4]
    assert windows.lookback.tolist() == [[7, 6, 5], [-1, -1, -1], [9, -1, -1]]
    assert windows.token_count == 4


def test_no_requests_are_an_empty_step() -> None:
    assert Windows.of_sequences([], depth=2).token_count == 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokens", {"tokens": tokens(1, -2)}),
        ("tokens", {"tokens": tokens(1, 2).astype(I32)}),
        ("tokens", {"tokens": [1, 2]}),
        ("tokens", {"tokens": np.zeros((1, 2), dtype=I64)}),
        ("tokens", {"tokens": tokens(1, 9, 2, 9)[::2]}),
        ("starts", {"starts": starts(0, 1)}),
        ("starts", {"starts": starts(1, 2)}),
        ("starts", {"starts": starts(0, 3, 2)}),
        ("starts", {"starts": starts(0, 2**31 - 1, -(2**31), -3, 2), "lookback": none_before(4)}),  # differences that wrap in int32
        ("starts", {"starts": starts()}),
        ("lookback", {"lookback": none_before(2)}),
        ("lookback", {"lookback": none_before(1, 16)}),
        ("lookback", {"lookback": none_before(1) - 1}),
        ("dead", {"dead": np.zeros(3, dtype=np.bool_)}),
        ("dead", {"dead": np.zeros(2, dtype=np.uint8)}),
        ("lookback_dead", {"lookback_dead": np.zeros((1, 3), dtype=np.bool_)}),
    ],
)
def test_a_wrong_array_is_refused_by_name(name: str, fields: dict[str, object]) -> None:
    good: dict[str, object] = {"tokens": tokens(1, 2), "starts": starts(0, 2), "lookback": none_before(1)}
    Windows(**good)  # type: ignore[arg-type]  # the good one passes
    with pytest.raises(InvalidArgument, match=f"^{name}"):
        Windows(**(good | fields))  # type: ignore[arg-type]  # on purpose


def test_a_deadline_is_absolute_inside_and_relative_outside() -> None:
    deadline = Deadline.after(1.5, now_ns=1_000_000_000)
    assert deadline.at_ns == 2_500_000_000
    assert deadline.remaining_seconds(now_ns=2_000_000_000) == 0.5
    assert deadline.remaining_seconds(now_ns=3_000_000_000) == 0.0
    assert deadline.slack_of(2_600_000_000) == -0.1
    deadline.check(before="fetch", now_ns=2_499_999_999)
    with pytest.raises(DeadlineExceeded, match="fetch"):
        deadline.check(before="fetch", now_ns=2_500_000_000)
    assert Deadline.after(1, now_ns=0) < deadline


@settings(deadline=None)
@given(st.floats(min_value=0, max_value=1e6), st.integers(min_value=0, max_value=10**15))
def test_what_is_sent_is_what_is_left(seconds: float, now_ns: int) -> None:
    assert abs(Deadline.after(seconds, now_ns=now_ns).remaining_seconds(now_ns=now_ns) - seconds) < 1e-6


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e12])
def test_a_deadline_without_end_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        Deadline.after(seconds)


def test_nobody_may_wait_for_ever() -> None:
    WaitPolicy(wait_seconds_max=30)
    for seconds in (31, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument):
            WaitPolicy(wait_seconds_max=seconds)
