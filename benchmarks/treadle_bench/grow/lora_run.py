"""The LoRA rival: at the memory's bytes and CPU time, on the same blocks, its learning rate picked on the validation set.

Owns the rank and the choice of the rate. Training itself is `lora_script`'s.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import Unavailable
from treadle.nn.config import ModelConfig
from treadle_bench.grow import lora_script, measuring
from treadle_bench.grow.material import BLOCK_TOKENS, MEASURED, VALIDATION, Material
from treadle_bench.grow.measuring import Sample
from treadle_bench.grow.ngram_run import budget_bytes, training_order
from treadle_bench.grow.runs import Kind, Run, marks_of
from treadle_bench.grow.store import ON, Store, scores_of
from treadle_bench.own_venv import interpreter_with

PEFT = "peft==0.21.2"
RATES = (3e-4, 1e-3, 3e-3)
RATE_SHARE = 0.08  # of the CPU budget for each rate that is tried; not counted into the budget, which favours LoRA
RATE_BLOCKS = 16  # of the validation set
TRAINING_SLACK_SECONDS = 3600.0  # wall clock beyond twice the budget: the machine may be shared, and measuring takes its time


def rank_for(config: ModelConfig, bytes_max: int) -> int:
    """The largest rank whose bf16 weights, on every matrix of every layer, fit `bytes_max`; at least 1."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    sides = (hidden + query) + 2 * (hidden + key) + (query + hidden) + 3 * (hidden + inner)
    return max(1, bytes_max // (2 * sides * config.layers))


def measure_lora(run: Run, material: Material, folder: Path, store: Store, sample: Sample | None) -> None:
    """Pick the rate, train for the CPU seconds that the memory of this seed took, measure. `folder`: of the language model."""
    measuring.require_same_texts(store, material)
    mark = marks_of(run)[-1]
    budget_seconds = store.get(run.domain, Kind.MEMORY, run.seed, mark).cpu_seconds
    rank = rank_for(ModelConfig.from_folder(folder), budget_bytes(folder))
    chosen = sample or measuring.WHOLE
    numbers = {name: chosen.numbers(name, material.sets[name]) for name in MEASURED}
    data = store.scratch(f"{run.key}.npz")
    _write_data(data, run, material, numbers)
    python = interpreter_with(PEFT, beside=True)  # this environment's torch and transformers are the same pins for it

    def train(name: str, rate: float, cpu_seconds: float, sets: tuple[str, ...]) -> dict[str, Any]:
        out = store.scratch(f"{run.key}-{name}.json")
        options = {
            "data": data,
            "model": folder,
            "out": out,
            "rank": rank,
            "rate": rate,
            "cpu-seconds": cpu_seconds,
            "seed": run.seed,
        }
        return _train(python, options, sets)

    rates = RATES if sample is None else RATES[1:2]
    tried = {rate: train(f"rate-{rate:g}", rate, RATE_SHARE * budget_seconds, (VALIDATION,)) for rate in rates}
    losses = {rate: float(np.mean(result["sets"][VALIDATION])) / measuring.TOKENS_A_BLOCK for rate, result in tried.items()}
    best = min(losses, key=lambda rate: losses[rate])
    result = train("final", best, budget_seconds, MEASURED)
    sets = {name: scores_of(numbers[name], np.asarray(result["sets"][name])) for name in MEASURED}
    notes = {
        "rank": rank, "rate": best, "validation_perplexity_by_rate": {f"{rate:g}": float(np.exp(loss)) for rate, loss in losses.items()},
        "passes": result["passes"], "steps": result["steps"], "peft": result["peft"], "targets": lora_script.TARGETS,
    }  # fmt: skip
    store.put(
        measuring.record(
            run, mark, ON, sets, material, tokens_seen=result["tokens"], cpu_seconds=result["cpu_seconds"],
            file_bytes=2 * result["parameters"], notes=notes,
        )
    )  # fmt: skip


def _write_data(path: Path, run: Run, material: Material, numbers: Mapping[str, NDArray[np.int64]]) -> None:
    order = training_order(len(material.corpus.train), run.seed)
    blocks = -(-run.tokens // BLOCK_TOKENS) if run.tokens else len(order)
    arrays: dict[str, Any] = {name: material.sets[name][chosen] for name, chosen in numbers.items()}
    arrays[VALIDATION] = Sample(RATE_BLOCKS, 0, 0).blocks_of(VALIDATION, material.sets[VALIDATION])
    np.savez(path, train=material.corpus.train[order[:blocks]], mix=material.corpus.mix, **arrays)


def _train(python: Path, options: Mapping[str, object], sets: tuple[str, ...]) -> dict[str, Any]:
    out = Path(str(options["out"]))
    if out.is_file():  # a run that was cut short does not train what it has
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        values: dict[str, Any] = {name.replace("-", "_"): options[name] for name in ("rank", "rate", "cpu-seconds", "seed", "data")}
        if lora_script.asked(**values).items() <= found.items() and set(found["sets"]) == set(sets):
            return found
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [str(python), str(Path(lora_script.__file__)), *flags, "--measure", *sets]
    limit = 2 * float(str(options["cpu-seconds"])) + TRAINING_SLACK_SECONDS
    quiet = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=quiet)
    if done.returncode:
        raise Unavailable(f"LoRA did not train: {done.stderr.strip()[-1200:]}")
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result
