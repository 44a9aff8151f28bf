"""Which pool owns which rows: tables cut into stretches, every stretch with its owners by rendezvous hashing.

Everybody who knows the manifest, the owners' names and the number of replicas computes the same owners, on any machine and
Python; nobody is asked. An owner that joins takes only what it now owns itself, and one that leaves only gives away its own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract.engram_model import ROWS_MAX, EngramModel
from treadle.contract.errors import InvalidArgument
from treadle.contract.version import check_name

OWNERS_MAX = 64  # of one fabric; every client holds a connection to each
STRETCHES_WANTED = 256  # of a table, where nobody says: three owners then hold within a tenth of the same share
STRETCH_ROWS_MIN = 1024  # less is not worth a route of its own
STRETCHES_MAX = 1 << 14  # of a table: a route is found by bisection, and owners are hashed one by one


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [first, last) of the table of `layer`, all of one head (column of the hash)."""

    layer: int
    head: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How the tables of a model are spread: by whom, how many times, in stretches of at most how many rows.

    stretch_rows: 0: as many as make about STRETCHES_WANTED stretches of a table
    Raises InvalidArgument for names that are no names or not distinct, and for more replicas than owners.
    """

    owners: tuple[str, ...]
    replicas: int
    stretch_rows: int = 0

    def __post_init__(self) -> None:
        _check_owners(self.owners, self.replicas)
        if not (self.stretch_rows == 0 or STRETCH_ROWS_MIN <= self.stretch_rows <= ROWS_MAX):
            raise InvalidArgument(f"stretch_rows: 0, or {STRETCH_ROWS_MIN} to {ROWS_MAX}, got {self.stretch_rows}")


def stretches(model: EngramModel, layer: int, stretch_rows: int = 0) -> list[Stretch]:
    """The stretches of one table, in order and without gaps; none crosses a head, none has more than `stretch_rows` rows.

    Rows beyond what the hash reaches belong to the last one, which may be longer for it.
    Raises InvalidArgument for a layer without a table, and a `stretch_rows` that makes more than STRETCHES_MAX.
    """
    reached = model.rows_hashed(layer)
    size = stretch_rows or max(STRETCH_ROWS_MIN, -(-reached // STRETCHES_WANTED))
    heads = list(itertools.chain(*model.primes[model.layer_position(layer)]))
    count = sum(-(-rows // size) for rows in heads)
    if count > STRETCHES_MAX:
        raise InvalidArgument(f"stretch_rows: {size} rows make {count} stretches of layer {layer}, the limit is {STRETCHES_MAX}")
    made: list[Stretch] = []
    begin = 0
    for head, rows in enumerate(heads):
        made += [Stretch(layer, head, begin + at, begin + min(at + size, rows)) for at in range(0, rows, size)]
        begin += rows
    table_rows = model.table(layer).rows if model.tables else reached
    made[-1] = Stretch(layer, made[-1].head, made[-1].first, table_rows)
    return made


def seed_of(model: EngramModel) -> str:
    """What the owners of a model's stretches depend on: its template, which a loader knows before it has read a row."""
    return model.template.version


def owners_of(stretch: Stretch, seed: str, owners: Sequence[str], replicas: int) -> tuple[str, ...]:
    """The owners of a stretch, the preferred first: `replicas` of `owners`, whatever their order.

    seed: `seed_of` the model; owners, replicas: as a Spread has checked them
    """
    return preferred(stretch, seed, owners)[:replicas]


def preferred(stretch: Stretch, seed: str, owners: Sequence[str]) -> tuple[str, ...]:
    """All of `owners` in the order in which they own a stretch; names are taken as they are."""
    return tuple(sorted(owners, key=lambda owner: (rank(stretch.layer, stretch.first, seed, owner), owner)))


def rank(layer: int, first: int, seed: str, owner: str) -> int:
    """Of the owners of the stretch that begins at row `first`, the lowest rank is preferred. 64 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{layer}/{first}/{owner}".encode(), digest_size=8).digest(), "big")


def held_by(owner: str, model: EngramModel, spread: Spread) -> dict[int, NDArray[np.int64]]:
    """The rows that `owner` holds: by layer, int64 [n, 2] of [first, last), rising, neighbours joined; n = 0 for none.

    Raises InvalidArgument for an owner that is none of `spread.owners`, and as `stretches` does.
    """
    if owner not in spread.owners:
        raise InvalidArgument(f"owner: one of {list(spread.owners)}, got {owner!r}")
    seed = seed_of(model)
    return {
        layer: joined([
            (stretch.first, stretch.last)
            for stretch in stretches(model, layer, spread.stretch_rows)
            if owner in owners_of(stretch, seed, spread.owners, spread.replicas)
        ])
        for layer in model.layers
    }  # fmt: skip


def joined(ranges: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Rising, disjoint ranges [first, last) with neighbours joined, int64 [n, 2]. Raises InvalidArgument if they are not so."""
    made: list[list[int]] = []
    for first, last in ranges:
        if not (0 <= first < last and (not made or made[-1][1] <= first)):
            raise InvalidArgument(f"ranges: [{first}, {last}) is empty, or not behind the one before it")
        if made and made[-1][1] == first:
            made[-1][1] = last
        else:
            made.append([first, last])
    return np.array(made, dtype=np.int64).reshape(-1, 2)


def _check_owners(owners: Sequence[str], replicas: int) -> None:
    if not 1 <= len(owners) <= OWNERS_MAX or len(set(owners)) != len(owners):
        raise InvalidArgument(f"owners: 1 to {OWNERS_MAX} different names, got {list(owners)}")
    for owner in owners:
        check_name(owner)
    if not 1 <= replicas <= len(owners):
        raise InvalidArgument(f"replicas: 1 to {len(owners)}, the number of owners, got {replicas}")
