"""A pool of the benchmark's own: a real process on a free port, with its own folder in shared memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle_bench.answers import Lines

START_SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class PoolProcess:
    """Address and pid of a running pool."""

    address: str
    pid: int


@contextmanager
def huge_folder() -> Iterator[Path]:
    """A mount on 2 MiB pages; without root, or where the kernel grants none, /dev/shm."""
    with huge_mount() as mount:
        yield mount or Path("/dev/shm")


@contextmanager
def huge_mount() -> Iterator[Path | None]:
    """A mount on 2 MiB pages; None without root, or where the kernel grants none."""
    mount = Path(tempfile.mkdtemp(prefix="treadle-bench-huge-"))
    options = ["-t", "tmpfs", "-o", "huge=always,size=90%", "treadle-bench", str(mount)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    try:
        yield mount if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(mount)], check=True)  # readers may still be on their way out
        mount.rmdir()


@contextmanager
def pool_process(parent: Path = Path("/dev/shm"), arguments: Sequence[str] = ()) -> Iterator[PoolProcess]:
    """Start a pool with a folder below `parent`, stop it afterwards, leave nothing. Raises RuntimeError if it does not get ready."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-pool-", dir=parent))
    folder.chmod(0o750)
    process = subprocess.Popen(
        [sys.executable, "-m", "engram_pool", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
         "--segment-dir", str(folder), "--log-level", "warning", *arguments],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield PoolProcess(json.loads(_ready_line(process))["listen"], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_SECONDS_MAX)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _ready_line(process: subprocess.Popen[str]) -> str:
    state = f"was not ready within {START_SECONDS_MAX} s"
    try:
        line = Lines(process.stdout).within(START_SECONDS_MAX)
    except EOFError:
        line, state = None, f"ended (exit code {process.wait(START_SECONDS_MAX)})"
    if line is None:
        raise RuntimeError(f"the pool {state}")
    return line
