"""Which rows of a table lie in a segment, where its owner keeps only some: ranges of rows, and the chunks that they touch.

Owns the arithmetic and the text of ranges. Which owner keeps which rows is for the placement to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument
from treadle.contract.table_manifest import CHUNK_BYTES

Ranges = tuple[tuple[int, int], ...]  # rows [first, last), rising, not touching each other; none: no row
HELD_RANGES_MAX = 1 << 14  # of one table: 384 M rows in stretches of 24,000; their text is 384 KiB
HELD_KEY = "held"  # in a segment's metadata


def checked_ranges(ranges: Sequence[tuple[int, int]], rows: int) -> Ranges:
    """The same rows as few rising ranges. Raises InvalidArgument if one is empty, overlaps another or leaves the table."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if not 0 <= first < last <= rows:
            raise InvalidArgument(f"held: rows [{first}, {last}) are no range of a table of {rows} rows")
        if merged and first < merged[-1][1]:
            raise InvalidArgument(f"held: row {first} is in two ranges")
        if merged and first == merged[-1][1]:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    if len(merged) > HELD_RANGES_MAX:
        raise InvalidArgument(f"held: at most {HELD_RANGES_MAX} ranges of rows, got {len(merged)}; make the stretches longer")
    return tuple(merged)


def chunk_runs(held: Ranges | None, row_bytes: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Runs [first, last) of the chunks that these rows touch; all of `chunks` for None."""
    if held is None:
        return ((0, chunks),)
    runs: list[tuple[int, int]] = []
    for first, last in held:
        begin, end = first * row_bytes // CHUNK_BYTES, -(-last * row_bytes // CHUNK_BYTES)
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((begin, end))
    return tuple(runs)


def chunks_in(runs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The chunks of some runs, rising."""
    for first, last in runs:
        yield from range(first, last)


def ranges_text(held: Ranges) -> str:
    """As a segment's metadata holds them."""
    return json.dumps(held, separators=(",", ":"))


def ranges_of(text: str, rows: int) -> Ranges:
    """Back from the text. Raises DataLoss if it is not what was written."""
    try:
        return checked_ranges([(int(first), int(last)) for first, last in json.loads(text)], rows)
    except (ValueError, TypeError, RecursionError, InvalidArgument) as error:
        raise DataLoss(f"the header's ranges of rows are damaged: {error}") from error


def which_held(ids: NDArray[np.int64], held: Ranges) -> NDArray[np.bool_]:
    """[n] bool: whether each of `ids` [n] lies in a range."""
    edges = np.array(held, dtype=np.int64).reshape(-1)  # rows of a range lie behind an odd number of edges
    inside: NDArray[np.bool_] = np.searchsorted(edges, ids, side="right") % 2 == 1
    return inside


def first_not_held(ids: NDArray[np.int64], held: Ranges) -> int | None:
    """Place of the first of `ids` [n] that lies in no range; None if all do."""
    inside = which_held(ids, held)
    return None if inside.all() else int(np.argmin(inside))
