"""Attention of single tokens over their sequences: native against numpy, numpy against a plain softmax, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import decode_reference as reference

native = pytest.importorskip(
    "treadle.kernels.decode_native", reason="the extension was not built: make build", exc_type=ImportError
)
FORMS = pytest.mark.parametrize("form", [native, reference], ids=["native", "numpy"])
F32, LAYERS = np.float32, 3
Floats = NDArray[np.float32]


class Step:
    """Sequences of given lengths, and one more token for each, in rows of a step that others share."""

    def __init__(
        self, lengths: list[int], heads: int = 6, kv_heads: int = 2, dim: int = 16, size: float = 1.0, seed: int = 0
    ) -> None:
        chance = np.random.default_rng(seed)
        self.heads, tokens = heads, len(lengths) + 2
        self.lengths = np.array(lengths, dtype=np.int64)
        self.rows = chance.permutation(tokens)[: len(lengths)].astype(np.int64)
        self.caches = [
            chance.standard_normal((LAYERS, 2, kv_heads, length + int(chance.integers(1, 9)), dim), dtype=F32) for length in lengths
        ]
        self.queries = size * chance.standard_normal((tokens, heads + kv_heads, dim), dtype=F32)[:, :heads]  # of a wider array
        self.key_values = chance.standard_normal((tokens, 2, kv_heads, dim), dtype=F32)

    def run(self, form: Any, layer: int = 1) -> tuple[Floats, Floats, list[Floats]]:
        """a, log_z (9 where nothing was written) and the caches afterwards."""
        caches = [cache.copy() for cache in self.caches]
        a, log_z = np.full(self.queries.shape, 9, F32), np.full(self.queries.shape[:2], 9, F32)
        form.DecodeStep(caches, self.lengths, self.rows, self.heads).attend(layer, self.queries, self.key_values, a, log_z)
        return a, log_z, caches


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 14, 15, 16, 17, 63, 200]), min_size=1, max_size=4), kv_heads=st.integers(1, 3),
    groups=st.integers(1, 9), dim=st.sampled_from([1, 3, 8, 16, 33, 64, 100, 128]), size=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_native_and_numpy_give_the_same_states(
    lengths: list[int], kv_heads: int, groups: int, dim: int, size: float, seed: int
) -> None:
    step = Step(lengths, kv_heads * groups, kv_heads, dim, size, seed)
    (a, log_z, caches), (expected, expected_log_z, expected_caches) = step.run(native), step.run(reference)
    np.testing.assert_allclose(a, expected, atol=2e-6 * max(1.0, size), rtol=1e-5)
    np.testing.assert_allclose(log_z, expected_log_z, atol=1e-5, rtol=1e-6)
    for mine, theirs in zip(caches, expected_caches, strict=True):
        assert np.array_equal(mine, theirs)


@FORMS
def test_a_token_attends_to_all_of_its_sequence_and_itself_and_its_keys_are_appended_in_that_layer(form: Any) -> None:
    step = Step([5, 40, 0])
    a, log_z, caches = step.run(form, layer=2)
    untouched = [row for row in range(5) if row not in step.rows]
    assert (a[untouched] == 9).all()
    assert (log_z[untouched] == 9).all()
    for before, after, length, row in zip(step.caches, caches, step.lengths, step.rows, strict=True):
        expected = before.copy()
        expected[2, :, :, length] = step.key_values[row]
        assert np.array_equal(after, expected)
        for head in range(6):
            keys, values = after[2, :, head // 3, : length + 1].astype(np.float64)
            scores = keys @ step.queries[row, head] / 4
            weights = np.exp(scores - scores.max())
            np.testing.assert_allclose(a[row, head], weights @ values / weights.sum(), atol=1e-6)
            assert log_z[row, head] == pytest.approx(scores.max() + np.log(weights.sum()), abs=1e-5)


@FORMS
def test_a_query_that_holds_nan_spoils_its_own_row_alone(form: Any) -> None:
    step = Step([7, 20])
    clean, _, _ = step.run(form)
    step.queries[step.rows[0], 1, 3] = np.nan
    a, log_z, _ = step.run(form)
    assert np.isnan(a[step.rows[0], 1]).all()
    assert np.isnan(log_z[step.rows[0], 1])
    assert np.array_equal(a[step.rows[1]], clean[step.rows[1]])
    assert np.array_equal(a[step.rows[0], 2:], clean[step.rows[0], 2:])


@FORMS
def test_scores_far_apart_overflow_nothing(form: Any) -> None:
    step = Step([30], size=3e4)
    a, log_z, _ = step.run(form)
    row = step.rows[0]
    assert np.isfinite(a[row]).all()
    assert np.isfinite(log_z[row]).all()
    assert np.abs(log_z[row]).max() > 1e4


MADE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no sequence": ({"caches": [], "lengths": np.zeros(0, np.int64), "rows": np.zeros(0, np.int64)}, "caches: of at least one"),
    "lengths of int32": ({"lengths": np.zeros(2, np.int32)}, "lengths: int64"),
    "a length too few": ({"lengths": np.zeros(1, np.int64)}, "lengths"),
    "a full cache": ({"lengths": np.array([0, 5])}, "do not fit a capacity of 5"),
    "a length below none": ({"lengths": np.array([0, -1])}, "lengths"),
    "a row below none": ({"rows": np.array([0, -1])}, "rows: 0 or more"),
    "rows of another number": ({"rows": np.array([0])}, "rows"),
    "caches of fp64": ({"caches": [np.zeros((3, 2, 2, 5, 4))] * 2}, "caches: float32"),
    "caches without values": ({"caches": [np.zeros((3, 1, 2, 5, 4), F32)] * 2}, "caches"),
    "caches of other heads": ({"caches": [np.zeros((3, 2, 2, 5, 4), F32), np.zeros((3, 2, 1, 5, 4), F32)]}, "caches"),
    "a cache in parts": ({"caches": [np.zeros((3, 2, 2, 9, 4), F32)[:, :, :, :5]] * 2}, "caches: must be C-contiguous"),
    "heads that do not share": ({"heads": 5}, "heads: a multiple of the 2"),
    "no heads": ({"heads": 0}, "heads"),
}


@FORMS
@pytest.mark.parametrize("what", MADE_REFUSED)
def test_sequences_that_do_not_fit_are_refused_by_name(form: Any, what: str) -> None:
    changes, message = MADE_REFUSED[what]
    caches = [np.zeros((3, 2, 2, 5, 4), F32), np.zeros((3, 2, 2, 5, 4), F32)]
    fits: dict[str, Any] = {"caches": caches, "lengths": np.array([0, 4]), "rows": np.array([1, 0]), "heads": 4}
    form.DecodeStep(**fits)
    with pytest.raises(InvalidArgument, match=message):
        form.DecodeStep(**(fits | changes))


ATTEND_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer beyond": ({"layer": 3}, "layer: 0 to 2"),
    "a layer below": ({"layer": -1}, "layer"),
    "fewer tokens than rows": ({"queries": np.zeros((1, 4, 4), F32)}, "rows reach 1"),
    "other heads": ({"queries": np.zeros((2, 3, 4), F32)}, "queries"),
    "keys without values": ({"key_values": np.zeros((2, 1, 2, 4), F32)}, "key_values"),
    "keys of fp16": ({"key_values": np.zeros((2, 2, 2, 4), np.float16)}, "key_values: float32"),
    "a of other tokens": ({"a": np.zeros((3, 4, 4), F32)}, "a: float32"),
    "log_z of fp64": ({"log_z": np.zeros((2, 4))}, "log_z: float32"),
}


@FORMS
@pytest.mark.parametrize("what", ATTEND_REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name_and_nothing_is_written(form: Any, what: str) -> None:
    changes, message = ATTEND_REFUSED[what]
    cache = np.zeros((3, 2, 2, 5, 4), F32)
    step = form.DecodeStep([cache], np.array([2]), np.array([1]), 4)
    fits: dict[str, Any] = {
        "layer": 0, "queries": np.ones((2, 4, 4), F32), "key_values": np.ones((2, 2, 2, 4), F32), "a": np.zeros((2, 4, 4), F32),
        "log_z": np.zeros((2, 4), F32),
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=message):
        step.attend(**(fits | changes))
    assert not cache.any()
    step.attend(**fits)
    assert cache[0, :, :, 2].all()


@FORMS
@pytest.mark.parametrize("rows", [None, [3, 0, 3]])
def test_tokens_attend_to_the_same_few_keys_with_their_biases(form: Any, rows: list[int] | None) -> None:
    chance = np.random.default_rng(2)
    queries = chance.standard_normal((4, 9, 16), dtype=F32)[:, :6]
    keys, values = chance.standard_normal((2, 3, 21, 16), dtype=F32)
    biases = chance.standard_normal((3, 21), dtype=F32) * 3
    biases[0, 4], biases[2] = -np.inf, -np.inf
    a, log_z = form.attend_keys(queries, None if rows is None else np.array(rows), keys, values, biases)
    assert len(a) == len(log_z) == (4 if rows is None else 3)
    for place, token in enumerate(rows or range(4)):
        for head in range(6):
            scores = (keys[head // 2] @ queries[token, head] / 4 + biases[head // 2]).astype(np.float64)
            if head // 2 == 2:
                assert not a[place, head].any()
                assert np.isneginf(log_z[place, head])
                continue
            weights = np.exp(scores - scores.max())
            np.testing.assert_allclose(a[place, head], weights @ values[head // 2] / weights.sum(), atol=1e-6)
            assert log_z[place, head] == pytest.approx(scores.max() + np.log(weights.sum()), abs=1e-5)


KEYS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys of fp16": ({"keys": np.zeros((2, 5, 4), np.float16)}, "keys: float32"),
    "no keys": ({"keys": np.zeros((2, 0, 4), F32)}, "keys"),
    "fewer values": ({"values": np.zeros((2, 4, 4), F32)}, "values"),
    "a bias too few": ({"biases": np.zeros((2, 4), F32)}, "biases"),
    "heads that do not share": ({"queries": np.zeros((3, 5, 4), F32)}, "a multiple of 2 heads"),
    "narrower queries": ({"queries": np.zeros((3, 6, 3), F32)}, "queries: float32"),
    "flat queries": ({"queries": np.zeros((3, 24), F32)}, "queries"),
    "a row beyond": ({"rows": np.array([3])}, "rows"),
}


@FORMS
@pytest.mark.parametrize("what", KEYS_REFUSED)
def test_keys_that_do_not_fit_are_refused_by_name(form: Any, what: str) -> None:
    changes, message = KEYS_REFUSED[what]
    fits: dict[str, Any] = {
        "queries": np.zeros((3, 6, 4), F32), "rows": None, "keys": np.zeros((2, 5, 4), F32), "values": np.zeros((2, 5, 4), F32),
        "biases": np.zeros((2, 5), F32),
    }  # fmt: skip
    assert form.attend_keys(**fits)[0].shape == (3, 6, 4)
    with pytest.raises(InvalidArgument, match=message):
        form.attend_keys(**(fits | changes))
