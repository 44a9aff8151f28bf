"""What the kernels refuse, in one place for the native and the numpy form, and for whoever queues a lookup to run it later.

Owns the checks and their messages. Leaf loops trust what has passed here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, RowLayout, RowOutOfRange, Windows
from treadle.contract.row_layout import ROW_BYTES_MAX, ROW_BYTES_MIN
from treadle.kernels.hash_plan import HashPlan

DEDUP_ROWS_MAX = 1 << 30  # ids of one batch without repeats: their positions fit int32

_INT64, _INT32, _UINT8, _FLOAT32 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.uint8), np.dtype(np.float32)


def check_lookup(plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8]) -> None:
    """All checks of `lookup`: shapes and dtypes, table large enough for the plan, every token in range.

    Raises InvalidArgument naming the argument.
    """
    check_lookup_shapes(plan, table, windows, out)
    check_tokens(plan, windows)


def check_lookup_shapes(plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8]) -> None:
    """The checks of `lookup` that read no token. Raises InvalidArgument."""
    check_windows(plan, windows)
    row_count, row_bytes = table_size(table)
    if row_count < plan.rows_hashed:
        raise InvalidArgument(f"table: {row_count} rows, the hash reaches {plan.rows_hashed}")
    check_array("out", out, _UINT8, (windows.token_count, plan.columns, row_bytes), writeable=True)


def check_gather_shapes(table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """The checks of `gather_rows` that read no id. Raises InvalidArgument."""
    _, row_bytes = table_size(table)
    check_array("rows", rows, _INT64, None)
    check_array("out", out, _UINT8, (*rows.shape, row_bytes), writeable=True)


def check_gather(table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """All checks of `gather_rows`. Raises InvalidArgument for shapes and dtypes, RowOutOfRange naming the first bad id."""
    check_gather_shapes(table, rows, out)
    row_count, _ = table_size(table)
    if rows.size and rows.view(np.uint64).max() >= row_count:  # one pass: a negative id is a large number
        raise row_out_of_range(rows, int(np.argmax((rows < 0) | (rows >= row_count))), row_count)


def check_dedup(rows: NDArray[np.int64]) -> None:
    """All checks of `unique_rows`. Raises InvalidArgument."""
    check_array("rows", rows, _INT64, None)
    if rows.size > DEDUP_ROWS_MAX:
        raise InvalidArgument(f"rows: at most {DEDUP_ROWS_MAX} ids at once, got {rows.size}")


def check_spread(fetched: NDArray[np.uint8], inverse: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
    """All checks of `spread`. Raises InvalidArgument."""
    row_bytes = check_table(fetched)
    check_array("inverse", inverse, _INT32, None)
    check_array("out", out, _UINT8, (inverse.size, row_bytes), writeable=True)
    if inverse.size and not 0 <= inverse.min() <= inverse.max() < len(fetched):
        raise InvalidArgument(f"inverse: positions below {len(fetched)}, the number of rows fetched, expected")


def row_ids_out(plan: HashPlan, windows: Windows, out: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """`out` itself if it fits [T, C] int64, a new array for None. Raises InvalidArgument."""
    shape = (windows.token_count, plan.columns)
    if out is None:
        return np.empty(shape, dtype=np.int64)
    check_array("out", out, _INT64, shape, writeable=True)
    return out


def dequantise_out(rows: NDArray[np.uint8], layout: RowLayout, out: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """`out` itself if it fits `rows` [..., layout.bytes], a new [..., layout.dim] fp32 for None. Raises InvalidArgument."""
    check_array("rows", rows, _UINT8, None)
    if rows.ndim < 1 or rows.shape[-1] != layout.bytes:
        raise InvalidArgument(f"rows: uint8 [..., {layout.bytes}] expected, got {_described(rows)}")
    shape = (*rows.shape[:-1], layout.dim)
    if out is None:
        return np.empty(shape, dtype=np.float32)
    check_array("out", out, _FLOAT32, shape, writeable=True)
    return out


def check_windows(plan: HashPlan, windows: Windows) -> None:
    """Look-back wide enough and int64 arrays aligned; the rest was checked when `windows` was made. Raises InvalidArgument."""
    if windows.lookback.shape[1] < plan.order_max - 1:
        raise InvalidArgument(
            f"lookback: {windows.lookback.shape[1]} columns, orders up to {plan.order_max} need {plan.order_max - 1}"
        )
    if not (windows.tokens.flags.aligned and windows.starts.flags.aligned and windows.lookback.flags.aligned):
        raise InvalidArgument("tokens, starts, lookback: must be aligned")


def check_tokens(plan: HashPlan, windows: Windows) -> None:
    """Every token and look-back id that is not dead lies below the plan's limit. Raises InvalidArgument naming the first one."""
    for name, tokens, dead in (
        ("tokens", windows.tokens, windows.dead),
        ("lookback", windows.lookback, windows.lookback_dead),
    ):
        bad = tokens >= plan.token_limit
        if dead is not None:
            bad &= ~dead  # an image span may carry ids of its own; they are never read
        if bad.any():
            at = int(np.argmax(bad))
            raise InvalidArgument(
                f"{name}: id {tokens.reshape(-1)[at]} at {at} is not below {plan.token_limit}, the number of known ids"
            )


def table_size(table: NDArray[np.uint8]) -> tuple[int, int]:
    """(rows, row_bytes) of a table, or of what stands for one: an object with `row_count` and `row_bytes`. Raises InvalidArgument."""
    if isinstance(table, np.ndarray) or not hasattr(table, "row_count"):
        row_bytes = check_table(table)
        return int(table.shape[0]), row_bytes
    return int(table.row_count), int(table.row_bytes)


def check_table(table: NDArray[np.uint8]) -> int:
    """row_bytes of a table [N, row_bytes] uint8, C-contiguous. Raises InvalidArgument."""
    if not isinstance(table, np.ndarray) or table.dtype != _UINT8 or table.ndim != 2 or not table.flags.c_contiguous:
        raise InvalidArgument(f"table: uint8 [N, row_bytes], C-contiguous, expected, got {_described(table)}")
    row_bytes = int(table.shape[1])
    if not ROW_BYTES_MIN <= row_bytes <= ROW_BYTES_MAX:
        raise InvalidArgument(f"table: rows of {ROW_BYTES_MIN} to {ROW_BYTES_MAX} bytes, got {row_bytes}")
    return row_bytes


def check_array(
    name: str, array: object, dtype: np.dtype[np.generic], shape: tuple[int, ...] | None, *, writeable: bool = False
) -> None:
    """`array` is C-contiguous, aligned, of `dtype` and `shape` (None: any), and may be written where asked. Raises InvalidArgument."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or (shape is not None and array.shape != shape):
        wanted = f"{dtype.name} {list(shape)}" if shape is not None else dtype.name
        raise InvalidArgument(f"{name}: {wanted} expected, got {_described(array)}")
    flags = array.flags
    if not flags.c_contiguous or not flags.aligned:
        raise InvalidArgument(f"{name}: must be C-contiguous and aligned")
    if writeable and not flags.writeable:
        raise InvalidArgument(f"{name}: must be writeable")


def row_out_of_range(rows: NDArray[np.int64], at: int, row_count: int) -> RowOutOfRange:
    """The error for the id at flat position `at`."""
    return RowOutOfRange(f"rows: id {rows.reshape(-1)[at]} at {at} (of {rows.size}) lies outside the table's {row_count} rows")


def unreadable(name: str) -> DataLoss:
    """The error for a mapping one of whose pages could not be read."""
    return DataLoss(
        f"{name}: a page of it cannot be read: the file behind it was truncated, or its memory failed. "
        "What was written to out is undefined; open that version again"
    )


def not_read(names: str) -> InvalidArgument:
    """For arrays that numpy calls equal in type and the native door does not know: an alias, a foreign byte order."""
    return InvalidArgument(
        f"{names}: arrays of this machine's own types expected; make them with np.ascontiguousarray(array, dtype)"
    )


def _described(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    return f"{array.dtype.name} {list(array.shape)}{'' if array.flags.c_contiguous else ', not contiguous'}"
