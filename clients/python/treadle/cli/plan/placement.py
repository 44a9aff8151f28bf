"""Where the tables of a model fit: in every host, spread over the hosts, in a pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.contract import InvalidArgument


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for tables. The defaults are the CXL paper's: 1 TiB in a host (section 5.1), a pool of 4 TB (section 4.1)."""

    host_bytes: float = float(1 << 40)
    pool_bytes: float = 4e12
    replicas: int = 1  # of every row, where rows are spread

    def __post_init__(self) -> None:
        if not (0 <= self.host_bytes < math.inf and 0 <= self.pool_bytes < math.inf and self.replicas >= 1):
            raise InvalidArgument(f"room: bytes are 0 or more and finite, replicas 1 or more, got {self}")


@dataclass(frozen=True, slots=True)
class Placement:
    """One place. `needed_bytes` in each host, or in the pool; `note` says what it asks of the fabric."""

    name: str
    needed_bytes: int
    room_bytes: float
    note: str

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.needed_bytes <= self.room_bytes


def placements(table_bytes: int, hosts: int, room: Room) -> tuple[Placement, ...]:
    """All of them, whether they fit or not. Raises InvalidArgument for more replicas than hosts."""
    if room.replicas > hosts:
        raise InvalidArgument(f"replicas: {room.replicas} of each row on {hosts} hosts; at most one a host")
    share = -(-table_bytes * room.replicas // hosts)
    copies = "each row once" if room.replicas == 1 else f"each row {room.replicas} times"
    return (
        Placement("copy in each host's DRAM", table_bytes, room.host_bytes, "mapped: every lookup stays in the host"),
        Placement(
            "spread over the hosts' DRAM", share, room.host_bytes, f"{copies}: other hosts' rows are gathered by their owner"
        ),
        Placement("CXL pool", table_bytes, room.pool_bytes, "mapped by every host (DAX); every lookup is a load"),
    )
