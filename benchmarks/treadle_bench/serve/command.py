"""`treadle bench serve` for one engine or both, and what it prints."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from treadle.cli.worker_engine import WorkerEngine
from treadle.cli.worker_engine import worker_command as started_by
from treadle.contract.errors import InvalidArgument
from treadle_bench.report import Goal, Row, show
from treadle_bench.serve.processes import EMBEDDED, VLLM
from treadle_bench.serve.tables import measure

ENGINES = {EMBEDDED: (EMBEDDED,), VLLM: (VLLM,), "both": (EMBEDDED, VLLM)}


def run_and_show(*, quick: bool, as_json: bool, engine: str, worker_command: str, model_dir: Path | None) -> list[bool]:
    """Measure and print; which goals were met. Raises InvalidArgument for an engine that is not one."""
    if engine not in ENGINES:
        raise InvalidArgument(f"--engine: one of {', '.join(ENGINES)}, got {engine!r}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # its processes and hosts go with it
    rows: list[Row] = []
    goals: list[Goal] = []
    skipped: list[str] = []
    for name in ENGINES[engine]:
        command = started_by(WorkerEngine(name), worker_command if name == VLLM else "", "inference_worker")
        result = measure(quick=quick, engine=name, command=command, model_dir=model_dir)
        rows += result.rows
        goals += result.goals
        skipped += [text for text in result.skipped if text not in skipped]
    show(rows, goals, as_json=as_json, title="serve", quick=quick, notes=[f"not measured: {text}" for text in skipped])
    return [goal.met for goal in goals]
