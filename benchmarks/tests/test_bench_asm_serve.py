"""`treadle bench asm serve`: all ways answer the same questions, a round measures what it says, and goals are held against figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from treadle.chassis import threads
from treadle.contract.dictionary import Calibration, Dictionary, DictionaryModel, DictionarySettings, Prefix, RowDtype, tensor_name
from treadle.contract.dictionary_file import tensor_info
from treadle.contract.errors import InvalidArgument
from treadle.nn import model_fetch
from treadle.nn.model import CausalLM
from treadle_bench.asm import serve
from treadle_bench.asm.commands import app
from treadle_bench.report import Goal, Row

PREFIX, ENTRIES, DIGEST = 24, 16, "0" * 64


@pytest.fixture(scope="module")
def model() -> CausalLM:
    torch.set_num_threads(1)
    return CausalLM.load(model_fetch.fetch("smollm2-135m"))


def made_up(model: CausalLM) -> tuple[Dictionary, dict[str, Any]]:
    """A dictionary of noise for a prefix of so many tokens."""
    config, chance, tensors = model.config, np.random.default_rng(0), dict[str, Any]()
    width = config.kv_heads * config.head_dim
    for layer in range(config.layers):
        keys = chance.standard_normal((1, ENTRIES, width), dtype=np.float32)
        parts = {
            "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
            "states": chance.standard_normal((1, ENTRIES, config.kv_heads, config.head_dim), dtype=np.float32),
            "log_z": chance.standard_normal((1, ENTRIES, config.kv_heads), dtype=np.float32),
            "counts": np.ones((1, ENTRIES), np.int32), "cosine_quantiles": np.zeros((1, 101), np.float32),
        }  # fmt: skip
        tensors |= {tensor_name(layer, name): part for name, part in parts.items()}
    made_for = DictionaryModel(DIGEST, DIGEST, DIGEST, config.layers, config.heads, config.kv_heads, config.head_dim)
    infos = ((name, tensor_info(tensors[name], "I32" if name.endswith("counts") else "F32")) for name in sorted(tensors))
    settings = DictionarySettings(entries=ENTRIES, dtype=RowDtype.F32)
    dictionary = Dictionary(
        "noise",
        made_for,
        tuple(range(config.layers)),
        Prefix(DIGEST, PREFIX, (PREFIX,)),
        Calibration(DIGEST, 1, 1),
        settings,
        tuple(infos),
    )
    return dictionary, tensors


@pytest.fixture
def bench(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> serve.Bench:
    monkeypatch.setattr(serve, "QUESTION_TOKENS", 5)
    monkeypatch.setattr(serve, "NEW_TOKENS", 3)
    return serve.Bench(model, list(range(500, 500 + PREFIX)), serve.TimedMemory(*made_up(model)))


def test_full_prefill_and_a_cached_prefix_answer_alike_and_only_a_dictionary_needs_no_kv(bench: serve.Bench) -> None:
    answers = {way: bench.answer(way, 2, seed=4) for way in (serve.FULL, serve.CACHED, serve.DICTIONARY)}
    full, cached, dictionary = answers.values()
    assert torch.equal(cached.tokens[:, :1], full.tokens)
    assert cached.tokens.shape == dictionary.tokens.shape == (2, 4)
    assert [answer.prefix_bytes for answer in answers.values()] == [2 * bench.block.nbytes, 2 * bench.block.nbytes, 0]
    assert all(answer.ttft_seconds > 0 for answer in answers.values())
    assert cached.decode_rate > 0 < dictionary.decode_rate
    assert torch.equal(bench.answer(serve.CACHED, 2, seed=4).tokens, cached.tokens)
    assert not torch.equal(bench.answer(serve.CACHED, 2, seed=5).tokens, cached.tokens)


def test_a_batch_is_measured_in_pairs_with_every_lookup_of_its_decoding_steps(bench: serve.Bench) -> None:
    rows, goals = serve._measure_batch(bench, 2, rounds=8)
    assert serve.FULL not in {row.name for row in rows}  # eight prefills in a row take as long as eight
    paired = [row for row in rows if row.baseline is not None]
    assert {(row.name, row.baseline, row.params["what"]) for row in paired} == {
        (serve.DICTIONARY, serve.CACHED, "first token"), (serve.DICTIONARY, serve.CACHED, "decode"),
    }  # fmt: skip
    assert all(row.n == 8 and row.ratio is not None and row.ratio_ci95 is not None for row in paired)
    (lookup,) = [row for row in rows if row.unit == "us"]
    assert lookup.n == 8 * 3 * bench.model.config.layers
    assert 0 < lookup.median <= lookup.p99
    assert [goal.met for goal in goals if "KV" in goal.text] == [True]
    kept = {row.params["what"]: row.median for row in rows if row.name == serve.DICTIONARY and row.unit == "MB"}
    assert kept == {
        "KV for the prefix": 0, "copied for all sequences": 0,  # it has no matched keys
        "mapped for all sequences": bench.memory.dictionary.nbytes / 1e6,
    }  # fmt: skip


def test_full_prefill_is_a_baseline_of_its_own_at_batch_1(bench: serve.Bench) -> None:
    rows, goals = serve._measure_batch(bench, 1, rounds=8)
    (against_full,) = [row for row in rows if row.baseline == serve.FULL]
    assert against_full.name == serve.DICTIONARY
    assert against_full.ratio is not None
    (faster,) = [goal for goal in goals if "full prefill" in goal.text]
    assert faster.value == pytest.approx(1 / against_full.ratio)
    assert [goal.limit for goal in goals] == [1.0, 0, serve.TTFT_SPEEDUP, serve.SPEEDUPS[1]]


def row(name: str, baseline: str | None = None, ratio: float | None = None) -> Row:
    return Row(name, {}, "ms", 1.0, 1.0, 8, baseline, ratio)


@pytest.mark.parametrize(
    ("ttft", "against_full", "rate", "held_mb", "met"),
    [
        (0.3, 0.1, 1.4, 0.0, [True, True, True, True]),
        (1.1, 0.1, 1.4, 0.0, [False, True, True, True]),
        (0.3, 0.1, 1.4, 5.0, [True, False, True, True]),
        (0.3, 0.3, 1.4, 0.0, [True, True, False, True]),
        (0.3, 0.1, 1.2, 0.0, [True, True, True, False]),
    ],
)
def test_each_goal_is_missed_by_its_own_figure(
    ttft: float, against_full: float, rate: float, held_mb: float, met: list[bool]
) -> None:
    first = [
        row(serve.FULL),
        row(serve.CACHED),
        row(serve.DICTIONARY, serve.CACHED, ttft),
        row(serve.DICTIONARY, serve.FULL, against_full),
    ]
    goals = serve._goals(1, first, [row(serve.CACHED), row(serve.DICTIONARY, serve.CACHED, rate)], held_mb)
    assert [goal.met for goal in goals] == met


@pytest.mark.parametrize(("arguments", "met", "code"), [(["--strict"], False, 1), (["--strict"], True, 0), ([], False, 0)])
def test_strict_fails_where_a_goal_is_missed(arguments: list[str], met: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "set_compute_threads", lambda count: None)  # torch is here already
    monkeypatch.setattr(serve, "measure", lambda **_: ([row(serve.CACHED)], [Goal("a goal", 1.0 if met else 2.0, 1.0)], []))
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert done.exit_code == code, done.output
    assert ("met    a goal" if met else "MISSED a goal") in done.output


def test_a_dictionary_for_a_prefix_of_another_length_is_refused(model: CausalLM) -> None:
    manifest, _ = made_up(model)
    serve._check(manifest, PREFIX + 1)
    with pytest.raises(InvalidArgument, match="build one of as many"):
        serve._check(manifest, PREFIX + 2)
