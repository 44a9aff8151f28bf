"""The kernels in C++: the same functions as `reference`, faster, and with the GIL dropped while they run.

Owns the step from checked arrays to the extension module. Docstrings with shapes and errors stand in `reference`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Family, ResourceExhausted, RowLayout, Windows
from treadle.kernels import _native, arguments
from treadle.kernels.crc_reference import BytesLike, flat_bytes
from treadle.kernels.hash_plan import HashPlan
from treadle.kernels.nearest_arguments import check_nearest, nothing_found

__all__ = ["crc32c", "dequantise", "gather_rows", "lookup", "nearest", "row_ids", "spread", "unique_rows"]

_FAMILY = {Family.DEMO: 0, Family.DEEPSEEK_V41: 1, Family.QWEN_PLE: 2}  # the header's enum
_VALUES = {"bf16": 0, "fp16": 1, "fp32": 2, "fp8_e4m3": 3, "u8": 4, "int4": 5, "nf4": 6}  # likewise
_SCALES = {"ue8m0": 1, "fp16": 2, "fp32": 3}  # inline ones
_NO_SCALE, _ALL_ROWS = 0, 4
_plans: WeakKeyDictionary[HashPlan, _native.Plan] = WeakKeyDictionary()


def row_ids(plan: HashPlan, windows: Windows, out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Row ids [T, C] int64 of every token; see `reference.row_ids`."""
    out = arguments.row_ids_out(plan, windows, out)
    state = _native.row_ids(
        _native_plan(plan), windows.tokens, windows.starts, windows.lookback, windows.dead, windows.lookback_dead, out
    )
    if state != _native.DONE:
        arguments.check_windows(plan, windows)
        arguments.check_tokens(plan, windows)  # finds it again and names it
        raise arguments.not_read("tokens, starts, lookback, dead, lookback_dead")
    return out


def gather_rows(table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy table[rows] into out; see `reference.gather_rows`."""
    state = _native.gather_rows(table, rows, out)
    if state != _native.DONE:
        raise _gather_error(state, table, rows, out)


def lookup(plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8]) -> None:
    """Hash and gather in one pass; see `reference.lookup`."""
    state = _native.lookup(
        _native_plan(plan), table, windows.tokens, windows.starts, windows.lookback, windows.dead, windows.lookback_dead, out
    )
    if state == _native.DONE:
        return
    if state == _native.UNREADABLE:
        raise arguments.unreadable("table")
    arguments.check_lookup(plan, table, windows, out)  # finds it again and names it
    raise arguments.not_read("table, out and the arrays of windows")


def dequantise(rows: NDArray[np.uint8], layout: RowLayout, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Read rows as numbers; see `dequantise_reference.dequantise`."""
    out = arguments.dequantise_out(rows, layout, out)
    scales, block, factor = _NO_SCALE, layout.dim, 1.0
    if layout.inline_scale is not None:
        scales, block = _SCALES[layout.inline_scale.dtype], layout.inline_scale.block
    elif layout.scale is not None:
        scales, factor = _ALL_ROWS, layout.scale.value
    _native.dequantise(_VALUES[layout.dtype], scales, layout.dim, block, factor, rows, out)
    return out


def crc32c(data: BytesLike, crc: int = 0) -> int:
    """CRC32C of `data`, going on from `crc`; see `crc_reference.crc32c`."""
    after = _native.crc32c(flat_bytes(data, crc), crc)
    if after is None:
        raise arguments.unreadable("data")
    return after


def unique_rows(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Ids without repeats, and where each went; see `dedup_reference.unique_rows`."""
    arguments.check_dedup(rows)
    unique, inverse = np.empty(rows.size, dtype=np.int64), np.empty(rows.size, dtype=np.int32)
    try:
        found = _native.unique_rows(rows, unique, inverse)
    except MemoryError as error:
        raise ResourceExhausted(f"rows: no memory for a table of {rows.size} ids; ask for fewer at once") from error
    return unique[:found], inverse


def spread(fetched: NDArray[np.uint8], inverse: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
    """Copy fetched[inverse] into out; see `dedup_reference.spread`."""
    arguments.check_spread(fetched, inverse, out)
    _native.spread(fetched, inverse, out)


def nearest(
    queries: NDArray[np.float32], keys: NDArray[Any], key_scales: NDArray[np.float16] | None = None,
    list_keys: NDArray[np.float32] | None = None, list_starts: NDArray[np.int32] | None = None, lists_probed: int = 16,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:  # fmt: skip
    """The entry with the largest dot product for each query, and that product; see `nearest_reference.nearest`."""
    shape = np.shape(queries)[:-1]
    index, dot = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)
    state = _native.nearest(queries, keys, key_scales, list_keys, list_starts, lists_probed, index, dot)
    if state == _native.DONE:
        return index, dot
    if state == _native.UNREADABLE:
        raise arguments.unreadable("keys, key_scales, list_keys, list_starts")
    if state == _native.NOTHING_FOUND:
        raise nothing_found()
    check_nearest(queries, keys, key_scales, list_keys, list_starts, lists_probed)  # names what is wrong
    raise arguments.not_read("queries, keys, key_scales, list_keys, list_starts")


def _gather_error(state: int, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> Exception:
    if state >= 0:
        return arguments.row_out_of_range(rows, state, table.shape[0])
    if state == _native.UNREADABLE:
        return arguments.unreadable("table")
    arguments.check_gather_shapes(table, rows, out)  # names what is wrong
    return arguments.not_read("table, rows, out")


def _native_plan(plan: HashPlan) -> _native.Plan:
    native = _plans.get(plan)
    if native is None:
        native = _native.Plan(
            _FAMILY[plan.family], plan.orders, plan.heads, plan.multipliers, plan.primes, plan.offsets, plan.pad, plan.eos,
            plan.token_map, plan.token_limit,
        )  # fmt: skip
        _plans[plan] = native
    return native
