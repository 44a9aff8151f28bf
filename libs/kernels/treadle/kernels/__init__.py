"""Leaf kernels: n-gram hash, gather, fused lookup, reading rows as numbers, CRC32C; native where built, numpy elsewhere.

Owns loops over arrays, segment files (`treadle.kernels.segment`), ids without repeats and where memory lies (`.numa`).
`quantise`, which writes rows offline, is numpy alone. No threads, no sockets, no knowledge of services.
`TREADLE_KERNELS=numpy` takes the numpy form, `TREADLE_KERNELS=native` refuses to start without the extension.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from treadle.contract import InvalidArgument
from treadle.kernels.hash_plan import HashPlan
from treadle.kernels.prefetch import Calibration, calibrate_prefetch
from treadle.kernels.quantise import quantise

__all__ = [
    "IMPLEMENTATION", "Calibration", "HashPlan", "calibrate_prefetch", "crc32c", "dequantise", "gather_rows", "lookup", "quantise",
    "row_ids", "spread", "unique_rows",
]  # fmt: skip


def _chosen() -> Literal["native", "numpy"]:
    asked = os.environ.get("TREADLE_KERNELS", "")
    if asked not in ("", "native", "numpy"):
        raise InvalidArgument(f"TREADLE_KERNELS: native or numpy, got {asked!r}")
    if asked == "numpy":
        return "numpy"
    try:
        from treadle.kernels import _native  # noqa: F401 - only whether it is there
    except ImportError as error:
        if asked == "native":
            raise ImportError(
                "TREADLE_KERNELS=native: the extension was not built; install treadle-kernels with a C++20 compiler"
            ) from error
        return "numpy"
    return "native"


IMPLEMENTATION: Literal["native", "numpy"] = _chosen()

if TYPE_CHECKING or IMPLEMENTATION == "numpy":
    from treadle.kernels.reference import crc32c, dequantise, gather_rows, lookup, row_ids, spread, unique_rows
else:
    from treadle.kernels.native import crc32c, dequantise, gather_rows, lookup, row_ids, spread, unique_rows
