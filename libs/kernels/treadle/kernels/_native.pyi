"""The extension module: leaf loops behind thin bindings. Use treadle.kernels; these trust their arguments' values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DONE: int
UNREADABLE: int
"""A page of the table could not be read (SIGBUS); what was written to `out` is undefined."""
REFUSED: int
"""An argument is not what is documented; nothing was read or written."""
UNKNOWN_TOKEN: int
"""A token id that is not dead is not below the plan's limit; nothing was read or written."""
NOTHING_FOUND: int
"""A query has no product that is a number; its index is -1."""

class Plan:
    """A hash plan as the headers want it; keeps copies of the small arrays and a reference to the token map."""

    def __init__(
        self,
        family: int,
        orders: NDArray[np.int32],
        heads: int,
        multipliers: NDArray[np.uint64],
        primes: NDArray[np.int64],
        offsets: NDArray[np.int64],
        pad: int,
        eos: int,
        token_map: NDArray[np.int32] | None,
        token_limit: int,
    ) -> None: ...

def row_ids(
    plan: Plan,
    tokens: NDArray[np.int64],
    starts: NDArray[np.int32],
    lookback: NDArray[np.int64],
    dead: NDArray[np.bool_] | None,
    lookback_dead: NDArray[np.bool_] | None,
    out: NDArray[np.int64],
) -> int:
    """DONE, or with `out` untouched UNKNOWN_TOKEN or REFUSED."""

def gather_rows(table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """DONE, UNREADABLE, REFUSED, or with `out` untouched the flat position of the first id out of range. Checks its arguments itself."""

def lookup(
    plan: Plan,
    table: NDArray[np.uint8],
    tokens: NDArray[np.int64],
    starts: NDArray[np.int32],
    lookback: NDArray[np.int64],
    dead: NDArray[np.bool_] | None,
    lookback_dead: NDArray[np.bool_] | None,
    out: NDArray[np.uint8],
) -> int:
    """DONE, UNREADABLE, or with `out` untouched UNKNOWN_TOKEN or REFUSED. Checks its arguments itself."""

def dequantise(
    values: int, scales: int, dim: int, block: int, scale: float, rows: NDArray[np.uint8], out: NDArray[np.float32]
) -> None:
    """`scale` is read where `scales` says that all rows have one."""

def crc32c(data: NDArray[np.uint8], crc: int) -> int | None:
    """None: a page could not be read."""

def flush(data: NDArray[np.uint8]) -> int: ...
def unique_rows(rows: NDArray[np.int64], unique: NDArray[np.int64], inverse: NDArray[np.int32]) -> int:
    """U: how much of `unique` [n] was written. Raises MemoryError."""

def spread(fetched: NDArray[np.uint8], inverse: NDArray[np.int32], out: NDArray[np.uint8]) -> None: ...

PREFETCH_ROWS: int
PREFETCH_ROWS_MAX: int

def prefetch_rows() -> int:
    """Rows ahead that a gather asks for: one number for the process, PREFETCH_ROWS until it is set."""

def set_prefetch_rows(ahead: int) -> None:
    """1 to PREFETCH_ROWS_MAX."""

def time_gather(table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], ahead: int) -> int:
    """Nanoseconds of one gather; -1: a page of the table could not be read."""

def nearest(
    queries: NDArray[np.float32],
    keys: NDArray[Any],
    key_scales: NDArray[np.float16] | None,
    list_keys: NDArray[np.float32] | None,
    list_starts: NDArray[np.int32] | None,
    lists_probed: int,
    index: NDArray[np.int32],
    dot: NDArray[np.float32],
) -> int:
    """DONE, UNREADABLE, NOTHING_FOUND, or with `index` and `dot` untouched REFUSED. Checks its arguments itself."""

class EntryStates:
    """One layer of a dictionary; holds its arrays, and copies of list_starts, thresholds and heads_of. Raises ValueError naming an argument."""

    def __init__(
        self,
        keys: NDArray[Any],
        key_scales: NDArray[np.float16] | None,
        list_keys: NDArray[np.float32] | None,
        list_starts: NDArray[np.int32] | None,
        lists_probed: int,
        states: NDArray[Any],
        state_scales: NDArray[np.float16] | None,
        log_z: NDArray[np.float32],
        thresholds: NDArray[np.float32],
        heads_of: NDArray[np.int32],
        whitening: NDArray[np.float32] | None,
    ) -> None: ...
    def find(
        self,
        queries: NDArray[np.float32],
        rows: NDArray[np.int64] | None,
        states: NDArray[np.float32],
        log_z: NDArray[np.float32],
        cosines: NDArray[np.float32],
        outside: NDArray[np.bool_],
    ) -> int:
        """DONE, UNREADABLE or NOTHING_FOUND (outputs undefined), or with outputs untouched REFUSED. Checks its arguments itself."""

def merge_states(
    a: NDArray[np.float32],
    log_z: NDArray[np.float32],
    rows: NDArray[np.int64] | None,
    other: NDArray[np.float32],
    other_log_z: NDArray[np.float32],
) -> int:
    """DONE, or with `a` and `log_z` untouched REFUSED. Checks its arguments itself."""

class DecodeStep:
    """One step's sequences; holds their caches. Raises ValueError naming an argument."""

    def __init__(
        self, caches: Sequence[NDArray[np.float32]], lengths: NDArray[np.int64], rows: NDArray[np.int64], heads: int
    ) -> None: ...
    def attend(
        self,
        layer: int,
        queries: NDArray[np.float32],
        key_values: NDArray[np.float32],
        a: NDArray[np.float32],
        log_z: NDArray[np.float32],
    ) -> int:
        """DONE, or with nothing written REFUSED. Checks its arguments itself."""

def attend_keys(
    queries: NDArray[np.float32],
    rows: NDArray[np.int64] | None,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    biases: NDArray[np.float32],
    a: NDArray[np.float32],
    log_z: NDArray[np.float32],
) -> int:
    """DONE, or with `a` and `log_z` untouched REFUSED. Checks its arguments itself."""
