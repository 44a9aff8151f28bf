"""How far ahead of its copy the gather asks for a row: found by measurement on the table at hand.

Owns the measurement and the choice. The distance itself is one number for the process (header `gather.hpp`), read once a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, Unavailable
from treadle.kernels import arguments

__all__ = ["Calibration", "calibrate_prefetch"]

CALIBRATION_SECONDS = 0.05
DISTANCES = (4, 6, 8, 12, 16, 24, 32, 48)  # rows ahead
ROWS_MAX, ROWS_MIN = 2048, 256  # of one timed gather; below the least, its start counts for more than its rows
ROUNDS_MIN, ROUNDS_MAX = 8, 60
GAIN_MIN = 0.02  # what changing the distance must save to be worth a difference between two processes
PROBES = (64, 256, 1024)  # rows of the gathers that tell what one costs


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, what was chosen, and why.

    distance:                 rows ahead that are best
    default_distance:         what it is compared with
    microseconds_by_distance: median of a gather of `rows` rows, by distance; empty where nothing could be measured in time
    rows, rounds:             rows of each gather, gathers at each distance
    gain:                     share of the time saved against the default, 0 where that stays
    noise:                    three standard errors of that share: less is no gain
    reason:                   a sentence for people
    """

    distance: int
    default_distance: int
    microseconds_by_distance: Mapping[int, float]
    rows: int
    rounds: int
    gain: float
    noise: float
    reason: str


def calibrate_prefetch(
    table: NDArray[np.uint8], *, seconds: float = CALIBRATION_SECONDS, seed: int = 0, use: bool = True
) -> Calibration:
    """Measure the gather at several distances on random rows of `table`; use the best from now on, in the whole process.

    table:   [N, row_bytes] uint8, C-contiguous, its pages present (a mapping that was populated): page faults would hide the rest
    seconds: bound of the whole measurement, but for the gather in progress; other threads run meanwhile
    use:     False: only tell, change nothing
    The default stays unless another distance beats it by more than the noise. Raises InvalidArgument for the table, Unavailable
    where the native kernels were not built (numpy has no such distance), DataLoss where a page cannot be read.
    """
    try:
        from treadle.kernels import _native
    except ImportError as error:
        raise Unavailable("prefetch distance: only the native kernels have one; install with a C++20 compiler") from error
    row_bytes = arguments.check_table(table)
    if not len(table):
        raise InvalidArgument("table: no rows to measure with")
    ends, rng = time.perf_counter() + seconds, np.random.default_rng(seed)
    out = np.zeros((ROWS_MAX, row_bytes), dtype=np.uint8)

    def microseconds(distance: int, rows: int) -> float:
        took_ns = _native.time_gather(table, rng.integers(0, len(table), rows), out[:rows], distance)
        if took_ns < 0:
            raise arguments.unreadable("table")
        return max(took_ns, 1) / 1e3

    default, rows = _native.PREFETCH_ROWS, 0
    for probe in PROBES:  # the last one counts: the first ones pay for what comes up only once
        row_us = microseconds(default, probe) / probe
        rows = int(min(ROWS_MAX, seconds * 1e6 / (row_us * len(DISTANCES) * 2 * ROUNDS_MIN)))
        if rows < ROWS_MIN:  # a fetch from disk, or a machine too busy to tell
            break
    found = chosen(_rounds(microseconds, rows, ends, rng) if rows >= ROWS_MIN else [], default, rows)
    if use:
        _native.set_prefetch_rows(found.distance)
    return found


def _rounds(
    microseconds: Callable[[int, int], float], rows: int, ends: float, rng: np.random.Generator
) -> list[Mapping[int, float]]:
    """Rounds of one gather at each distance, in an order drawn anew, until `ends`; a round cut short by it is dropped."""
    rounds: list[Mapping[int, float]] = []
    while len(rounds) < ROUNDS_MAX:
        this_round: dict[int, float] = {}
        for distance in rng.permutation(DISTANCES).tolist():
            if time.perf_counter() > ends:
                return rounds
            this_round[distance] = microseconds(distance, rows)
        rounds.append(this_round)
    return rounds


def chosen(measured: Sequence[Mapping[int, float]], default: int, rows: int) -> Calibration:
    """The decision on microseconds by distance, one mapping for each round."""
    rounds = len(measured)
    if rounds < ROUNDS_MIN:
        reason = f"{default} rows ahead, the default: {rounds} rounds within the bound tell nothing; are the pages present, and is a core free?"
        return Calibration(default, default, {}, rows, rounds, 0.0, 0.0, reason)
    samples = {distance: np.array([each[distance] for each in measured]) for distance in DISTANCES}
    base = samples[default]
    medians = {distance: float(np.median(values)) for distance, values in samples.items()}
    ratios = {distance: values / base for distance, values in samples.items() if distance != default}
    best = min(ratios, key=lambda distance: float(np.median(ratios[distance])))
    middle = float(np.median(ratios[best]))
    spread = float(np.median(np.abs(ratios[best] - middle)))
    noise = max(GAIN_MIN, 3 * 1.2533 * 1.4826 * spread / rounds**0.5)  # of a median, its deviation estimated by the median one
    gain = 1 - middle
    if gain <= noise:
        reason = f"{default} rows ahead, the default: {best} changes a gather by {-gain:+.1%}, the noise is {noise:.1%}"
        return Calibration(default, default, medians, rows, rounds, 0.0, noise, reason)
    reason = f"{best} rows ahead: saves {gain:.1%} of a gather against {default}, the noise is {noise:.1%}"
    return Calibration(best, default, medians, rows, rounds, gain, noise, reason)
