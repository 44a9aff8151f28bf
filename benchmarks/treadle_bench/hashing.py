"""`treadle bench hash`: tokens to row ids, native against the vectorised numpy form."""

from __future__ import annotations

import hashlib

import numpy as np

from treadle import kernels
from treadle.contract import EngramModel, RowLayout, Windows
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model
from treadle.kernels import HashPlan, reference
from treadle_bench.report import Goal, Row, interleave, rows_of
from treadle_bench.timing import Timed, timed

TOKENS = (256, 4096)
VOCABULARY = 99_092  # the compressed ids of DeepSeek-V4.1
BF16 = RowLayout(320, 160, "bf16")


def measure(*, quick: bool) -> tuple[list[Row], list[Goal]]:
    """Every family, one layer."""
    token_map = np.arange(VOCABULARY, dtype=np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    models: tuple[EngramModel, ...] = (
        demo_model("demo", layers=(1,), token_map=digest, compressed_vocab_size=VOCABULARY, pad_id=2, prime_base=646_400, row=BF16),
        deepseek_v41_model("v41", token_map=digest, pad_id=2),
        qwen_ple_model("ple", row=BF16),
    )
    rows: list[Row] = []
    goals: list[Goal] = []
    for model in models:
        plan = HashPlan.from_model(model, model.layers[0], token_map if model.token_map else None)
        for tokens in TOKENS:
            measured = _measure(plan, str(model.family), model.order_max, tokens, rounds=50 if quick else 300)
            rows += measured
            native = next(row for row in measured if row.name == kernels.IMPLEMENTATION)
            goals.append(Goal(f"{model.family}, {tokens} tokens: numpy / native", 1 / (native.ratio or 1), 3.0, at_least=True))
    return rows, goals


def _measure(plan: HashPlan, family: str, order_max: int, tokens: int, rounds: int) -> list[Row]:
    ids = np.random.default_rng(tokens).integers(0, VOCABULARY, size=tokens).tolist()
    windows = Windows.of_sequences([(ids, 0)], order_max - 1)
    out = np.zeros((tokens, len(plan.primes)), dtype=np.int64)

    variants: dict[str, Timed] = {
        "numpy": timed(lambda _: reference.row_ids(plan, windows, out)),
        kernels.IMPLEMENTATION: timed(lambda _: kernels.row_ids(plan, windows, out)),
    }
    return rows_of(
        interleave(variants, rounds, what=f"{family}, {tokens} tokens"), {"family": family, "tokens": tokens}, "us", "numpy"
    )
