"""How a call is timed, so that all figures mean the same."""

from __future__ import annotations

import time
from collections.abc import Callable

Timed = Callable[[int], float]
"""One round, by its number: microseconds."""


def timed(act: Callable[[int], object]) -> Timed:
    """`act` by the clock; it gets the number, and what it returns is dropped."""

    def run(number: int) -> float:
        begun = time.perf_counter_ns()
        act(number)
        return (time.perf_counter_ns() - begun) / 1e3

    return run


def on_fresh_sets(act: Timed, place: int, variants: int, sets: int) -> Timed:
    """`act` by the number of a set of ids that no other variant has just used, so that no cache holds its rows.

    place: of this variant among as many as there are; sets: how many there are to choose from
    """
    return lambda number: act((number * variants + place) % sets)
