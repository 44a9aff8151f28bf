"""The native extension, where it was built. TREADLE_DATAPLANE=python leaves it, native insists on it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Literal

from treadle.contract import InvalidArgument, Unavailable

Implementation = Literal["native", "python"]


def _native() -> Any:
    asked = os.environ.get("TREADLE_DATAPLANE", "")
    if asked not in ("", "native", "python"):
        raise InvalidArgument(f"TREADLE_DATAPLANE: native or python, got {asked!r}")
    if asked == "python":
        return None
    try:
        return import_module("treadle.dataplane._native")
    except ImportError:
        if asked == "native":
            raise
        return None


NATIVE: Any = _native()
IMPLEMENTATION: Implementation = "python" if NATIVE is None else "native"


def native_module() -> Any:
    """The extension module. Raises Unavailable where it was not built, or was left out by TREADLE_DATAPLANE=python."""
    if NATIVE is None:
        raise Unavailable(
            "dataplane: the native extension is not there; build it with a C++20 compiler, or unset TREADLE_DATAPLANE"
        )
    return NATIVE
