"""An owner as it tells of itself: where it answers, and which rows of which versions it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument
from treadle.contract.placement import joined
from treadle.contract.version import check_name, check_version

HOLDINGS_MAX = 256  # versions of one owner
DOORS_MAX = 8  # ways to one owner
TEXT_MAX = 512  # bytes of an address


@dataclass(frozen=True, slots=True)
class Door:
    """A way to an owner's rows other than gRPC. transport: socket, ring or mooncake; address: host:port or unix:PATH."""

    transport: str
    address: str


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner holds of one version: by layer, the rows [first, last), rising and disjoint."""

    model: str
    version: str
    held: Mapping[int, Sequence[tuple[int, int]]]

    def __post_init__(self) -> None:
        check_name(self.model)
        check_version(self.version)
        for ranges in self.held.values():
            joined(ranges)

    def ranges(self, layer: int) -> NDArray[np.int64]:
        """Rows of `layer` that it holds, int64 [n, 2], neighbours joined."""
        return joined(self.held.get(layer, ()))

    @property
    def rows(self) -> int:
        """Rows that it holds, all layers together."""
        return sum(last - first for ranges in self.held.values() for first, last in ranges)


@dataclass(frozen=True, slots=True)
class Owner:
    """One owner of a fabric.

    endpoint:  its gRPC address as others reach it, host:port
    epoch:     rises with everything that it tells of itself, over its restarts too: of two entries the higher one is true
    leaving:   it still answers, and asks to be left
    reachable: False where whoever tells of it does not hear from it now
    Raises InvalidArgument for names, addresses and numbers beyond their limits.
    """

    name: str
    endpoint: str
    doors: tuple[Door, ...] = ()
    holdings: tuple[Holding, ...] = ()
    epoch: int = 0
    leaving: bool = False
    reachable: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)
        addresses = [self.endpoint, *(door.address for door in self.doors)]
        if any(":" not in address or len(address) > TEXT_MAX for address in addresses):
            raise InvalidArgument(
                f"owner {self.name}: addresses are host:port or unix:PATH, up to {TEXT_MAX} letters, got {addresses}"
            )
        if len(self.doors) > DOORS_MAX or len(self.holdings) > HOLDINGS_MAX or not 0 <= self.epoch < 1 << 63:
            raise InvalidArgument(
                f"owner {self.name}: up to {DOORS_MAX} doors and {HOLDINGS_MAX} versions, and an epoch below 2^63; got "
                f"{len(self.doors)}, {len(self.holdings)} and {self.epoch}"
            )

    def holding(self, model: str, version: str) -> Holding | None:
        """What it holds of a version; None: nothing."""
        return next((each for each in self.holdings if (each.model, each.version) == (model, version)), None)

    def door(self, transport: str) -> tuple[str, ...]:
        """Addresses of its doors of one transport, in the order that it prefers."""
        return tuple(door.address for door in self.doors if door.transport == transport)

    def unreachable(self) -> Owner:
        """The same, no longer heard of."""
        return replace(self, reachable=False)
