"""A store's Lookup and an engine's mapped lookup: the same states, whatever the dictionary's settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asm_store.domain.lookup import look_up
from asm_store.domain.merging import at_rest
from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    Grouping,
    Prefix,
    RowDtype,
    TensorInfo,
    tensor_name,
)
from treadle.nn.prefix_memory import PrefixMemory

DIGEST = "ab" * 32
MODEL = DictionaryModel(DIGEST, DIGEST, DIGEST, 3, 12, 2, 16)
LAYER = 1


def made(settings: DictionarySettings) -> tuple[Dictionary, dict[str, NDArray[Any]]]:
    """A dictionary of random numbers in one layer."""
    shapes = Dictionary.__new__(Dictionary)
    for part, value in (("model", MODEL), ("layers", (LAYER,)), ("settings", settings)):
        object.__setattr__(shapes, part, value)
    infos = tuple(sorted((name, TensorInfo(dtype, shape, DIGEST)) for name, (dtype, shape) in shapes.tensor_shapes()))
    dictionary = Dictionary("m", MODEL, (LAYER,), Prefix(DIGEST, 9, (9,)), Calibration(DIGEST, 1, 9), settings, infos)
    chance = np.random.default_rng(3)
    books, entries, heads, width = dictionary.codebooks, settings.entries, dictionary.entry_heads, dictionary.key_dim
    keys = chance.standard_normal((books, entries, width), dtype=np.float32)
    states = chance.standard_normal((books, entries, heads, MODEL.head_dim), dtype=np.float32)
    resting, key_scales = at_rest(keys / np.linalg.norm(keys, axis=-1, keepdims=True), settings.dtype)
    resting_states, state_scales = at_rest(states, settings.dtype)
    lists = chance.standard_normal((books, settings.lists, width), dtype=np.float32)
    parts: dict[str, Any] = {
        "keys": resting, "key_scales": key_scales, "states": resting_states, "state_scales": state_scales,
        "log_z": chance.uniform(-5, 20, (books, entries, heads)).astype(np.float32), "counts": np.ones((books, entries), np.int32),
        "cosine_quantiles": np.tile(np.linspace(0, 1, QUANTILES, dtype=np.float32), (books, 1)), "list_keys": lists,
        "list_starts": np.tile(np.linspace(0, entries, settings.lists + 1).astype(np.int32), (books, 1)),
        **matched(settings, chance),
        "whitening": chance.standard_normal((MODEL.heads, MODEL.head_dim, MODEL.head_dim), dtype=np.float32),
    }  # fmt: skip
    expected = dict(infos)
    return dictionary, {tensor_name(LAYER, part): rows for part, rows in parts.items() if tensor_name(LAYER, part) in expected}


def matched(settings: DictionarySettings, chance: np.random.Generator) -> dict[str, NDArray[Any]]:
    if not settings.matched_keys:
        return {}
    shape = (MODEL.kv_heads, settings.matched_keys, MODEL.head_dim)
    dtype = RowDtype.F32 if settings.dtype is RowDtype.F32 else RowDtype.BF16
    keys, values = (at_rest(chance.standard_normal(shape, dtype=np.float32), dtype)[0] for _ in range(2))
    return {"matched_keys": keys, "matched_values": values, "matched_biases": chance.uniform(-3, 3, shape[:2]).astype(np.float32)}


@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize(("joined", "lists", "ridge_ppm"), [(1, 0, 0), (2, 8, 0), (6, 0, 10), (3, 8, 10)])
def test_a_store_finds_what_an_engine_finds(grouping: Grouping, dtype: RowDtype, joined: int, lists: int, ridge_ppm: int) -> None:
    settings = DictionarySettings(heads_joined=joined, grouping=grouping, dtype=dtype, entries=64, lists=lists, ridge_ppm=ridge_ppm)
    dictionary, tensors = made(settings)
    queries = np.random.default_rng(4).standard_normal((9, MODEL.heads, MODEL.head_dim), dtype=np.float32)
    mine = look_up(dictionary, tensors, LAYER, queries, lists_probed=2)
    theirs = PrefixMemory(dictionary, tensors, lists_probed=2).lookup(LAYER, torch.from_numpy(queries), torch.from_numpy(queries))
    assert theirs is not None
    np.testing.assert_array_equal(mine.states, theirs.states.numpy())
    np.testing.assert_array_equal(mine.log_z, theirs.log_z.numpy())
    np.testing.assert_allclose(mine.cosines, theirs.cosines.numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", list(RowDtype))
def test_matched_keys_are_seen_by_the_queries_after_rope(dtype: RowDtype) -> None:
    dictionary, tensors = made(DictionarySettings(dtype=dtype, entries=16, matched_keys=7))
    queries, rotated = np.random.default_rng(4).standard_normal((2, 9, MODEL.heads, MODEL.head_dim), dtype=np.float32)
    mine = look_up(dictionary, tensors, LAYER, queries, rotated, lists_probed=2)
    theirs = PrefixMemory(dictionary, tensors).lookup(LAYER, torch.from_numpy(queries), torch.from_numpy(rotated))
    assert theirs is not None
    np.testing.assert_allclose(mine.states, theirs.states.numpy(), atol=1e-5)
    np.testing.assert_allclose(mine.log_z, theirs.log_z.numpy(), atol=1e-5)
    assert not np.allclose(mine.states, look_up(dictionary, tensors, LAYER, queries, lists_probed=2).states, atol=0.1)
