"""A pool of the benchmark's own: a real process on a free port, with its own folder in shared memory."""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class PoolProcess:
    """Address and pid of a running pool."""

    address: str
    pid: int


@contextmanager
def pool_process(*flags: str) -> Iterator[PoolProcess]:
    """Start a pool with these flags, stop it afterwards, leave nothing in /dev/shm. Raises RuntimeError if it does not get ready."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-pool-", dir="/dev/shm"))
    folder.chmod(0o750)
    process = subprocess.Popen(
        [sys.executable, "-m", "engram_pool", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
         "--segment-dir", str(folder), "--log-level", "warning", *flags],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], START_SECONDS_MAX)
        line = process.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"the pool was not ready within {START_SECONDS_MAX} s (exit code {process.poll()})")
        yield PoolProcess(json.loads(line)["listen"], process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_SECONDS_MAX)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
