"""Entries in lists: what a list holds, that nothing is lost, and that two levels find what one level finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import entry_lists, nearest

Keys = NDArray[np.float32]


def clustered(clusters: int, each: int, dim: int, seed: int = 0) -> Keys:
    chance = np.random.default_rng(seed)
    centres = chance.standard_normal((clusters, dim))
    keys = np.repeat(centres, each, axis=0) + 0.3 * chance.standard_normal((clusters * each, dim))
    unit: Keys = (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)
    return unit[chance.permutation(len(unit))]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 80), dim=st.integers(1, 12), share=st.floats(0, 1), iterations=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_every_entry_is_in_one_list_the_one_whose_key_is_nearest(
    count: int, dim: int, share: float, iterations: int, seed: int
) -> None:
    keys = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    lists = max(1, round(share * count))
    order, list_keys, starts = entry_lists(keys, lists, seed, iterations)
    assert sorted(order.tolist()) == list(range(count))
    assert (starts[0], starts[-1], starts.size) == (0, count, lists + 1)
    assert [each.dtype.name for each in (order, list_keys, starts)] == ["int32", "float32", "int32"]
    assert np.allclose(np.linalg.norm(list_keys, axis=1), 1, atol=1e-5)
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    for number in range(lists):
        mine = order[starts[number] : starts[number + 1]]
        assert (np.diff(mine) > 0).all(), "a list keeps the order of its entries"
        products = unit[mine] @ list_keys.T
        assert (products[:, number] >= products.max(axis=1) - 1e-6).all()


def test_the_same_seed_gives_the_same_lists() -> None:
    keys = clustered(8, 20, 16)
    first, second, other = (entry_lists(keys, 12, seed, 4) for seed in (3, 3, 4))
    assert all(np.array_equal(one, two) for one, two in zip(first, second, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_a_list_that_nobody_is_nearest_to_is_begun_again_where_keys_fit_worst() -> None:
    keys = np.repeat(
        np.eye(4, dtype=np.float32), [50, 1, 1, 1], axis=0
    )  # most seeds fall on equal keys: all but one of those lists are empty
    starts = entry_lists(keys, 4, 0, 6)[2]
    assert sorted(np.diff(starts).tolist()) == [1, 1, 1, 50]


def test_entries_that_were_never_filled_are_zeros_and_find_a_place() -> None:
    keys = np.concatenate([clustered(3, 10, 8), np.zeros((5, 8), np.float32)])
    order, list_keys, starts = entry_lists(keys, 5, 0, 4)
    assert sorted(order.tolist()) == list(range(35))
    assert starts[-1] == 35
    assert np.isfinite(list_keys).all()


def test_two_levels_find_nearly_always_what_a_full_scan_finds() -> None:
    keys = clustered(40, 25, 32)
    queries = keys[::7] + 0.05 * np.random.default_rng(1).standard_normal((143, 32)).astype(np.float32)
    order, list_keys, starts = entry_lists(keys, 32, 0, 6)
    whole = nearest(queries, keys)[0]
    found = order[nearest(queries, np.ascontiguousarray(keys[order]), None, list_keys, starts, 4)[0]]
    assert np.mean(found == whole) > 0.97
    everything = order[nearest(queries, np.ascontiguousarray(keys[order]), None, list_keys, starts, 32)[0]]
    assert np.array_equal(everything, whole)


@pytest.mark.parametrize(
    ("keys", "lists", "iterations"),
    [
        (np.ones((3, 4), np.float64), 1, 1), (np.ones((3, 4), np.float32), 4, 1), (np.ones((3, 4), np.float32), 0, 1),
        (np.ones((0, 4), np.float32), 1, 1), (np.ones((3, 4), np.float32), 1, -1), (np.full((3, 4), np.nan, np.float32), 1, 1),
    ],
)  # fmt: skip
def test_keys_and_numbers_that_make_no_lists_are_refused(keys: Keys, lists: int, iterations: int) -> None:
    with pytest.raises(InvalidArgument):
        entry_lists(keys, lists, 0, iterations)
