"""An environment of its own for a peer: what it needs never meets what treadle needs.

Owns where such environments lie (`$TREADLE_HOME/bench`) and how they are made. What runs in them is the caller's.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

from treadle.contract import Unavailable
from treadle.nn.model_fetch import treadle_home

INSTALL_SECONDS_MAX = 300


def interpreter_with(requirement: str, *more: str, home: Path | None = None, beside: bool = False) -> Path:
    """The interpreter of a venv that holds pinned packages, such as "engramdb-python==0.3.0"; made at the first call.

    more:   further packages; the venv is named after the first
    beside: the venv sees this environment's packages, and gets the pinned ones without what they ask for: no second copy of torch
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
                [str(python), "-m", "pip", "install", "-q", "--retries", "1", *(["--no-deps"] if beside else []), requirement, *more],
            ):
                _run(command)
            if beside:
                place = next(folder.glob("lib/python*/site-packages"))
                (place / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
            done.touch()
    return python


def _run(command: list[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{' '.join(command)}: not done after {INSTALL_SECONDS_MAX} s") from error
    if ran.returncode:
        raise Unavailable(f"{' '.join(command)} failed: {ran.stderr.strip()[-800:]}")
