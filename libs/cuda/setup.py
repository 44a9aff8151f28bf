"""Builds the CUDA library with nvcc. Wheels are not made without it; an editable install is, and says at its first use what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ARCHITECTURES = (80, 86, 89, 90)  # Ampere to Hopper; newer ones by the PTX of the last
LIBRARY = Path("treadle/cuda/libtreadle_cuda.so")


def nvcc() -> str:
    """$NVCC, or what the path or /usr/local/cuda has."""
    found = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if not found:
        raise SystemExit("treadle-cuda: no nvcc; install the CUDA toolkit (12 or 13), or name it: NVCC=/path/to/nvcc")
    return found


def command(output: Path) -> list[str]:
    """What compiles the library: the runtime linked statically, so that it loads with any driver that is new enough."""
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    ptx = f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"
    flags = [
        "-O3",
        "-std=c++17",
        "-shared",
        "-cudart=static",
        "-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=default",
        "-Werror=all-warnings",
    ]
    return [nvcc(), *flags, *code, ptx, "-o", str(output), str(HERE / "src" / "treadle_cuda.cu")]


def build(output: Path) -> None:
    """Compile. Raises CalledProcessError, after nvcc's own words."""
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(output), check=True)


class BuildLibrary(Command):
    """`python setup.py build_library`: into the source tree, as `make cuda` does."""

    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        """See setuptools."""

    def finalize_options(self) -> None:
        """See setuptools."""

    def run(self) -> None:
        """See setuptools."""
        build(HERE / LIBRARY)


class BuildWheel(build_py):
    """A wheel holds the library; an editable install uses what `build_library` made, or says that it was not made."""

    def run(self) -> None:
        """See setuptools."""
        super().run()
        if not self.editable_mode:
            build(Path(self.build_lib) / LIBRARY)


class Binary(Distribution):
    """Its wheels belong to a platform."""

    def has_ext_modules(self) -> bool:
        """See setuptools."""
        return True


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWheel, "build_library": BuildLibrary}, distclass=Binary)
