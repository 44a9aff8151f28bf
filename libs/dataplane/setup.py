"""Builds the native queue; without a C++20 compiler the package falls back on Python threads."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile(default=0).install()  # one file on each core
setup(
    ext_modules=[
        Pybind11Extension(
            "treadle.dataplane._native",
            sorted(glob("src/*.cpp")),
            include_dirs=["../kernels/include"],
            depends=glob("src/*.hpp") + glob("../kernels/include/treadle/kernels/*.hpp"),
            cxx_std=20,
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
