"""Whom to ask for which rows: routes of one table, from what its owners hold.

What owners say that they hold is the truth; rendezvous hashing only chooses among those who hold a row, so that a fabric in the
middle of a change, or one whose owners hold whole tables, is still asked evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract.engram_model import EngramModel
from treadle.contract.errors import InvalidArgument
from treadle.contract.owners import Owner
from treadle.contract.placement import rank, seed_of, stretches

REPLICAS_ROUTED = 3  # owners named for each stretch: the first is asked, the others stand by
NOBODY = -1
GAPS_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes of the table of one layer.

    bounds: int64 [S+1], rising from 0 to the rows of the table; stretch s is [bounds[s], bounds[s+1])
    owners: int32 [S, R], places in the list of owners, the preferred first; NOBODY behind the last one that holds the stretch
    """

    bounds: NDArray[np.int64]
    owners: NDArray[np.int32]

    def unheld(self) -> NDArray[np.int64]:
        """Rows that no owner holds, int64 [n, 2]."""
        nobody = self.owners[:, 0] == NOBODY
        return np.stack([self.bounds[:-1][nobody], self.bounds[1:][nobody]], axis=1)


def routes_to(model: EngramModel, layer: int, owners: Sequence[Owner], replicas: int = REPLICAS_ROUTED) -> Routes:
    """Routes of the table of `layer` to `owners`.

    Owners that cannot be reached now come last among those who hold a stretch, those that leave behind all others: they are asked
    only where nobody else is left. Raises InvalidArgument for ranges beyond the table, and for a template.
    """
    table_rows, names = model.table(layer).rows, [owner.name for owner in owners]
    held = [_held(owner, model, layer, table_rows) for owner in owners]
    cut = np.array([stretch.first for stretch in stretches(model, layer)], dtype=np.int64)
    bounds = np.unique(np.concatenate([cut, [table_rows], *(ranges.reshape(-1) for ranges in held)]))
    holds = np.array([_covers(ranges, bounds[:-1]) for ranges in held], dtype=np.bool_).reshape(len(names), len(bounds) - 1)
    order = _preference(model, layer, cut, owners)[:, np.searchsorted(cut, bounds[:-1], side="right") - 1]
    order[~holds] = 4 * len(names)  # behind every holder
    count = min(replicas, len(names)) or 1
    chosen = np.full((len(bounds) - 1, count), NOBODY, dtype=np.int32)
    if names:
        first = np.argsort(order, axis=0, kind="stable")[:count].T
        chosen[:] = np.where(np.take_along_axis(holds.T, first, axis=1), first, NOBODY)
    fresh = np.concatenate([[True], (chosen[1:] != chosen[:-1]).any(axis=1)])  # neighbours with the same owners are one stretch
    return Routes(np.concatenate([bounds[:-1][fresh], bounds[-1:]]), np.ascontiguousarray(chosen[fresh]))


def gaps_text(routes: dict[int, Routes]) -> str:
    """What nobody holds, for a message; empty where everything is held."""
    gaps = [f"layer {layer} rows {first} to {last}" for layer, each in routes.items() for first, last in each.unheld()]
    more = f" and {len(gaps) - GAPS_NAMED_MAX} more" if len(gaps) > GAPS_NAMED_MAX else ""
    return ", ".join(gaps[:GAPS_NAMED_MAX]) + more


def _held(owner: Owner, model: EngramModel, layer: int, table_rows: int) -> NDArray[np.int64]:
    holding = owner.holding(model.name, model.version)
    ranges = np.empty((0, 2), dtype=np.int64) if holding is None else holding.ranges(layer)
    if len(ranges) and ranges[-1, 1] > table_rows:
        raise InvalidArgument(f"owner {owner.name} says it holds rows to {ranges[-1, 1]} of layer {layer}, which has {table_rows}")
    return ranges


def _covers(ranges: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.bool_]:
    if not len(ranges):
        return np.zeros(len(firsts), dtype=np.bool_)
    place = np.searchsorted(ranges[:, 0], firsts, side="right") - 1
    covered: NDArray[np.bool_] = (place >= 0) & (firsts < ranges[place, 1])
    return covered


def _preference(model: EngramModel, layer: int, cut: NDArray[np.int64], owners: Sequence[Owner]) -> NDArray[np.int64]:
    """int64 [owners, stretches]: the place of each owner in the order in which it is asked, before what it holds is looked at."""
    seed = seed_of(model)
    ranks = np.array([[rank(layer, int(first), seed, owner.name) for first in cut] for owner in owners], dtype=np.uint64)
    ranks = ranks.reshape(len(owners), len(cut))
    places = np.argsort(np.argsort(ranks, axis=0, kind="stable"), axis=0, kind="stable")
    behind = np.array([len(owners) * ((not owner.reachable) + 2 * owner.leaving) for owner in owners], dtype=np.int64)
    return places + behind[:, None]
