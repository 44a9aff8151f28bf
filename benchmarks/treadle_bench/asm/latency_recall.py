"""How often two levels find what a full scan finds, for the queries of a real model: SmolLM2 reading clinc150.

Owns the collection of queries before rotation (one heads-joined key for each group of heads, one codebook for all key/value heads),
the entries made of them, and the count. Entries come from the calibration texts, queries from texts that these do not hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import rms_norm

from treadle.contract.errors import NotFound
from treadle.kernels import entry_lists, nearest
from treadle.nn import model_fetch
from treadle.nn.model import CausalLM
from treadle_bench.asm.latency_layer import Floats, unit
from treadle_bench.asm.latency_lookups import int8
from treadle_bench.report import Goal, Row, progress

CALIBRATION_TOKENS, TEST_TOKENS = 4000, 1500
CALIBRATION_TOKENS_QUICK, TEST_TOKENS_QUICK = 1500, 300
SAMPLES_MAX = 8192  # of a layer, that entries are made of
ENTRIES, ENTRY_ITERATIONS, LIST_ITERATIONS = 1024, 4, 8
LISTS, PROBED = (16, 32, 64), (4, 8, 16)
DEFAULT_LISTS, DEFAULT_PROBED = 32, 16  # the square root of the entries; the paper's top-m
RECALL_GOAL = 0.99
STEP_TOKENS = 256


def measure_recall(*, quick: bool, data: Path | None, model_dir: Path | None) -> tuple[list[Row], list[Goal], list[str]]:
    """Recall of the nearest entry for each number of lists and of lists probed; nothing but a note where there are no texts."""
    if data is None:
        return (
            [],
            [],
            ["not measured: recall on a real model's queries; give --data, a folder with clinc150's train.json and val.json"],
        )
    folder = model_dir or model_fetch.fetch("smollm2-135m")
    model, tokenizer = CausalLM.load(folder, torch.float32), Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = (CALIBRATION_TOKENS_QUICK, TEST_TOKENS_QUICK) if quick else (CALIBRATION_TOKENS, TEST_TOKENS)
    calibration = layer_queries(model, _token_ids(tokenizer, data / "train.json", sizes[0]))
    tests = layer_queries(model, _token_ids(tokenizer, data / "val.json", sizes[1]))
    recalls: dict[tuple[str, int, int], list[float]] = {}
    layers = zip(calibration, tests, strict=True)
    for samples, queries in progress(layers, model.config.layers, "recall"):
        for setting, recall in _recalls(samples, queries).items():
            recalls.setdefault(setting, []).append(recall)
    rows = [_row(setting, np.array(values), len(tests[0])) for setting, values in recalls.items()]
    judged = float(np.mean(recalls["two levels", DEFAULT_LISTS, DEFAULT_PROBED]))
    text = f"recall@1 on SmolLM2's queries, {ENTRIES} entries, {DEFAULT_LISTS} lists, {DEFAULT_PROBED} probed"
    return rows, [Goal(text, judged, RECALL_GOAL, at_least=True)], []


@torch.inference_mode()
def layer_queries(model: CausalLM, sequences: list[list[int]]) -> list[Floats]:
    """For each layer the unit lookup keys [tokens * group, kv_heads * head_dim] of all tokens, from queries before rotation."""
    config, kept = model.config, list[list[Tensor]]([] for _ in range(model.config.layers))

    def keep(layer: int, hidden: Tensor) -> Tensor:
        weights = model.weights.layers[layer]
        normed = rms_norm(hidden, weights.input_norm.shape, weights.input_norm, config.norm_eps)
        heads = weights.qkv(normed)[:, : config.heads * config.head_dim]
        kept[layer].append(heads.view(len(hidden), config.kv_heads, -1, config.head_dim).transpose(1, 2).flatten(2).flatten(0, 1))
        return hidden

    for step in _steps(sequences):
        starts = np.cumsum([0, *map(len, step)]).tolist()
        positions = torch.cat([torch.arange(len(sequence)) for sequence in step])
        tokens = torch.tensor([token for sequence in step for token in sequence])
        model.forward(tokens, positions, starts, [model.new_kv() for _ in step], keep)
    return [unit(torch.cat(parts).numpy()) for parts in kept]


def _recalls(samples: Floats, queries: Floats) -> dict[tuple[str, int, int], float]:
    chance = np.random.default_rng(0)
    if len(samples) > SAMPLES_MAX:
        samples = samples[np.sort(chance.choice(len(samples), SAMPLES_MAX, replace=False))]
    entries = entry_lists(samples, ENTRIES, 0, ENTRY_ITERATIONS)[1]
    best, _ = nearest(queries, entries)
    found = {("linear, int8", 0, 0): _share(nearest(queries, *int8(entries))[0], best)}
    for lists in LISTS:
        order, list_keys, starts = entry_lists(entries, lists, 0, LIST_ITERATIONS)
        keys = entries[order]
        for probed in PROBED:
            if probed < lists:
                found["two levels", lists, probed] = _share(order[nearest(queries, keys, None, list_keys, starts, probed)[0]], best)
    return found


def _share(entries: NDArray[np.int32], best: NDArray[np.int32]) -> float:
    return float(np.mean(entries == best))


def _row(setting: tuple[str, int, int], recalls: NDArray[np.float64], queries: int) -> Row:
    name, lists, probed = setting
    params: dict[str, object] = {"entries": ENTRIES}
    if lists:
        params |= {"lists": lists, "probed": probed}
    params |= {"mean": f"{recalls.mean():.4f}", "worst_layer": f"{recalls.min():.4f} ({int(recalls.argmin())})"}
    return Row(f"recall@1, {name}", params, "of 1", float(np.median(recalls)), float(np.percentile(recalls, 99)), queries)


def _token_ids(tokenizer: Tokenizer, path: Path, tokens: int) -> list[list[int]]:
    """Texts as token ids, spread over the whole file, until there are `tokens` in all. Raises NotFound."""
    if not path.is_file():
        raise NotFound(f"no such file: {path}; --data wants a folder with clinc150's train.json and val.json")
    texts = [text for text, _ in json.loads(path.read_text(encoding="utf-8"))]
    chosen, count = [], 0
    for at in np.random.default_rng(0).permutation(len(texts)):
        ids = tokenizer.encode(f"Query: {texts[at]}\nIntent:").ids
        chosen.append(ids)
        count += len(ids)
        if count >= tokens:
            return chosen
    return chosen


def _steps(sequences: list[list[int]]) -> Iterator[list[list[int]]]:
    """Sequences in batches of about STEP_TOKENS."""
    step: list[list[int]] = []
    for sequence in sequences:
        if step and sum(map(len, step)) + len(sequence) > STEP_TOKENS:
            yield step
            step = []
        step.append(sequence)
    if step:
        yield step
