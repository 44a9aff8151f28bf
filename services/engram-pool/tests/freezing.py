"""A process that is stopped as a debugger or a stalled host stops it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

SECONDS = 20.0


def freeze(pid: int) -> None:
    """Stop it, and return once every thread of it stands: until then one may still answer."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + SECONDS
    while not all(map(_stands, Path(f"/proc/{pid}/task").iterdir())):
        assert time.monotonic() < until, "it does not stand"
        time.sleep(0.002)


def _stands(task: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True
