"""What a worker says of each memory; and a worker that was told to use none.

Owns the words of a status. Does not know which memories there are (`catalogue`).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.resident_versions import Choice
from treadle.contract.errors import NotFound


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """A memory of the pool, as this worker sees it.

    version:   the one that new requests get
    requests:  that use it now, whatever their version
    tokens:    looked up in it since the start
    transport: empty until it is open
    refusal:   why it cannot be chosen; empty: it can
    """

    model: str
    version: str
    default: bool
    open: bool
    requests: int
    tokens: int
    transport: str
    fused: bool
    refusal: str


class NoCatalogue:
    """Where the worker was told to use no Engram memory."""

    default_memory: EngramMemory | None = None

    def take(self, choice: Choice | None) -> Future[Lease[EngramMemory]]:
        """See Catalogue: none, or NotFound."""
        if choice is not None and choice.model:
            raise NotFound(f"engram.model: {choice.model!r} cannot be had, this worker was started without an Engram pool")
        waiter: Future[Lease[EngramMemory]] = Future()
        waiter.set_result(Lease())
        return waiter

    def memories(self) -> list[MemoryStatus]:
        """There are none."""
        return []
