"""What building costs: calibration tokens a CPU-second, memory beside the model, what int8 rows save, what a further chunk costs.

Owns the builds and their comparison; each runs in a process of its own (`build_run`). What int8 rows lose is in `sweep`: its line `f32`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asm_store.building.recipe import matched_keys_of
from treadle.contract.errors import Unavailable
from treadle_bench.asm.tasks import SIZES, Task, Tokens, load_task, load_tokenizer
from treadle_bench.report import Goal, Row

SECONDS_MAX = 1800
ENTRIES, QUICK_ENTRIES = 1024, 64


@dataclass(frozen=True, slots=True)
class _Order:
    model: Path
    traces: tuple[Tokens, ...]
    settings: tuple[str, ...]


def measure(data: Path, model: Path, changes: Sequence[str], *, quick: bool) -> tuple[list[Row], list[Goal]]:
    """Builds of clinc20's prefix. Raises Unavailable with a build's own words where one fails."""
    sizes = SIZES["clinc20"].quick() if quick else SIZES["clinc20"]
    task = load_task("clinc20", 0, data, load_tokenizer(model), sizes=sizes)
    entries = QUICK_ENTRIES if quick else ENTRIES
    order = _Order(model, task.traces, (*changes, f"entries={entries}"))
    with tempfile.TemporaryDirectory(prefix="treadle-bench-build-") as folder:
        return _measure(order, task, Path(folder))


def _measure(order: _Order, task: Task, folder: Path) -> tuple[list[Row], list[Goal]]:
    tokens = sum(map(len, task.traces))
    half = len(task.prefix) // 2
    whole = _build(order, task.prefix, folder / "i8", "dtype=I8")
    exact = _build(order, task.prefix, folder / "f32", "dtype=F32")
    _build(order, task.prefix[:half], folder / "first", "dtype=I8")
    further = _build(order, task.prefix[half:], folder / "further", "dtype=I8", base=folder / "first")
    alone = _build(order, task.prefix[half:], folder / "alone", "dtype=I8")
    matched = _build(order, task.prefix, folder / "matched", "dtype=I8", f"matched_keys={matched_keys_of(len(task.prefix))}")
    params = {"prefix": len(task.prefix), "tokens": tokens, "entries": int(order.settings[-1].partition("=")[2])}
    extra = max(each["peak_mib"] - each["resident_before_mib"] - each["prefix_kv_mib"] for each in (whole, matched))
    rate, whole_rate = tokens / whole["collect_cpu_seconds"], tokens / matched["cpu_seconds"]
    rows = [
        _row("collecting", params, "tokens/CPU-s", rate),
        _row("reading the prefix", params, "CPU-s", whole["prefix_cpu_seconds"]),
        _row("clustering", params, "CPU-s", whole["cluster_cpu_seconds"]),
        _row("clustering, with matched keys", params, "CPU-s", matched["cluster_cpu_seconds"]),
        _row("all of a build, with matched keys", params, "tokens/CPU-s", whole_rate),
        _row("memory beside model and prefix KV", params, "MiB", extra),
        _row("int8 rows", params, "MB", whole["bytes"] / 1e6),
        _row("int8 rows and matched keys", params, "MB", matched["bytes"] / 1e6),
        _row("fp32 rows", params, "MB", exact["bytes"] / 1e6),
        _row("a further chunk", params | {"prefix": len(task.prefix) - half}, "CPU-s", further["cpu_seconds"]),
        _row("the same chunk by itself", params | {"prefix": len(task.prefix) - half}, "CPU-s", alone["cpu_seconds"]),
        _row("the whole prefix again", params, "CPU-s", whole["cpu_seconds"]),
    ]
    forwards = further["prefix_cpu_seconds"] + further["collect_cpu_seconds"]
    alone_forwards = alone["prefix_cpu_seconds"] + alone["collect_cpu_seconds"]
    goals = [
        Goal("calibration tokens a CPU-second, collecting", rate, 150, at_least=True),
        Goal("calibration tokens a CPU-second, the whole build with matched keys", whole_rate, 150, at_least=True),
        Goal("MiB beside model and prefix KV", extra, 512),
        Goal("fp32 rows' bytes over int8 rows'", exact["bytes"] / whole["bytes"], 3.7, at_least=True),
        Goal("forwards of a further chunk over those of the chunk by itself, CPU time", forwards / alone_forwards, 1.25),
    ]
    return rows, goals


def _build(order: _Order, prefix: Tokens, out: Path, *changes: str, base: Path | None = None) -> dict[str, Any]:
    asked = {
        "model": str(order.model), "prefix": prefix, "traces": order.traces, "out": str(out), "settings": [*order.settings, *changes],
        "base": "" if base is None else str(base),
    }  # fmt: skip
    command = [sys.executable, "-m", "treadle_bench.asm.build_run"]
    try:
        ran = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"a build was not done after {SECONDS_MAX} s") from error
    if ran.returncode:
        raise Unavailable(f"a build failed: {ran.stderr.strip()[-800:]}")
    told: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return told


def _row(name: str, params: dict[str, int], unit: str, value: float) -> Row:
    return Row(name, params, unit, value, value, 1)
