"""`treadle bench asm latency`: what stands inside the clock computes what it says, and a goal says what was measured."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.contract.errors import NotFound
from treadle.nn import model_fetch
from treadle.nn.attention import attention
from treadle.nn.model import CausalLM
from treadle_bench.asm import latency, latency_recall
from treadle_bench.asm.latency_layer import HEAD_DIM, HEADS, KV_HEADS, Layer, asked_keys
from treadle_bench.asm.latency_lookups import attentions, lookups, rivals


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(100)


def test_all_forms_of_exact_attention_are_the_same_attention(layer: Layer) -> None:
    query = layer.queries(1)[0]
    chance_before = np.random.default_rng(5)
    layer._chance = chance_before
    forms = attentions(layer)
    layer._chance = np.random.default_rng(5)
    keys, values = (torch.from_numpy(each).transpose(0, 1) for each in layer.prefix())
    expected = attention(torch.from_numpy(query).unsqueeze(0), keys, values).reshape(-1)
    for name, attend in forms.items():
        found: Any = attend(query)
        assert torch.allclose(found.reshape(-1), expected, atol=1e-5), name


def test_every_lookup_merges_the_states_of_the_entries_it_finds(layer: Layer) -> None:
    query = layer.queries(1)[0]
    books, places = np.arange(KV_HEADS)[:, None], asked_keys(query)
    nearest = np.einsum("bld,bkd->blk", places, layer.keys).argmax(-1)
    states = torch.from_numpy(layer.states[books, nearest]).reshape(HEADS, HEAD_DIM)
    weight = torch.from_numpy(layer.log_z[books, nearest]).reshape(HEADS, 1).sigmoid()  # against an own state of zeros with log Z 0
    for name, (attend, find) in lookups(layer, probed=10).items():
        assert np.array_equal(find(places), nearest), name
        found: Any = attend(query)
        assert torch.allclose(
            torch.as_tensor(found[0]).view(HEADS, HEAD_DIM), states * weight, atol=2e-2 if "fp32" not in name else 1e-5
        ), name


def test_queries_do_not_repeat(layer: Layer) -> None:
    queries = layer.queries(500).reshape(500, -1)
    assert len(np.unique(queries, axis=0)) == 500


def test_a_library_that_is_not_there_is_named_with_how_to_get_it(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    found, notes = rivals(layer, 16)
    assert found == {}
    assert [note.partition(":")[0] for note in notes] == ["not measured", "not measured"]
    assert "pip install hnswlib" in notes[0]
    assert "pip install faiss-cpu" in notes[1]


@pytest.mark.parametrize(
    ("speedups", "crossover"),
    [
        ({1024: 1.1, 2048: 2.0}, 1024),
        ({1024: 0.9, 2048: 2.0}, 2048),
        ({1024: 2.0, 2048: 0.9, 4096: 3.0}, 4096),
        ({1024: 0.9}, math.inf),
    ],
)
def test_the_crossover_is_where_no_longer_prefix_is_slower(speedups: dict[int, float], crossover: float) -> None:
    assert latency._goals(speedups)[0].value == crossover


def test_a_quick_measurement_has_all_ways_and_their_baseline_is_an_exact_one() -> None:
    rows, missing = latency._measure_tokens(Layer(64), rounds=2)
    names = {row.name for row in rows}
    exact = {"SDPA", "SDPA, heads folded", "two bmm", "DecodeStep"}
    assert exact | {"linear, fp32", "two levels, fp32", "two levels, int8"} <= names
    assert len(names) + len(missing) == 11
    assert {row.baseline for row in rows if row.baseline is not None} < exact
    assert all("recall" in row.params for row in rows if "level" in row.name)


def test_without_texts_the_recall_is_said_not_to_be_measured(tmp_path: Path) -> None:
    rows, goals, notes = latency_recall.measure_recall(quick=True, data=None, model_dir=None)
    assert (rows, goals) == ([], [])
    assert "--data" in notes[0]
    with pytest.raises(NotFound, match="clinc150"):
        latency_recall.measure_recall(quick=True, data=tmp_path, model_dir=None)


@pytest.mark.slow
def test_queries_of_a_model_are_those_before_rotation_and_two_levels_find_most_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CausalLM.load(model_fetch.fetch("smollm2-135m"))
    config, weights = model.config, model.weights.layers[0]
    first = latency_recall.layer_queries(model, [[5, 6, 7], [8, 9]])[0]
    hidden = model.weights.embedding[torch.tensor([5, 6, 7, 8, 9])]
    normed = torch.nn.functional.rms_norm(hidden, (config.hidden,), weights.input_norm, config.norm_eps)
    heads = weights.qkv(normed)[:, : config.heads * config.head_dim].view(5, config.heads, config.head_dim)
    key = torch.cat([heads[3, head] for head in (1, 4, 7)])  # the second query head of each of three groups, of the fourth token
    assert np.allclose(first[3 * 3 + 1], (key / key.norm()).numpy(), atol=1e-5)

    texts = [[f"what is the {word} of number {number}", "label"] for number in range(40) for word in ("price", "colour", "age")]
    for name in ("train.json", "val.json"):
        (tmp_path / name).write_text(json.dumps(texts))
    monkeypatch.setattr(latency_recall, "ENTRIES", 128)
    rows, goals, notes = latency_recall.measure_recall(quick=True, data=tmp_path, model_dir=None)
    assert notes == []
    assert goals[0].value > 0.9
    assert {row.name for row in rows} == {"recall@1, linear, int8", "recall@1, two levels"}
