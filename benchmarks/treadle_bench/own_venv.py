"""An environment of its own for a peer: what it needs never meets what treadle needs.

Owns where such environments lie (`$TREADLE_HOME/bench`) and how they are made. What runs in them is the caller's.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from treadle.contract import Unavailable
from treadle.nn.model_fetch import treadle_home

INSTALL_SECONDS_MAX = 300


def interpreter_with(requirement: str, home: Path | None = None) -> Path:
    """The interpreter of a venv that holds one pinned package, such as "engramdb-python==0.3.0"; made at the first call.

    Raises Unavailable with pip's own words.
    """
    folder = (home or treadle_home()) / "bench" / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "installed"
        if not done.is_file():
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(folder)],
                [str(python), "-m", "pip", "install", "-q", requirement],
            ):
                _run(command)
            done.touch()
    return python


def _run(command: list[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command)}: not done after {INSTALL_SECONDS_MAX} s") from error
    if ran.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {ran.stderr.strip()[-800:]}")
