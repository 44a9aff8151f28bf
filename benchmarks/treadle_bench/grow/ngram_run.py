"""The n-gram rival: counted on the tokens that the memory saw, pruned to the memory's bytes, mixed with the frozen model.

Owns the choices, all made on the validation set: order, and the mixture's weight (one for all tokens, and one for each length
of known context, which is the stronger rival).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_pool.growing.memory import template_of
from engram_pool.growing.recipe import Recipe
from treadle.nn.config import ModelConfig
from treadle.nn.token_map import compressed_token_map
from treadle_bench.grow import measuring
from treadle_bench.grow.material import BLOCK_TOKENS, MEASURED, VALIDATION, Blocks, Material
from treadle_bench.grow.memory_run import PAD_ID
from treadle_bench.grow.mixture import fit_weights, mixed_nll
from treadle_bench.grow.ngram import NgramModel
from treadle_bench.grow.runs import ALL, Run, marks_of
from treadle_bench.grow.store import ON, Scores, Store, scores_of

ORDERS = (3, 4, 5)
ONE_WEIGHT = "one-weight"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """An order with its weights, by how well it predicts the validation set."""

    order: int
    ngrams: NgramModel
    weights: Floats
    nll: float


def training_order(train_blocks: int, seed: int) -> NDArray[np.int64]:
    """Numbers of training blocks in the order in which a memory of this seed sees them (as engram_pool.growing.grower plans)."""
    return np.random.default_rng([seed, 1]).permutation(train_blocks)


def budget_bytes(folder: Path) -> int:
    """What the memory of the default recipe takes for the language model in `folder`."""
    token_map, compressed = compressed_token_map(folder / "tokenizer.json")
    template = template_of("budget", Recipe(), token_map, compressed, PAD_ID)
    return measuring.file_bytes(template, ModelConfig.from_folder(folder).hidden, len(token_map))


def measure_ngrams(run: Run, material: Material, folder: Path, store: Store) -> None:
    """Count, prune, choose and measure at every mark; seconds, not minutes. Needs the frozen model's losses."""
    measuring.require_same_texts(store, material)
    bytes_max, vocabulary = budget_bytes(folder), ModelConfig.from_folder(folder).vocab
    order = training_order(len(material.corpus.train), run.seed)
    with np.load(measuring.frozen_losses_path(store, run.domain)) as frozen:
        losses = {name: (frozen[f"{name}.blocks"], frozen[f"{name}.losses"]) for name in (VALIDATION, *MEASURED)}
    for mark in marks_of(run):
        wanted = len(order) if mark == ALL else -(-mark // BLOCK_TOKENS)
        began = time.process_time()
        trained = material.corpus.train[order[:wanted]]
        models = {depth: NgramModel.count(trained, vocabulary, depth).pruned(bytes_max) for depth in ORDERS}
        for state, by_context in ((ON, True), (ONE_WEIGHT, False)):
            choice = _choose(models, material.sets[VALIDATION], losses[VALIDATION], by_context=by_context)
            notes = _notes(choice, material, losses[VALIDATION])
            sets = {name: _scores(choice, material.sets[name], losses[name], by_context=by_context) for name in MEASURED}
            store.put(
                measuring.record(
                    run, mark, state, sets, material, tokens_seen=trained.size, cpu_seconds=time.process_time() - began,
                    file_bytes=choice.ngrams.bytes, notes=notes,
                )
            )  # fmt: skip


def _choose(
    models: dict[int, NgramModel], blocks: Blocks, losses: tuple[NDArray[np.int64], NDArray[np.float32]], *, by_context: bool
) -> Choice:
    choices = []
    for order, ngrams in models.items():
        model, own, group = _probabilities(ngrams, blocks, losses, by_context=by_context)
        weights = fit_weights(model, own, group)
        choices.append(Choice(order, ngrams, weights, float(mixed_nll(model, own, group, weights).mean())))
    return min(choices, key=lambda choice: choice.nll)


def _probabilities(
    ngrams: NgramModel, blocks: Blocks, losses: tuple[NDArray[np.int64], NDArray[np.float32]], *, by_context: bool
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Of each token: the frozen model's and the n-gram model's probability, and whose weight it takes; flat."""
    numbers, nll = losses
    own, matched = ngrams.probabilities(blocks[numbers])
    group = matched.reshape(-1) if by_context else np.zeros(matched.size, dtype=np.int64)
    return np.exp(-nll.astype(np.float64)).reshape(-1), own.reshape(-1), group


def _scores(choice: Choice, blocks: Blocks, losses: tuple[NDArray[np.int64], NDArray[np.float32]], *, by_context: bool) -> Scores:
    model, own, group = _probabilities(choice.ngrams, blocks, losses, by_context=by_context)
    return scores_of(losses[0], mixed_nll(model, own, group, choice.weights).reshape(losses[1].shape).sum(1))


def _notes(choice: Choice, material: Material, losses: tuple[NDArray[np.int64], NDArray[np.float32]]) -> dict[str, Any]:
    alone, _ = choice.ngrams.probabilities(material.sets[VALIDATION][losses[0]])
    return {
        "order": choice.order,
        "weights": [round(float(weight), 4) for weight in choice.weights],
        "validation_perplexity": float(np.exp(choice.nll)),
        "validation_perplexity_alone": float(np.exp(-np.log(alone).mean())),
    }
