"""Which engine the worker of a fabric runs, and by which Python: vLLM lives in an environment of its own.

Owns how that environment is found. Does not start it (fabric).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from enum import StrEnum
from pathlib import Path

from treadle.contract.errors import NotFound

VLLM_ENVIRONMENT = ".venv-vllm"  # what `make vllm-env` makes, beside the environment that this command runs in


class WorkerEngine(StrEnum):
    """embedded: the engine on CPU that comes with treadle. vllm: vLLM, from `make vllm-env`."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


def worker_command(engine: WorkerEngine, given: str, module: str) -> tuple[str, ...]:
    """The command of the worker, an absolute path first, without its settings.

    given:  as the user said it, in the shell's words; empty: this environment's Python, or for vllm the one that was made beside it
    module: the worker's Python module
    Raises NotFound, saying what to do, where there is no such program.
    """
    if given:
        program, *words = shlex.split(given)
        found = shutil.which(program)
        if found is None:
            raise NotFound(f"--worker-command: {program} is not a program that can be run")
        return (str(Path(found).absolute()), *words)
    if engine is WorkerEngine.EMBEDDED:
        return (sys.executable, "-m", module)
    python = Path(sys.prefix).parent / VLLM_ENVIRONMENT / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise NotFound(
            f"--engine vllm: there is no {python}; `make vllm-env` makes it, or say --worker-command 'PYTHON -m {module}'"
        )
    return (str(python), "-m", module)
