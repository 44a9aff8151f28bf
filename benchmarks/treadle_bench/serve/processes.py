"""Workers and pools of the benchmark: real processes on free ports, as `treadle up` would start them.

Owns their command lines and their end. A worker in another network namespace listens there and is reached from here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle.nn import demo_profile
from treadle_bench.answers import Lines

EMBEDDED, VLLM = "embedded", "vllm"
READY_SECONDS_MAX = 600.0  # what a worker gives vLLM to start: half a minute, minutes where other work has the cores
STOP_SECONDS_MAX = 30.0
# Every prompt is new, and nothing may come from a round before. vLLM makes all of its KV at the start: five workers of 3 GB are too much.
LIMITS = ("--prefix-cache-bytes-max", "0", "--kv-tokens-max", "4096")


@dataclass(frozen=True, slots=True)
class Place:
    """A host: the address that its services listen on, and the words that run a command there."""

    address: str = "127.0.0.1"
    inside: tuple[str, ...] = ()


HERE = Place()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker: which engine, how its rows come (`off`: no Engram), from which pool, and where it runs."""

    engine: str
    transport: str
    pool: str = ""
    place: Place = HERE
    command: tuple[str, ...] = (sys.executable, "-m", "inference_worker")

    def argv(self, model_dir: Path, batch: int, key_file: Path) -> list[str]:
        """The command line."""
        words = [*self.place.inside, *self.command, "--model", str(model_dir), "--listen", f"{self.place.address}:0"]
        words += ["--metrics-listen", "127.0.0.1:0", "--log-level", "warning", "--api-key-file", str(key_file), *LIMITS]
        words += ["--sequences-max", str(batch), "--engram-transport", self.transport]
        words += ["--engine", VLLM] if self.engine == VLLM else []
        if self.transport != "off":
            words += ["--engram-pool", self.pool, "--engram-key-file", str(key_file), "--engram-fusion", "shadow"]
            words += ["--engram-model", demo_profile.NAME]
        return words


@contextmanager
def key_file() -> Iterator[Path]:
    """A file with one key, which every service of the benchmark asks for: listeners beyond loopback need one."""
    with tempfile.TemporaryDirectory(prefix="treadle-bench-serve-") as folder:
        path = Path(folder) / "key"
        path.touch(mode=0o600)
        path.write_text(os.urandom(16).hex() + "\n")
        yield path


def key_of(path: Path) -> str:
    """The key in a file of `key_file`."""
    return path.read_text().strip()


@contextmanager
def worker_process(spec: WorkerSpec, model_dir: Path, batch: int, key: Path) -> Iterator[str]:
    """Run a worker; its address. Raises RuntimeError with its last words where it does not get ready."""
    with ready_process(spec.argv(model_dir, batch, key), f"the {spec.engine} worker ({spec.transport})") as ready:
        yield str(ready["listen"])


@contextmanager
def ready_process(argv: Sequence[str], what: str) -> Iterator[dict[str, object]]:
    """Run a service of ours until the context ends; what its ready line says."""
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=words, start_new_session=True)
        assert process.stdout is not None
        try:
            state = f"was not ready within {READY_SECONDS_MAX:g} s"
            try:
                line = Lines(process.stdout).within(READY_SECONDS_MAX)
            except EOFError:
                line, state = None, f"ended with exit code {process.wait(STOP_SECONDS_MAX)} before it was ready"
            if line is None:
                words.seek(0)
                said = words.read()[-2000:].decode(errors="replace").strip()
                raise RuntimeError(f"{what} {state}; it said: {said or 'nothing'}")
            yield json.loads(line)
        finally:
            _end(process)
            process.stdout.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop, then make it, with whatever it started in its session."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
