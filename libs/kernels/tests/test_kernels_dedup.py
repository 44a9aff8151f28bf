"""Ids without repeats: the same by both forms, and where each went."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import InvalidArgument
from treadle.kernels import reference

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
