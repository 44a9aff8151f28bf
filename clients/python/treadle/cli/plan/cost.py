"""Local DRAM against a CXL pool: Tables 4 and 5 of the CXL paper (arXiv 2603.10087, section 5.4).

Locally every host has a copy of the tables. The pool has one, behind a switch; every host has an adapter, and the pool a
controller for each host. Nothing else is counted: no racks, cables, power, and not the memory that hosts need anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from treadle.cli.plan.models import GB
from treadle.contract import InvalidArgument

BREAK_EVEN_MAX = 1024  # hosts
PORTS_PER_HOST = 2  # of the switch: its adapter and its controller


@dataclass(frozen=True, slots=True)
class Prices:
    """In dollars; the defaults are Table 4. `switch_ports`: x16 ports of a switch; more hosts than they serve need another one."""

    dram_gb: float = 15.0
    switch: float = 5_800.0
    adapter: float = 210.0
    controller: float = 300.0
    switch_ports: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise InvalidArgument(f"price of {field.name}: 0 or more and finite, got {value}")
        if self.switch_ports < PORTS_PER_HOST:
            raise InvalidArgument(f"switch_ports: at least {PORTS_PER_HOST}, an adapter and a controller for each host")


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars for one number of hosts. `switches` of the pool."""

    hosts: int
    local: float
    pool: float
    switches: int

    @property
    def saving(self) -> float:
        """What the pool saves; below 0, what it costs more."""
        return self.local - self.pool


def cost_of(table_bytes: int, hosts: int, prices: Prices) -> Cost:
    """A row of Table 5."""
    memory = table_bytes / GB * prices.dram_gb
    switches = -(-hosts * PORTS_PER_HOST // prices.switch_ports)
    pool = memory + switches * prices.switch + hosts * (prices.adapter + prices.controller)
    return Cost(hosts, memory * hosts, pool, switches)


def break_even(table_bytes: int, prices: Prices) -> int | None:
    """The fewest hosts for which the pool costs less; None: not up to BREAK_EVEN_MAX."""
    return next((hosts for hosts in range(1, BREAK_EVEN_MAX + 1) if cost_of(table_bytes, hosts, prices).saving > 0), None)
