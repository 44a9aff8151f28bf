"""The squares of the fault matrix: how rows come, who is struck, how, and when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

POOL, WORKER, STORE = "pool", "worker", "store"
TARGETS, FAULTS, PHASES, TRANSPORTS = (POOL, WORKER, STORE), ("dead", "frozen", "slow"), ("prefill", "decode"), ("mapped", "socket")


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of the matrix. transport: of Engram rows; dictionaries are mapped in all."""

    transport: str
    target: str
    fault: str
    phase: str

    @property
    def name(self) -> str:
        """What it is called in the report."""
        return f"{self.transport} {self.target} {self.fault} {self.phase}"

    @property
    def new_prefix(self) -> str:
        """The prefix that no worker has open before this blow to the store."""
        return f"{self.fault}-{self.phase}"


ALL_CELLS = tuple(Cell(*square) for square in product(TRANSPORTS, TARGETS, FAULTS, PHASES))
QUICK_CELLS = (
    Cell("socket", "pool", "frozen", "decode"), Cell("socket", "pool", "dead", "prefill"),
    Cell("socket", "worker", "frozen", "prefill"), Cell("socket", "worker", "frozen", "decode"),
    Cell("socket", "worker", "dead", "decode"), Cell("mapped", "store", "frozen", "decode"), Cell("mapped", "store", "dead", "prefill"),
)  # fmt: skip
