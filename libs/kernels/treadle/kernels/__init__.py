"""Leaf kernels: n-gram hash, gather, fused lookup, rows as numbers, nearest entry and its state, CRC32C; native where built, numpy elsewhere.

Owns loops over arrays, segment files (`treadle.kernels.segment`), ids without repeats and where memory lies (`.numa`).
`quantise`, which writes rows offline, `entry_lists`, which sorts entries for `nearest`, and `as_numbers` are numpy alone. No threads,
no sockets, no knowledge of services.
`TREADLE_KERNELS=numpy` takes the numpy form, `TREADLE_KERNELS=native` refuses to start without the extension.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from treadle.contract import InvalidArgument
from treadle.kernels.at_rest import as_numbers
from treadle.kernels.entry_states_arguments import EntryArrays, FoundEntries
from treadle.kernels.hash_plan import HashPlan
from treadle.kernels.lists import entry_lists
from treadle.kernels.prefetch import Calibration, calibrate_prefetch
from treadle.kernels.quantise import quantise

__all__ = [
    "IMPLEMENTATION", "Calibration", "DecodeStep", "EntryArrays", "EntryStates", "FoundEntries", "HashPlan", "as_numbers",
    "attend_keys", "calibrate_prefetch", "crc32c", "dequantise", "entry_lists", "gather_rows", "lookup", "merge_states", "nearest", "quantise", "row_ids", "spread", "unique_rows",
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
    from treadle.kernels.decode_reference import DecodeStep, attend_keys
    from treadle.kernels.entry_states_reference import EntryStates, merge_states
    from treadle.kernels.reference import crc32c, dequantise, gather_rows, lookup, nearest, row_ids, spread, unique_rows
else:
    from treadle.kernels.decode_native import DecodeStep, attend_keys
    from treadle.kernels.entry_states_native import EntryStates, merge_states
    from treadle.kernels.native import crc32c, dequantise, gather_rows, lookup, nearest, row_ids, spread, unique_rows
