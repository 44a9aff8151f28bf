"""Batches without repeats: the same rows as with them, each fetched once; and whether that pays is measured."""

import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import dedup, gather_rows, reference

TABLE = np.random.default_rng(0).integers(0, 256, (500, 48), dtype=np.uint8)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(f"treadle.kernels.{request.param}", reason="the extension was not built", exc_type=ImportError)


def test_ids_keep_the_order_of_their_first_appearance(kernels: ModuleType) -> None:
    unique, inverse = kernels.unique_rows(np.array([[7, 3, 7], [-1, 3, 2**62]]))
    assert unique.tolist() == [7, 3, -1, 2**62]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 3]
    assert (unique.dtype, inverse.dtype) == (np.int64, np.int32)


def test_no_ids_are_no_unique_ids(kernels: ModuleType) -> None:
    unique, inverse = kernels.unique_rows(np.zeros((0, 16), dtype=np.int64))
    assert unique.size == inverse.size == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=300), st.sampled_from([1, 2, 7, 1000]), st.integers(0, 3), st.booleans())
def test_native_and_numpy_find_the_same_ids_in_the_same_order(ids: list[int], modulus: int, shift: int, crowded: bool) -> None:
    native = pytest.importorskip("treadle.kernels.native", reason="the extension was not built", exc_type=ImportError)
    rows = np.array(ids, dtype=np.int64)
    rows = (rows % modulus) << (shift * 17) if crowded else rows
    unique, inverse = native.unique_rows(rows)
    expected_unique, expected_inverse = reference.unique_rows(rows)
    assert unique.tolist() == expected_unique.tolist()
    assert inverse.tolist() == expected_inverse.tolist()
    assert unique[inverse].tolist() == rows.tolist()


@pytest.mark.parametrize("count", [2_047, 2_048, 2_049, 100_000])  # around where the table of ids leaves the stack
def test_batches_of_any_size_agree(kernels: ModuleType, count: int) -> None:
    rows = np.random.default_rng(count).integers(0, count // 2, count)
    unique, inverse = kernels.unique_rows(rows)
    assert (unique[inverse] == rows).all()
    assert len(unique) == len(np.unique(rows))


def test_rows_are_spread_to_where_they_were_asked_for(kernels: ModuleType) -> None:
    inverse = np.random.default_rng(1).integers(0, 500, 1_300).astype(np.int32)  # more than one block of the native loop
    out = np.zeros((1_300, 48), dtype=np.uint8)
    kernels.spread(TABLE, inverse, out)
    assert (out == TABLE[inverse]).all()


@pytest.mark.parametrize("inverse", [[500], [-1]])
def test_an_inverse_outside_what_was_fetched_is_refused(kernels: ModuleType, inverse: list[int]) -> None:
    with pytest.raises(InvalidArgument, match=r"^inverse: "):
        kernels.spread(TABLE, np.array(inverse, dtype=np.int32), np.zeros((1, 48), dtype=np.uint8))


def test_ids_of_another_dtype_or_layout_are_refused(kernels: ModuleType) -> None:
    with pytest.raises(InvalidArgument, match=r"^rows: "):
        kernels.unique_rows(np.zeros(3, dtype=np.int32))
    with pytest.raises(InvalidArgument, match=r"^rows: "):
        kernels.unique_rows(np.zeros(6, dtype=np.int64)[::2])


class Tier:
    """A table that counts what is fetched from it, each row for `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.fetched: list[int] = []
        self._seconds = seconds

    def __call__(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        until = time.perf_counter() + self._seconds * len(ids)
        self.fetched += ids.tolist()
        gather_rows(TABLE, ids, out)
        while time.perf_counter() < until:
            pass


@pytest.mark.parametrize("shape", [(40, 16), (0, 16), (640,)])
def test_every_row_is_fetched_once_and_arrives_everywhere(shape: tuple[int, ...]) -> None:
    tier, rows = Tier(), np.random.default_rng(2).integers(0, 60, shape)
    out = np.zeros((*shape, 48), dtype=np.uint8)
    assert dedup.gather_deduplicated(tier, rows, out) == len(set(tier.fetched)) == len(tier.fetched)
    assert (out == TABLE[rows]).all()


def test_a_batch_without_repeats_is_fetched_straight_into_out() -> None:
    tier, rows = Tier(), np.random.default_rng(3).permutation(500)
    out = np.zeros((500, 48), dtype=np.uint8)
    assert dedup.gather_deduplicated(tier, rows, out) == 500
    assert tier.fetched == rows.tolist()
    assert (out == TABLE[rows]).all()


def test_an_out_that_does_not_fit_is_refused_before_anything_is_fetched() -> None:
    tier = Tier()
    for out in (np.zeros((3, 48), dtype=np.uint8), np.zeros((2, 96), dtype=np.uint8)[:, ::2], np.zeros(2, dtype=np.uint8)):
        with pytest.raises(InvalidArgument, match=r"^out: "):
            dedup.gather_deduplicated(tier, np.zeros(2, dtype=np.int64), out)
    assert not tier.fetched


@pytest.mark.parametrize(
    ("dedup_ns", "fetch_ns", "repeats", "pays"),
    [(10, 50, 0.5, True), (10, 50, 0.3, False), (10, 50, 0.0, False), (10, 75_000, 0.2, True), (10, 5, 1.0, False)],
)
def test_it_pays_when_rows_not_fetched_save_more_than_looking_costs(
    dedup_ns: float, fetch_ns: float, repeats: float, pays: bool
) -> None:
    decision = dedup.decide(dedup_nanoseconds=dedup_ns, fetch_nanoseconds=fetch_ns, expected_repeats=repeats)
    assert decision.pays is pays
    assert decision.repeats_to_break_even == dedup_ns / fetch_ns


def test_a_slow_tier_is_measured_as_slow_and_a_fast_one_as_fast() -> None:
    slow = dedup.measure_dedup(Tier(1e-5), row_count=500, row_bytes=48, expected_repeats=0.3)
    fast = dedup.measure_dedup(Tier(), row_count=500, row_bytes=48, expected_repeats=0.0)
    assert slow.pays
    assert slow.fetch_nanoseconds >= 1e4
    assert slow.repeats_to_break_even < 0.3
    assert not fast.pays
    assert fast.fetch_nanoseconds < slow.fetch_nanoseconds


def test_a_measurement_is_bounded_however_slow_the_tier() -> None:
    tier = Tier(1e-3)
    decision = dedup.measure_dedup(tier, row_count=500, row_bytes=48, expected_repeats=0.3, seconds=0.01)
    assert len(tier.fetched) == dedup.PROBE_ROWS
    assert decision.pays


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="expected_repeats"):
        dedup.measure_dedup(Tier(), row_count=500, row_bytes=48, expected_repeats=1.5)
