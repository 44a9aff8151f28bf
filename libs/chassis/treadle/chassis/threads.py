"""Compute threads of a process, fixed before numpy or torch are imported."""

from __future__ import annotations

import os
import sys

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def set_compute_threads(count: int = 1) -> None:
    """Let numeric libraries use `count` threads that sleep while they wait.

    Two spinning OpenMP threads on a busy two-core machine turned 0.2 ms into 7-15 ms, so waiting is passive. Call it before
    torch is imported: OpenMP reads its variables once. Raises RuntimeError if torch is there already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("set_compute_threads must come before torch is imported")
    for name in _VARIABLES:
        os.environ[name] = str(count)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
