"""The library compiled as `make cuda` does, once, and what a machine without compiler or GPU skips."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("treadle.cuda", reason="treadle-cuda is not installed: make install, or PYTHONPATH=libs/cuda")

ROOM = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def build_script() -> ModuleType:
    """`libs/cuda/setup.py`, without running it."""
    spec = importlib.util.spec_from_file_location("treadle_cuda_setup", ROOM / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="session")
def compiled(build_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, by this machine's nvcc."""
    if not (shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")):
        pytest.skip("there is no nvcc: install the CUDA toolkit (12 or 13) to compile the CUDA path")
    path = tmp_path_factory.mktemp("cuda") / "libtreadle_cuda.so"
    build_script.build(path)
    return path


@pytest.fixture
def gpu() -> str:
    """Name of a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here (or torch was built without CUDA): the gathers were not run on one")
    return "cuda"
