"""Builds the extension where a C++20 compiler is found; without one the package is pure numpy."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

native = Pybind11Extension(
    "treadle.kernels._native",
    sorted(glob("src/*.cpp")),
    depends=glob("include/treadle/kernels/*.hpp") + glob("src/*.hpp"),
    cxx_std=20,
    extra_compile_args=["-O3", "-fno-math-errno", "-Wall", "-Wextra"],  # no -march: wider code is chosen at run time
)
native.optional = True

ParallelCompile(default=0).install()  # one file on each core
setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
