"""The copies of the loops for other CPUs, which the extension module does not choose here; under sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = ("kernel_paths.cpp", "attention_paths.cpp")  # apart, since a compiler takes its time for each


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the copies for other CPUs stay untested")
@pytest.mark.parametrize("source", SOURCES)
def test_all_copies_of_the_loops_agree_within_bounds(source: str, tmp_path: Path) -> None:
    program = tmp_path / "kernel_paths"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build = [
        "g++",
        "-std=c++20",
        "-O1",
        "-g1",
        "-Wall",
        "-Wextra",
        "-Werror",
        *sanitizers,
        str(Path(__file__).with_name(source)),
        "-o",
        str(program),
    ]
    built = subprocess.run(build, capture_output=True, text=True, timeout=200, check=False)
    if "cannot find -lasan" in built.stderr or "cannot find -lubsan" in built.stderr:
        pytest.skip("g++ without sanitizer libraries: the copies for other CPUs stay untested")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False, env=os.environ | {"LD_PRELOAD": ""})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("same: plain baseline")
