"""Builds the baselines; they exist to be measured against, so without a compiler only the figures that need them are refused."""

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "treadle_bench._baselines",
            ["src/baselines.cpp"],
            include_dirs=["../libs/kernels/include"],
            cxx_std=20,
            extra_compile_args=["-O3", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)
