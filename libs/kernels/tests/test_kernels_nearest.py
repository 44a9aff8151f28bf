"""The nearest entry: native against numpy, numpy against a plain search, what is refused, and files that shrink."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import nearest_reference as reference

native = pytest.importorskip("treadle.kernels.native", reason="the extension was not built: make build", exc_type=ImportError)

Search = tuple[
    NDArray[np.float32], NDArray[Any], NDArray[np.float16] | None, NDArray[np.float32] | None, NDArray[np.int32] | None, int
]


@st.composite
def searches(draw: st.DrawFn) -> Search:
    """Small whole numbers, so that every order of summing gives the same products and ties are common."""
    chance = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    books = draw(st.sampled_from([(), (1,), (3,)]))
    count, entries, dim = draw(st.integers(0, 150)), draw(st.integers(1, 70)), draw(st.integers(1, 70))
    largest = draw(st.sampled_from([1, 3, 100]))
    queries = chance.integers(-largest, largest + 1, (*books, count, dim)).astype(np.float32)
    whole = chance.integers(-largest, largest + 1, (*books, entries, dim))
    dtype = draw(st.sampled_from(["f32", "bf16", "int8"]))
    keys: NDArray[Any] = whole.astype(np.int8) if dtype == "int8" else whole.astype(np.float32)
    if dtype == "bf16":
        keys = (keys.view(np.uint32) >> 16).astype(np.uint16)
    scales = np.exp2(chance.integers(-6, 3, (*books, entries))).astype(np.float16) if dtype == "int8" else None
    if draw(st.booleans()):
        return queries, keys, scales, None, None, 16
    lists = draw(st.integers(1, 12))
    list_keys = chance.integers(-largest, largest + 1, (*books, lists, dim)).astype(np.float32)
    inner = np.sort(chance.integers(0, entries + 1, (*books, lists - 1)))  # equal ones: lists without entries
    starts = np.concatenate([np.zeros((*books, 1)), inner, np.full((*books, 1), entries)], axis=-1).astype(np.int32)
    return queries, keys, scales, list_keys, starts, draw(st.integers(1, 14))


@settings(max_examples=300, deadline=None)
@given(search=searches())
def test_native_and_numpy_find_the_same_entries_with_the_same_products(search: Search) -> None:
    index, dot = native.nearest(*search)
    expected_index, expected_dot = reference.nearest(*search)
    assert index.dtype == np.int32
    assert dot.dtype == np.float32
    assert index.shape == dot.shape == search[0].shape[:-1]
    assert np.array_equal(index, expected_index)
    assert np.array_equal(dot, expected_dot)


@settings(max_examples=100, deadline=None)
@given(search=searches())
def test_numpy_finds_what_a_plain_search_finds(search: Search) -> None:
    queries, keys, scales, list_keys, starts, probed = search
    index, dot = reference.nearest(*search)
    if queries.ndim == 2:
        queries, keys, index, dot = queries[None], keys[None], index[None], dot[None]
        scales = None if scales is None else scales[None]
        list_keys, starts = None if list_keys is None else list_keys[None], None if starts is None else starts[None]
    for book in range(len(keys)):
        wide = (keys[book].astype(np.uint32) << 16).view(np.float32) if keys.dtype == np.uint16 else keys[book].astype(np.float64)
        for place, query in enumerate(queries[book]):
            products = wide @ query.astype(np.float64) * (1 if scales is None else scales[book].astype(np.float64))
            allowed = list(range(len(products)))
            if list_keys is not None and starts is not None:
                filled = [number for number in range(len(list_keys[book])) if starts[book, number] < starts[book, number + 1]]
                best_lists = sorted(filled, key=lambda number: -float(list_keys[book, number] @ query))[
                    :probed
                ]  # sorted() is stable
                allowed = sorted(e for number in best_lists for e in range(starts[book, number], starts[book, number + 1]))
            best = max(allowed, key=lambda entry: products[entry])  # max() keeps the first
            assert (index[book, place], dot[book, place]) == (best, products[best])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("dim", [64, 192, 256, 257])
def test_unit_vectors_give_the_products_that_fp32_gives(dtype: str, dim: int) -> None:
    chance = np.random.default_rng(dim)
    queries, wide = (chance.standard_normal((count, dim)).astype(np.float32) for count in (33, 500))
    queries, wide = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, wide))
    keys, scales = as_dtype(wide, dtype)
    index, dot = native.nearest(queries, keys, scales)
    _, expected = reference.nearest(queries, keys, scales)
    assert np.abs(dot - expected).max() < 1e-6
    exact = (queries.astype(np.float64) @ wide.astype(np.float64).T)[np.arange(len(index)), index]
    assert np.abs(dot - exact).max() < {"f32": 1e-6, "bf16": 5e-3, "int8": 2e-2}[dtype]


def as_dtype(wide: NDArray[np.float32], dtype: str) -> tuple[NDArray[Any], NDArray[np.float16] | None]:
    if dtype == "f32":
        return wide, None
    if dtype == "bf16":
        return (wide.view(np.uint32) >> 16).astype(np.uint16), None
    scales = (np.abs(wide).max(axis=-1) / 126).astype(np.float16)
    return np.rint(wide / scales[:, None].astype(np.float32)).astype(np.int8), scales


FORMS = pytest.mark.parametrize("form", [native, reference], ids=["native", "numpy"])


@FORMS
def test_of_equal_entries_the_first_is_found_also_across_lists(form: Any) -> None:
    keys = np.zeros((9, 20), dtype=np.float32)
    keys[[3, 5, 8], 0] = 2.0
    queries = np.zeros((1, 20), dtype=np.float32)
    queries[0, :2] = 1.0
    assert form.nearest(queries, keys)[0].tolist() == [3]
    list_keys, starts = np.zeros((3, 20), dtype=np.float32), np.array([0, 4, 8, 9], dtype=np.int32)
    list_keys[:, 1] = [1, 2, 3]  # the last list scores best, and comes last all the same
    assert form.nearest(queries, keys, None, list_keys, starts, 3)[0].tolist() == [3]
    assert form.nearest(queries, keys, None, list_keys, starts, 2)[0].tolist() == [5]
    assert form.nearest(queries, keys, None, np.zeros_like(list_keys), starts, 1)[0].tolist() == [3]


@FORMS
def test_a_list_without_entries_takes_no_place_among_those_probed(form: Any) -> None:
    queries, keys = np.ones((1, 2), dtype=np.float32), np.array([[1, 1], [2, 2]], dtype=np.float32)
    list_keys = np.array([[9, 9], [1, 1], [2, 2], [9, 9]], dtype=np.float32)
    index, dot = form.nearest(queries, keys, None, list_keys, np.array([0, 0, 1, 2, 2], dtype=np.int32), 1)
    assert (index.tolist(), dot.tolist()) == ([1], [4.0])


@FORMS
def test_a_key_that_is_no_number_is_never_found_and_a_query_that_finds_nothing_is_refused(form: Any) -> None:
    queries, keys = np.ones((2, 5), dtype=np.float32), np.ones((7, 5), dtype=np.float32)
    keys[0, 3], keys[6, 1] = np.nan, -np.inf
    keys[4] = 2
    assert form.nearest(queries, keys)[0].tolist() == [4, 4]
    queries[1, 0] = np.nan
    with pytest.raises(InvalidArgument, match="NaN"):
        form.nearest(queries, keys)


@FORMS
def test_no_queries_find_nothing(form: Any) -> None:
    keys = np.ones((2, 3, 4), dtype=np.float32)
    assert form.nearest(np.ones((2, 0, 4), dtype=np.float32), keys)[0].shape == (2, 0)
    assert form.nearest(np.ones((0, 4), dtype=np.float32), keys[0])[1].shape == (0,)
    assert form.nearest(np.ones((0, 5, 4), dtype=np.float32), np.ones((0, 3, 4), dtype=np.float32))[0].shape == (0, 5)


def f32(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, dtype=np.float32)


STARTS = np.array([0, 1, 3], dtype=np.int32)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "queries of fp64": ((f32(2, 4).astype(np.float64), f32(3, 4)), "queries: float32"),
    "queries of another width": ((f32(2, 5), f32(3, 4)), "queries"),
    "queries that are not contiguous": ((f32(4, 8)[:, ::2], f32(3, 4)), "C-contiguous"),
    "codebooks for keys alone": ((f32(2, 4), f32(2, 3, 4)), "queries, keys"),
    "another number of codebooks": ((f32(1, 2, 4), f32(2, 3, 4)), "queries"),
    "flat keys": ((f32(4), f32(4)), "queries, keys"),
    "queries that are a list": (([[1.0] * 4], f32(3, 4)), "queries: float32"),
    "no keys": ((f32(2, 4), f32(0, 4)), "keys: 1 to"),
    "keys of int16": ((f32(2, 4), np.ones((3, 4), np.int16)), "keys: float32, uint16"),
    "keys that are a list": ((f32(2, 4), [[1.0] * 4]), "keys: float32, uint16"),
    "int8 without scales": ((f32(2, 4), np.ones((3, 4), np.int8)), "key_scales"),
    "fp32 with scales": ((f32(2, 4), f32(3, 4), np.ones(3, np.float16)), "key_scales"),
    "too few scales": ((f32(2, 4), np.ones((3, 4), np.int8), np.ones(2, np.float16)), "key_scales"),
    "scales of fp32": ((f32(2, 4), np.ones((3, 4), np.int8), f32(3)), "key_scales"),
    "list keys without starts": ((f32(2, 4), f32(3, 4), None, f32(2, 4)), "both, or neither"),
    "list keys of another width": ((f32(2, 4), f32(3, 4), None, f32(2, 5), STARTS), "list_keys"),
    "starts of another length": ((f32(2, 4), f32(3, 4), None, f32(3, 4), STARTS), "list_starts"),
    "starts of int64": ((f32(2, 4), f32(3, 4), None, f32(2, 4), STARTS.astype(np.int64)), "list_starts"),
    "starts that end early": ((f32(2, 4), f32(4, 4), None, f32(2, 4), STARTS), "must rise from 0 to the 4 entries"),
    "starts that end late": ((f32(2, 4), f32(2, 4), None, f32(2, 4), STARTS), "must rise from 0 to the 2 entries"),
    "starts that begin late": ((f32(2, 4), f32(3, 4), None, f32(2, 4), np.array([1, 2, 3], np.int32)), "must rise"),
    "starts that fall": ((f32(2, 4), f32(3, 4), None, f32(3, 4), np.array([0, 5, -1, 3], np.int32)), "must rise"),
    "nothing probed": ((f32(2, 4), f32(3, 4), None, f32(2, 4), STARTS, 0), "lists_probed"),
}


@FORMS
@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(form: Any, what: str) -> None:
    arguments, message = REFUSED[what]
    with pytest.raises(InvalidArgument, match=message):
        form.nearest(*arguments)


def test_a_mapped_file_is_read_where_it_lies(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    keys = chance.standard_normal((100, 48)).astype(np.float32)
    keys.tofile(tmp_path / "keys")
    mapped = np.memmap(tmp_path / "keys", np.float32, "r", shape=keys.shape)
    queries = keys[[70, 3]]
    assert native.nearest(queries, mapped)[0].tolist() == reference.nearest(queries, keys)[0].tolist() == [70, 3]
    assert not mapped.flags.writeable


SHRUNK = """
import numpy as np
from pathlib import Path
from treadle.contract import DataLoss
from treadle.kernels import nearest

folder, queries = Path({folder!r}), np.ones((3, 256), dtype=np.float32)
arrays = dict(keys=np.ones((4096, 256), np.int8), key_scales=np.ones(4096, np.float16), list_keys=np.ones((64, 256), np.float32),
              list_starts=np.arange(0, 4097, 64, dtype=np.int32))
for cut in arrays:
    mapped = {{}}
    for name, array in arrays.items():
        path = folder / f"{{cut}}.{{name}}"
        array = np.concatenate([array.reshape(-1), np.zeros(4096, array.dtype)])  # the array ends inside the file
        array.tofile(path)
        mapped[name] = np.memmap(path, array.dtype, "r")[: arrays[name].size].reshape(arrays[name].shape)
    nearest(queries, *mapped.values(), 64)
    (folder / f"{{cut}}.{{cut}}").open("r+b").truncate(0)
    try:
        nearest(queries, *mapped.values(), 64)
    except DataLoss as error:
        print(cut, "lost" if "truncated" in str(error) else error)
"""


def test_a_file_that_shrinks_under_a_lookup_is_data_loss_and_the_process_goes_on(tmp_path: Path) -> None:
    script = SHRUNK.format(folder=str(tmp_path))
    environment = os.environ | {"TREADLE_KERNELS": "native"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout.split("\n") == ["keys lost", "key_scales lost", "list_keys lost", "list_starts lost", ""], done.stderr
