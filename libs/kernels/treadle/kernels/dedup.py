"""Row ids without repeats, and whether that pays: for tiers where fetching a row costs much (disk, another host).

Owns the removal of repeats within a batch, its undoing, and the decision by measurement. Fetching is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels import arguments, spread, unique_rows

__all__ = ["DedupDecision", "Gather", "gather_deduplicated", "measure_dedup"]

Gather = Callable[[NDArray[np.int64], NDArray[np.uint8]], object]
"""Fetches rows: ids [n] int64, into [n, row_bytes] uint8."""

MEASURE_SECONDS = 0.05
BATCH_ROWS, PROBE_ROWS = 4096, 64
GAIN_MIN = 0.1  # of the batch's time: less is not worth a second way through the code


@dataclass(frozen=True, slots=True)
class DedupDecision:
    """Whether removing repeats pays on one tier, with the numbers it was decided on.

    pays:                  use `gather_deduplicated`
    dedup_nanoseconds:     for each id of a batch: finding repeats, and copying rows to where they were asked for
    fetch_nanoseconds:     for each row that the tier fetches
    expected_repeats:      share of a batch's ids that came before in it, as the caller knows its traffic
    repeats_to_break_even: share from which on it costs nothing; above 1: never
    """

    pays: bool
    dedup_nanoseconds: float
    fetch_nanoseconds: float
    expected_repeats: float
    repeats_to_break_even: float


def gather_deduplicated(gather: Gather, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """Fetch each different row once, then copy it to every place that asked for it.

    rows: [...] int64; out: [..., row_bytes] uint8, C-contiguous, the caller's, overwritten
    Returns how many rows were fetched. Raises InvalidArgument, and what `gather` raises: `out` may then hold part of the rows.
    """
    arguments.check_array("rows", rows, np.dtype(np.int64), None)
    if not isinstance(out, np.ndarray) or out.ndim != rows.ndim + 1:
        raise InvalidArgument(f"out: uint8 {[*rows.shape, 'row_bytes']} expected")
    row_bytes = out.shape[-1]
    arguments.check_array("out", out, np.dtype(np.uint8), (*rows.shape, row_bytes), writeable=True)
    unique, inverse = unique_rows(rows)
    flat = out.reshape(-1, row_bytes)
    if len(unique) == rows.size:
        gather(unique, flat)
        return rows.size
    fetched = np.empty((len(unique), row_bytes), dtype=np.uint8)
    gather(unique, fetched)
    spread(fetched, inverse, flat)
    return len(unique)


def measure_dedup(
    gather: Gather, *, row_count: int, row_bytes: int, expected_repeats: float, seconds: float = MEASURE_SECONDS, seed: int = 0
) -> DedupDecision:
    """Time both halves of a batch on this machine, and decide.

    gather:           the tier's fetch, called with random ids below `row_count`
    expected_repeats: share of a batch's ids that came before in it, 0 to 1; of a trace: 1 - U / n
    seconds:          bound of the measurement; a fetch that takes longer is called once, with PROBE_ROWS ids
    Raises InvalidArgument, and what `gather` raises.
    """
    if row_count < 1 or row_bytes < 1 or not 0 <= expected_repeats <= 1:
        raise InvalidArgument(
            f"row_count, row_bytes >= 1 and expected_repeats 0 to 1 expected, got {row_count}, {row_bytes}, {expected_repeats}"
        )
    rng = np.random.default_rng(seed)

    def fetch(rows: int) -> float:
        ids, out = rng.integers(0, row_count, rows), np.empty((rows, row_bytes), dtype=np.uint8)
        return _seconds_of(lambda: gather(ids, out))

    def dedup(rows: int) -> float:
        ids, out = rng.integers(0, row_count, rows), np.empty((rows, row_bytes), dtype=np.uint8)
        fetched = np.zeros((rows, row_bytes), dtype=np.uint8)
        return _seconds_of(lambda: spread(fetched, unique_rows(ids)[1], out))

    return decide(
        dedup_nanoseconds=_each_nanoseconds(dedup, seconds / 2),
        fetch_nanoseconds=_each_nanoseconds(fetch, seconds / 2),
        expected_repeats=expected_repeats,
    )


def decide(*, dedup_nanoseconds: float, fetch_nanoseconds: float, expected_repeats: float) -> DedupDecision:
    """Repeats pay when what is not fetched saves more than looking for it costs, by GAIN_MIN of the batch's time at least."""
    saved = fetch_nanoseconds * expected_repeats - dedup_nanoseconds
    break_even = dedup_nanoseconds / fetch_nanoseconds
    return DedupDecision(saved > GAIN_MIN * fetch_nanoseconds, dedup_nanoseconds, fetch_nanoseconds, expected_repeats, break_even)


def _each_nanoseconds(act: Callable[[int], float], seconds: float) -> float:
    """Median cost of one row over whole batches, for as long as the next one still fits in `seconds`; of a probe where none does."""
    took = act(PROBE_ROWS)
    left = seconds - took
    took = min(took, act(PROBE_ROWS)) if took < left else took  # the first call pays for what comes up only once
    each = [took / PROBE_ROWS]
    for number in count():
        took = each[-1] * BATCH_ROWS
        if took > left or number == 64:
            break
        each.append(act(BATCH_ROWS) / BATCH_ROWS)
        left -= each[-1] * BATCH_ROWS
    return float(np.median(each[1:] or each)) * 1e9


def _seconds_of(act: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    act()
    return max(1, time.perf_counter_ns() - begun) / 1e9
