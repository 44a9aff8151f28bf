"""The one-off children of a fabric: command lines that fetch a model, load tables and memories or take one away, build and publish a prefix.

Owns these command lines and what is read from their output. Does not run them (supervisor).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from treadle.cli.fabric_options import SPEED_TABLE
from treadle.cli.memories import GrownMemory
from treadle.cli.supervisor import JobSpec, StartFailed

FETCH_SECONDS_MAX = 1800.0  # 93 MB over a slow line, then a conversion of about a minute on a busy machine
LOAD_SECONDS_MAX = 600.0
REMOVE_SECONDS_MAX = 60.0
PREFIX_SECONDS_MAX = 900.0  # half a minute for a short text on two quiet cores


def fetch_model(name: str) -> JobSpec:
    """Put a known model into the cache and print where it is."""
    argv = (*python_module("treadle.cli"), "model", "fetch", name, "--json")
    return JobSpec("model-fetch", argv, FETCH_SECONDS_MAX, child_environment())


def fetched_folder(output: bytes) -> str:
    """The folder in what `treadle model fetch --json` printed. StartFailed if it is not there."""
    try:
        folder = str(json.loads(output)["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise StartFailed(f"`treadle model fetch --json` did not print a path: {output[:200]!r}") from error
    return folder


def load_speed_table(pool: str, model_dir: str) -> JobSpec:
    """Load seeded random rows of the speed profile into a pool."""
    tokenizer = str(Path(model_dir) / "tokenizer.json")
    return _pool("table-load", pool, "load", SPEED_TABLE, "--random", "--profile", SPEED_TABLE, "--tokenizer", tokenizer)


def load_memory(pool: str, memory: GrownMemory) -> JobSpec:
    """Load a grown memory from its folder into a pool, under its own name."""
    return _pool(f"memory-load-{memory.name}", pool, "load", "--grown", str(memory.folder))


def remove_memory(pool: str, name: str) -> JobSpec:
    """Take a memory out of a pool again."""
    return _pool("memory-remove", pool, "rm", name, seconds_max=REMOVE_SECONDS_MAX)


def build_prefix(name: str, model_dir: str, text: Path, traces: Path, out: Path, entries: int, source: str) -> JobSpec:
    """Build a dictionary of a text and print its card."""
    argv = (
        *python_module("treadle.cli"), "asm", "build", "--name", name, "--model", model_dir, "--prefix", str(text), "--traces", str(traces),
        "--out", str(out), "--entries", str(entries), "--source", source, "--json",
    )  # fmt: skip
    return JobSpec("asm-build", argv, PREFIX_SECONDS_MAX, child_environment())


def publish_prefix(folder: Path, store: str) -> JobSpec:
    """Bring a dictionary to a store and print what is kept."""
    argv = (*python_module("treadle.cli"), "asm", "publish", str(folder), "--store", store, "--json")
    return JobSpec("asm-publish", argv, LOAD_SECONDS_MAX, child_environment())


def python_module(module: str) -> tuple[str, ...]:
    """The command of a Python module in this environment."""
    return (sys.executable, "-m", module)


def child_environment() -> dict[str, str]:
    """Our environment, with prompt output and one quiet compute thread (two spin against each other on a busy machine)."""
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return defaults | dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _pool(name: str, pool: str, *words: str, seconds_max: float = LOAD_SECONDS_MAX) -> JobSpec:
    argv = (*python_module("treadle.cli"), "pool", *words, "--pool", pool, "--json")
    return JobSpec(name, argv, seconds_max, child_environment())
