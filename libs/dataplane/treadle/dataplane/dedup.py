"""Batches without repeats, and whether that pays on a tier: measured on this machine, both ways, before it is used.

Owns the decision. Finding repeats and undoing it is native (`dedup_rows`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.dataplane.extension import native_module
from treadle.dataplane.faults import error_of

Gather = Callable[[NDArray[np.int64], NDArray[np.uint8]], object]
"""Fetches rows: ids [n] int64, into [n, row_bytes] uint8."""
Clock = Callable[[], int]
"""Nanoseconds since some moment."""

REPEATS = 0.25  # of a batch's ids: what Zipf traffic (1.05) of 4096 ids has at the least
MEASURE_SECONDS = 0.05
BATCH_ROWS, PROBE_ROWS, ROUNDS_MAX = 4096, 256, 16
GAIN_MIN = 0.1  # of the batch's time: less is not worth a second way through the code


@dataclass(frozen=True, slots=True)
class DedupDecision:
    """Whether removing repeats pays on one tier, with the numbers it was decided on.

    plain_nanoseconds, dedup_nanoseconds: for each id of a batch, as it is and without its repeats
    repeats: share of the batch's ids that came before in it
    """

    pays: bool
    plain_nanoseconds: float
    dedup_nanoseconds: float
    repeats: float


def without_repeats(store: Any) -> Any:
    """A native store (RowStore) of the same rows that asks `store` for each row of a batch once. Raises Unavailable where not built."""
    return native_module().dedup_rows(store)


def memory_rows(rows: NDArray[np.uint8], held: NDArray[np.int64] | None) -> Any:
    """A native store of rows [n, row_bytes] in memory, which the caller keeps; held: as `disk_rows`. Raises Unavailable where not built."""
    return native_module().memory_rows(rows, held)


def gather_of(store: Any) -> Gather:
    """Gathers of a native store, as `measure_dedup` times them; they raise what a fault stands for."""

    def gather(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        if fault := store.gather(ids, out):
            raise error_of(fault, "measuring a tier")

    return gather


def measure_store(store: Any, stretch: tuple[int, int] | None = None) -> DedupDecision:
    """`measure_dedup` of a native store. stretch: rows [first, last) that may be asked for; None: all."""
    first, last = stretch or (0, store.row_count)
    return measure_dedup(gather_of(store), gather_of(without_repeats(store)), first=first, last=last, row_bytes=store.row_bytes)


def measure_dedup(
    plain: Gather,
    dedup: Gather,
    *,
    first: int,
    last: int,
    row_bytes: int,
    repeats: float = REPEATS,
    seconds: float = MEASURE_SECONDS,
    seed: int = 0,
    clock: Clock = time.perf_counter_ns,
) -> DedupDecision:
    """Time batches of random ids of [first, last) both ways, in turn, and decide.

    repeats: share of a batch's ids that came before in it, 0 to 1
    seconds: bound of the measurement; a tier that takes longer for a batch is asked twice each way, for PROBE_ROWS ids, and the quicker
             time counts: the first pays for what comes up only once, and either may have lost its core
    Raises InvalidArgument, and what the gathers raise.
    """
    if not 0 <= first < last or row_bytes < 1 or not 0 <= repeats <= 1:
        raise InvalidArgument(f"rows first < last and repeats 0 to 1 expected, got {first}, {last}, {row_bytes} bytes, {repeats}")
    rng = np.random.default_rng(seed)

    def each_seconds(gather: Gather, rows: int) -> float:
        ids = rng.integers(first, last, rows)
        again = rng.random(rows) < repeats
        again[0] = False
        ids[again] = rng.choice(ids[~again], int(again.sum()))
        out = np.zeros((rows, row_bytes), dtype=np.uint8)
        begun = clock()
        gather(ids, out)
        return max(1, clock() - begun) / 1e9 / rows

    def both_seconds(rows: int) -> tuple[float, float]:
        return each_seconds(plain, rows), each_seconds(dedup, rows)

    end = clock() + seconds * 1e9
    probes = both_seconds(PROBE_ROWS), both_seconds(PROBE_ROWS)
    took = [(min(each[0] for each in probes), min(each[1] for each in probes))]
    while len(took) <= ROUNDS_MAX and clock() + sum(took[-1]) * BATCH_ROWS * 1e9 < end:
        took.append(both_seconds(BATCH_ROWS))
    as_it_is, without = np.median(took[1:] or took, axis=0)
    return DedupDecision(bool(without < (1 - GAIN_MIN) * as_it_is), float(as_it_is) * 1e9, float(without) * 1e9, repeats)
