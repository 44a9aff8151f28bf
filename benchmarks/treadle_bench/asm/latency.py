"""`treadle bench asm latency`: one layer's lookup, rows and merge against attention over the prefix that they stand for.

Batch 1 decode, one thread, the Llama-3.1-8B geometry (32 query and 8 key/value heads of 128), 1K to 16K tokens and as many entries:
Figure 5 of arXiv 2605.18226 on this machine. Queries are made up and none comes twice; the recall of two levels is measured on the
queries of a real model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from treadle_bench.asm.latency_layer import Floats, Layer, asked_keys
from treadle_bench.asm.latency_lookups import Attend, Find, attentions, lookups, rivals, scan
from treadle_bench.asm.latency_recall import measure_recall
from treadle_bench.report import Goal, Row, interleave, rows_of
from treadle_bench.timing import Timed, timed

TOKENS, TOKENS_QUICK = (1024, 2048, 4096, 8192, 16384), (1024, 2048)
ROUNDS, ROUNDS_QUICK = 100, 10
WARM_ROUNDS = 3
PROBED = 16  # lists of a two-level lookup; there are about as many as the square root of the entries
JUDGED = "two levels, fp32"
CROSSOVER_GOAL, SPEEDUP_GOALS = 2048, {8192: 3.0, 16384: 6.0}
RECALL_QUERIES = 200


def measure(*, quick: bool, data: Path | None, model_dir: Path | None) -> tuple[list[Row], list[Goal], list[str]]:
    """Microseconds for each number of tokens and each way; the recall of two levels. Needs 2 GB of memory."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    speedups: dict[int, float] = {}
    notes = ["queries are made up, drawn near keys in clusters; none comes twice"]
    for tokens in TOKENS_QUICK if quick else TOKENS:
        measured, missing = _measure_tokens(Layer(tokens), ROUNDS_QUICK if quick else ROUNDS)
        notes += [text for text in missing if text not in notes]
        judged = next(row for row in measured if row.name == JUDGED)
        speedups[tokens] = 1 / judged.ratio if judged.ratio else 0.0
        rows += measured
    recall_rows, recall_goals, recall_notes = measure_recall(quick=quick, data=data, model_dir=model_dir)
    return rows + recall_rows, _goals(speedups) + recall_goals, notes + recall_notes


def _measure_tokens(layer: Layer, rounds: int) -> tuple[list[Row], list[str]]:
    exact = attentions(layer)
    found, missing = rivals(layer, PROBED)
    searched = lookups(layer, PROBED) | found
    ways: dict[str, Attend] = exact | {name: attend for name, (attend, _) in searched.items()}
    queries = layer.queries((WARM_ROUNDS + rounds) * len(ways))

    def variant(place: int, attend: Attend) -> Timed:
        return timed(lambda number: attend(queries[number * len(ways) + place]))

    variants: dict[str, Callable[[int], float]] = {
        name: variant(place, attend) for place, (name, attend) in enumerate(ways.items())
    }
    with torch.inference_mode():
        for number in range(rounds, rounds + WARM_ROUNDS):
            for run in variants.values():
                run(number)
        samples = interleave(variants, rounds, what=f"{layer.entries} tokens")
    baseline = min(exact, key=lambda name: float(np.median(samples[name])))
    recall = _recall(layer, {name: find for name, (_, find) in searched.items()})
    rows = rows_of(samples, {"tokens": layer.entries}, "us", baseline)
    return [
        replace(row, params=dict(row.params) | {"recall": f"{recall[row.name]:.3f}"}) if row.name in recall else row for row in rows
    ], missing


def _recall(layer: Layer, searches: dict[str, Find]) -> dict[str, float]:
    """Share of made-up queries whose entry is the nearest one, outside the clock."""
    exact = scan(layer.keys)
    asked: list[Floats] = [asked_keys(query) for query in layer.queries(RECALL_QUERIES)]
    nearest = [exact(each) for each in asked]
    return {
        name: float(np.mean([find(each) == best for each, best in zip(asked, nearest, strict=True)]))
        for name, find in searches.items()
    }


def _goals(speedups: dict[int, float]) -> list[Goal]:
    slower = [tokens for tokens, speedup in speedups.items() if speedup < 1]
    faster = [tokens for tokens in speedups if not slower or tokens > max(slower)]
    return [
        Goal(f"{JUDGED}: tokens from which on it is faster than attention", min(faster, default=math.inf), CROSSOVER_GOAL),
        *(
            Goal(f"{JUDGED}, {tokens} tokens: times faster than the best attention", speedups[tokens], limit, at_least=True)
            for tokens, limit in SPEEDUP_GOALS.items()
            if tokens in speedups
        ),
    ]
