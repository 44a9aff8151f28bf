"""The `treadle` command against fake services: real processes, ports, locks and signals, no model and no tables."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from treadle.cli.process_mark import ProcessMark
from treadle.cli.segments import segment_dir
from treadle.contract import EngramModel, Fusion, Table
from treadle.contract.families import deepseek_v41_model
from treadle.contract.row_layout import row_layout
from treadle.contract.table_manifest import version_of_rows

HERE = Path(__file__).parent
SERVICES = {
    "engram_pool": "engram-pool",
    "asm_store": "asm-store",
    "inference_worker": "inference-worker",
    "inference_gateway": "inference-gateway",
}
DEADLINE_SECONDS = 90.0  # a service that is given up has been started six times, with 8 s of backoff in between
WORDS = ("in", "the", "beginning", "was", "word", "and", "it", "[UNK]")
CONFIG = {"num_hidden_layers": 30, "hidden_size": 576}


def poll(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition is true; its value."""
    ends = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < ends, f"not within {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.02)
    return value


@dataclass
class Cli:
    """`python -m treadle.cli` with a home and services of its own."""

    home: Path
    packages: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.packages), *filter(None, [os.environ.get("PYTHONPATH"), *_tree_paths()])])
        return {
            **os.environ, "TREADLE_HOME": str(self.home), "PYTHONPATH": path, "FAKE_MODEL_DIR": str(self.home / "model"), "COLUMNS": "80",
            **self.extra,
        }  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit code."""
        run = subprocess.run(
            [sys.executable, "-m", "treadle.cli", *arguments], env=self.environment, cwd=self.home, input=stdin, capture_output=True, text=True,
            timeout=180, check=False,
        )  # fmt: skip
        assert run.returncode == code, f"exit code {run.returncode}\n{run.stdout}\n{run.stderr}"
        assert "\x1b" not in run.stdout + run.stderr
        return run

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start without waiting."""
        return subprocess.Popen(
            [sys.executable, "-m", "treadle.cli", *arguments], env=self.environment, cwd=self.home, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    @property
    def segments(self) -> Path:
        return segment_dir(self.home)

    def state(self) -> dict[str, Any] | None:
        """The state file as it is now."""
        try:
            return dict(json.loads((self.home / "run" / "state.json").read_text()))
        except FileNotFoundError:
            return None

    def wait_ready(self) -> dict[str, Any]:
        """The state once it says ready."""
        return dict(poll(lambda: (state := self.state()) and state["stage"] == "ready" and state, "treadle up"))

    def process(self, service: str) -> ProcessMark | None:
        """The process of a service."""
        records = {record["service"]: record for record in (self.state() or {"services": []})["services"]}
        mark = records.get(service, {}).get("process")
        return ProcessMark(**mark) if mark else None


@pytest.fixture
def wait_for() -> Callable[[Callable[[], Any], str], Any]:
    """Waits for a condition, with a limit."""
    return poll


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    packages = tmp_path / "packages"
    for package, service in SERVICES.items():
        (packages / package).mkdir(parents=True)
        (packages / package / "__init__.py").touch()
        (packages / package / "__main__.py").write_text(f"import fake_fabric, sys\nsys.exit(fake_fabric.main({service!r}))\n")
    for module in ("fake_fabric.py", "fake_grpc.py"):
        (packages / module).write_text((HERE / module).read_text())
    add_plugins(
        packages,
        {
            "model": "fake_fabric:model_app",
            "pool": "fake_fabric:pool_app",
            "bench": "fake_fabric:bench_app",
            "asm": "fake_fabric:asm_app",
        },
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    write_grown(packages / "engram_pool" / "shipped" / "kjv", "kjv")
    with lzma.open(packages / "engram_pool" / "shipped" / "kjv-held-out.txt.xz", "wt") as file:
        file.write(" ".join(WORDS[:-1]) * 700)
    command = Cli(tmp_path, packages)
    yield command
    if command.state() is not None:
        command("down")
    assert not command.segments.exists(), "a test left segments behind"


@pytest.fixture
def demo(cli: Cli, tmp_path: Path) -> Cli:
    """The command's demo, with a folder of its own for what is temporary."""
    (tmp_path / "temporary").mkdir()
    cli.extra |= {"TMPDIR": str(tmp_path / "temporary"), "FAKE_MEMORIES": "kjv,kjv-shuffled"}
    return cli


@pytest.fixture(scope="session")
def grow() -> Callable[..., EngramModel]:
    """Writes grown folders."""
    return write_grown


def write_grown(folder: Path, name: str, *, hidden: int = 576, seed: int = 0) -> EngramModel:
    """A grown folder as small as can be: two layers, int4 rows of 32 values."""
    token_map, chance = np.arange(len(WORDS), dtype=np.int32), np.random.default_rng(seed)
    template = deepseek_v41_model(
        name, token_map=hashlib.sha256(token_map.tobytes()).hexdigest(), pad_id=0, compressed_vocab_size=len(WORDS), layers=(1, 14),
        prime_base=101, orders=(2, 3), heads=2, row=row_layout("int4", 32), fusion=Fusion("v4.1", hashlib.sha256(b"weights").hexdigest()),
    )  # fmt: skip
    rows = {
        layer: chance.integers(0, 256, (sum(map(sum, template.primes[at])), template.row.bytes), dtype=np.uint8)
        for at, layer in enumerate(template.layers)
    }
    model = template.with_tables({layer: Table(len(table), version_of_rows(table)) for layer, table in rows.items()})
    folder.mkdir(parents=True)
    save_file({f"{layer}.rows": table for layer, table in rows.items()} | {"token_map": token_map}, folder / "rows.safetensors")
    (folder / "fusion.safetensors").write_bytes(b"weights")
    (folder / "manifest.json").write_bytes(model.to_json())
    card = {"name": name, "version": model.version, "model": {"name": "fake-135m", "layers": 30, "hidden": hidden}}
    (folder / "card.json").write_text(json.dumps(card))
    return model


def _tokenizer() -> dict[str, Any]:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip


def add_plugins(packages: Path, entries: dict[str, str]) -> None:
    """Make the folder hold a distribution with these commands."""
    info = packages / "treadle_fakes-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: treadle-fakes\nVersion: 9.9\nSummary: Commands for tests.\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[treadle.commands]", *lines]) + "\n")


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The fake services as a module of this process."""
    spec = importlib.util.spec_from_file_location("fake_fabric", HERE / "fake_fabric.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tree_paths() -> list[str]:
    """Where the namespace package comes from when it is not installed."""
    import treadle.contract  # the other parts of the namespace lie in other folders

    return [str(Path(path).parent) for path in sys.modules["treadle"].__path__ if treadle.contract]
