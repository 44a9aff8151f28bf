"""Requests as they come: two kinds at random moments, so many that a worker is busy for a given part of its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request. `windows`: time to its deadline, as multiples of `alone_seconds`; drawn evenly."""

    name: str
    rows: int
    windows: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alone:
    """What a kind takes when nothing else is to do: from submission to the last row, and of that its pieces."""

    seconds: float
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: `at_ns` after the start."""

    at_ns: int
    kind: int
    window: float


def draw(kinds: tuple[Kind, ...], alone: tuple[Alone, ...], loads: tuple[float, ...], seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals for so long. loads: part of a worker's time that each kind takes; sorted by time."""
    random = np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    for number, (kind, took, load) in enumerate(zip(kinds, alone, loads, strict=True)):
        count = round(seconds * load / took.busy_seconds)
        times: NDArray[np.float64] = np.sort(random.uniform(0.0, seconds, count))
        windows = random.choice(kind.windows, count)
        arrivals += [Arrival(int(at * 1e9), number, float(window)) for at, window in zip(times, windows, strict=True)]
    return sorted(arrivals, key=lambda arrival: arrival.at_ns)
