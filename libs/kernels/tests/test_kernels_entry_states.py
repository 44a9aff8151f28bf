"""What tokens find in a layer's dictionary: native against numpy, numpy against a plain loop, what is refused, and files that shrink."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import EntryArrays, as_numbers
from treadle.kernels import entry_states_reference as reference

native = pytest.importorskip(
    "treadle.kernels.entry_states_native", reason="the extension was not built: make build", exc_type=ImportError
)
FORMS = pytest.mark.parametrize("form", [native, reference], ids=["native", "numpy"])
DTYPES = ("f32", "bf16", "int8")


def as_dtype(wide: NDArray[np.float32], dtype: str) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
    if dtype == "f32":
        return wide, None
    if dtype == "bf16":
        return (wide.view(np.uint32) >> 16).astype(np.uint16), None
    scales = (np.abs(wide).max(axis=-1) / 126).astype(np.float16)
    return np.rint(wide / scales[..., None].astype(np.float32)).astype(np.int8), scales


def made(
    dtype: str = "f32", books: int = 2, lookups: int = 3, joined: int = 2, entries: int = 40, dim: int = 8, lists: int = 0,
    whitened: bool = False, seed: int = 0,
) -> EntryArrays:  # fmt: skip
    """A random layer; heads in an order that says whether each goes to its own place."""
    chance = np.random.default_rng(seed)
    heads = books * lookups * joined

    def normal(*shape: int) -> NDArray[np.float32]:
        return chance.standard_normal(shape, dtype=np.float32)

    keys = normal(books, entries, joined * dim)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    (stored, key_scales), (states, state_scales) = as_dtype(keys, dtype), as_dtype(normal(books, entries, joined, dim), dtype)
    starts = np.sort(chance.integers(0, entries + 1, (books, max(lists - 1, 0))))
    ends = np.zeros((books, 1)), np.full((books, 1), entries)
    return EntryArrays(
        stored, states, normal(books, entries, joined) * 8, normal(books) * 0.5,
        chance.permutation(heads).astype(np.int32).reshape(books, lookups, joined), key_scales, state_scales,
        normal(books, lists, joined * dim) if lists else None,
        np.concatenate([ends[0], starts, ends[1]], axis=1).astype(np.int32) if lists else None,
        3, normal(heads, dim, dim) if whitened else None,
    )  # fmt: skip


def asked(entries: EntryArrays, tokens: int, seed: int = 1) -> NDArray[np.float32]:
    """Queries as a part of a wider array, as a forward has them."""
    wide = np.random.default_rng(seed).standard_normal((tokens, entries.heads + 3, entries.head_dim), dtype=np.float32)
    return wide[:, : entries.heads]


def assert_same(left: Any, right: Any, thresholds: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(left.cosines, right.cosines, atol=1e-5)
    same = left.log_z == right.log_z  # log Z tells entries apart
    assert same.size == 0 or same.mean() > 0.99  # the order of summing may let two entries trade places
    np.testing.assert_allclose(left.states[same], right.states[same], rtol=1e-6, atol=1e-6)
    near = np.abs(left.cosines - thresholds[:, None]) < 1e-5
    assert ((left.outside == right.outside) | near).all()


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), books=st.integers(1, 3), lookups=st.integers(1, 4), joined=st.integers(1, 3),
    entries=st.integers(1, 60), dim=st.sampled_from([4, 7, 16, 33, 64]), lists=st.integers(0, 7), whitened=st.booleans(),
    tokens=st.sampled_from([0, 1, 2, 5, 40]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_native_and_numpy_find_the_same_states(
    dtype: str, books: int, lookups: int, joined: int, entries: int, dim: int, lists: int, whitened: bool, tokens: int, seed: int
) -> None:
    layer = made(dtype, books, lookups, joined, entries, dim, min(lists, entries), whitened, seed)
    queries = asked(layer, tokens, seed)
    assert_same(native.EntryStates(layer).find(queries), reference.EntryStates(layer).find(queries), layer.thresholds)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_gets_the_state_of_the_entry_whose_key_is_nearest(form: Any, dtype: str) -> None:
    layer = made(dtype, whitened=True)
    queries = asked(layer, 9)
    found = form.EntryStates(layer).find(queries)
    keys = as_numbers(layer.keys, layer.key_scales)
    states = as_numbers(layer.states, layer.state_scales)
    assert layer.whitening is not None
    for token in range(9):
        for book, lookups in enumerate(layer.heads_of):
            for number, heads in enumerate(lookups):
                key = np.concatenate([layer.whitening[head] @ queries[token, head] for head in heads])
                cosines = keys[book] @ key / np.linalg.norm(key)
                best = int(cosines.argmax())
                assert found.cosines[token, book, number] == pytest.approx(cosines[best], abs=1e-5)
                assert found.outside[token, book, number] == (cosines[best] < layer.thresholds[book])
                np.testing.assert_allclose(found.states[token, heads], states[book, best], rtol=1e-6)
                assert np.array_equal(found.log_z[token, heads], layer.log_z[book, best])


@FORMS
def test_rows_find_what_they_would_find_alone(form: Any) -> None:
    states, queries = form.EntryStates(layer := made("int8")), asked(made(), 50)
    rows = np.array([49, 0, 7, 7, 20], dtype=np.int64)
    every, some = states.find(queries), states.find(queries, rows)
    assert np.array_equal(some.states, every.states[rows])
    assert np.array_equal(some.log_z, every.log_z[rows])
    np.testing.assert_allclose(
        some.cosines, every.cosines[rows], rtol=0, atol=1e-6 if form is reference else 0
    )  # BLAS sums by shape
    assert np.array_equal(some.outside, every.outside[rows])
    assert states.find(queries, rows[:0]).states.shape == (0, layer.heads, layer.head_dim)


@FORMS
def test_a_query_of_zeros_finds_an_entry_and_one_that_holds_nan_is_refused(form: Any) -> None:
    states, queries = form.EntryStates(made()), asked(made(), 40)
    queries[3] = 0
    assert not states.find(queries).cosines[3].any()
    queries[39, 2, 1] = np.nan
    with pytest.raises(InvalidArgument, match="NaN"):
        states.find(queries)


QUERIES_REFUSED: dict[str, tuple[Any, Any, str]] = {
    "fp64": (np.ones((2, 12, 8)), None, "queries: float32"),
    "other heads": (np.ones((2, 11, 8), np.float32), None, "queries: float32"),
    "flat": (np.ones((2, 96), np.float32), None, "queries: float32"),
    "a list": ([[1.0]], None, "queries: float32"),
    "heads apart": (np.ones((2, 24, 8), np.float32)[:, ::2], None, "one after the other"),
    "numbers apart": (np.ones((2, 12, 16), np.float32)[:, :, ::2], None, "one after the other"),
    "backwards": (np.ones((2, 12, 8), np.float32)[::-1], None, "one after the other"),
    "a row beyond": (np.ones((2, 12, 8), np.float32), np.array([0, 2]), "rows: a list of places below 2"),
    "a row before": (np.ones((2, 12, 8), np.float32), np.array([-1]), "rows"),
    "rows of int32": (np.ones((2, 12, 8), np.float32), np.array([0], np.int32), "rows: int64"),
    "rows in a table": (np.ones((2, 12, 8), np.float32), np.array([[0]]), "rows"),
}


@FORMS
@pytest.mark.parametrize("what", QUERIES_REFUSED)
def test_queries_that_do_not_fit_are_refused_by_name(form: Any, what: str) -> None:
    queries, rows, message = QUERIES_REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        form.EntryStates(made()).find(queries, rows)


F16, F32, I32 = np.float16, np.float32, np.int32
ARRAYS_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "keys in a table": ("f32", {"keys": np.ones((40, 16), F32)}, "keys, states"),
    "states of another type": ("f32", {"states": np.ones((2, 40, 2, 8), np.int8)}, "states: float32"),
    "states of fewer entries": ("f32", {"states": np.ones((2, 39, 2, 8), F32)}, "states"),
    "states of other heads": ("f32", {"states": np.ones((2, 40, 3, 8), F32)}, "do not make a key of 16"),
    "log_z of fewer heads": ("f32", {"log_z": np.ones((2, 40, 1), F32)}, "log_z"),
    "log_z of fp16": ("f32", {"log_z": np.ones((2, 40, 2), F16)}, "log_z: float32"),
    "a threshold too few": ("f32", {"thresholds": np.ones(1, F32)}, "thresholds"),
    "a head twice": ("f32", {"heads_of": np.zeros((2, 3, 2), I32)}, "heads_of: every head from 0 to 11 once"),
    "heads of one codebook": ("f32", {"heads_of": np.arange(6, dtype=I32).reshape(1, 3, 2)}, "heads_of"),
    "no heads": ("f32", {"heads_of": np.zeros((2, 0, 2), I32)}, "heads_of"),
    "int8 without state scales": ("int8", {"state_scales": None}, "state_scales"),
    "int8 without key scales": ("int8", {"key_scales": None}, "key_scales"),
    "fp32 with state scales": ("f32", {"state_scales": np.ones((2, 40, 2), F16)}, "state_scales"),
    "state scales of entries": ("int8", {"state_scales": np.ones((2, 40), F16)}, "state_scales"),
    "lists without starts": ("f32", {"list_keys": np.ones((2, 3, 16), F32)}, "both, or neither"),
    "a matrix too few": ("f32", {"whitening": np.ones((11, 8, 8), F32)}, "whitening"),
}


@FORMS
@pytest.mark.parametrize("what", ARRAYS_REFUSED)
def test_arrays_that_do_not_fit_are_refused_by_name(form: Any, what: str) -> None:
    dtype, changes, message = ARRAYS_REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        form.EntryStates(replace(made(dtype), **changes))


@FORMS
def test_starts_that_are_changed_later_move_no_scan_out_of_its_keys(form: Any) -> None:
    layer = made(lists=4)
    states, queries = form.EntryStates(layer), asked(layer, 3)
    before = states.find(queries)
    assert layer.list_starts is not None
    if form is native:
        layer.list_starts[:, 1:] = 1 << 30
        assert np.array_equal(states.find(queries).states, before.states)
    else:
        layer.list_starts[:, 1:] = 1 << 30
        with pytest.raises(InvalidArgument, match="must rise"):
            states.find(queries)


@FORMS
@pytest.mark.parametrize("rows", [None, [4, 0]])
def test_merging_gives_the_softmax_over_both_sets_of_keys_also_where_one_is_empty(form: Any, rows: list[int] | None) -> None:
    chance = np.random.default_rng(3)
    places = list(range(5)) if rows is None else rows
    a, other = (chance.standard_normal((count, 3, 7)).astype(F32) for count in (5, len(places)))
    log_z, other_log_z = (chance.uniform(-1e4, 1e4, (count, 3)).astype(F32) for count in (5, len(places)))
    other_log_z[0] = log_z[places[0]] + np.array([0.0, 0.5, -30], F32)
    log_z[places[1], 0], a[places[1], 0] = -np.inf, 0
    other_log_z[1, 1], other[1, 1] = -np.inf, 0
    log_z[places[1], 2] = other_log_z[1, 2] = -np.inf
    a[places[1], 2], other[1, 2] = 0, 0
    expected, expected_log_z = a.astype(np.float64), log_z.astype(np.float64)
    for number, place in enumerate(places):
        for head in range(3):
            mine, theirs = float(log_z[place, head]), float(other_log_z[number, head])
            if max(mine, theirs) == -np.inf:
                continue
            top = max(mine, theirs)
            weights = np.exp(np.array([mine, theirs]) - top)
            expected[place, head] = (weights[0] * a[place, head] + weights[1] * other[number, head]) / weights.sum()
            expected_log_z[place, head] = top + np.log(weights.sum())
    form.merge_states(a, log_z, None if rows is None else np.array(rows), other, other_log_z)
    np.testing.assert_allclose(a, expected, atol=1e-6)
    np.testing.assert_allclose(log_z, expected_log_z, rtol=1e-6)
    assert np.isneginf(log_z[places[1], 2])


@FORMS
def test_merging_refuses_what_does_not_fit_and_leaves_the_states_alone(form: Any) -> None:
    a, log_z, other, other_log_z = np.ones((3, 2, 4), F32), np.ones((3, 2), F32), np.full((2, 2, 4), 9, F32), np.ones((2, 2), F32)
    rows, frozen = np.array([0, 2]), a.copy()
    frozen.flags.writeable = False
    for arguments, message in (
        ((a, log_z, None, other, other_log_z), "other: float32"),
        ((a, log_z, np.array([0, 3]), other, other_log_z), "rows"),
        ((a, log_z.astype(np.float64), rows, other, other_log_z), "log_z: float32"),
        ((a[0], log_z, rows, other, other_log_z), "a: "),
        ((a, log_z, rows, other, other_log_z[:, :1].copy()), "other_log_z"),
        ((frozen, log_z, rows, other, other_log_z), "a: must be writeable"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            form.merge_states(*arguments)
    assert (a == 1).all()
    assert (log_z == 1).all()


SHRUNK = """
import numpy as np
from dataclasses import replace
from pathlib import Path
from treadle.contract import DataLoss
from treadle.kernels import EntryArrays, EntryStates

folder, queries = Path({folder!r}), np.ones((3, 4, 64), dtype=np.float32)
arrays = dict(keys=np.ones((1, 4096, 256), np.int8), key_scales=np.ones((1, 4096), np.float16), list_keys=np.ones((1, 64, 256), np.float32),
              states=np.ones((1, 4096, 4, 64), np.int8), state_scales=np.ones((1, 4096, 4), np.float16),
              log_z=np.ones((1, 4096, 4), np.float32), whitening=np.ones((4, 64, 64), np.float32))
for cut in arrays:
    mapped = {{}}
    for name, array in arrays.items():
        path = folder / f"{{cut}}.{{name}}"
        flat = np.concatenate([array.reshape(-1), np.zeros(4096, array.dtype)])  # the array ends inside the file
        flat.tofile(path)
        mapped[name] = np.memmap(path, array.dtype, "r")[: array.size].reshape(array.shape)
    states = EntryStates(EntryArrays(thresholds=np.zeros(1, np.float32), heads_of=np.arange(4, dtype=np.int32).reshape(1, 1, 4),
                                     list_starts=np.arange(0, 4097, 64, dtype=np.int32)[None], lists_probed=64, **mapped))
    states.find(queries)
    (folder / f"{{cut}}.{{cut}}").open("r+b").truncate(0)
    try:
        states.find(queries)
    except DataLoss as error:
        print(cut, "lost" if "truncated" in str(error) else error)
"""


def test_a_file_that_shrinks_under_a_lookup_is_data_loss_and_the_process_goes_on(tmp_path: Path) -> None:
    script = SHRUNK.format(folder=str(tmp_path))
    environment = os.environ | {"TREADLE_KERNELS": "native"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment)
    names = ("keys", "key_scales", "list_keys", "states", "state_scales", "log_z", "whitening")
    assert done.stdout.split("\n") == [*(f"{name} lost" for name in names), ""], done.stderr
