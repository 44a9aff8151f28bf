"""The memories that a request uses, taken before it is queued: an Engram memory and a long prefix, each or none.

Owns the waits for their openings, and what becomes of a request whose prefix cannot be had. Does not open anything (`open_versions`).
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_run import missing_report
from inference_worker.domain.request import Request
from inference_worker.domain.resident_versions import Choice
from treadle.contract.errors import DeadlineExceeded, Unavailable
from treadle.contract.policy import Late

AGAIN_SECONDS = 0.1  # between two tries of a prefix whose store does not answer
WELL_SECONDS = 1.0  # a store that is well lists and maps in less: an opening is given so long whatever a policy says
MemoryT = TypeVar("MemoryT")


class Choosable(Protocol[MemoryT]):
    """Memories of one kind, or none at all; OpenVersions fits."""

    def take(self, choice: Choice | None) -> Future[Lease[MemoryT]]:
        """See OpenVersions."""


@dataclass(frozen=True, slots=True)
class Leases:
    """What one request holds."""

    engram: Lease[EngramMemory] = field(default_factory=Lease)
    prefix: Lease[OpenPrefix] = field(default_factory=Lease)

    def release(self) -> None:
        """The request is over."""
        self.engram.release()
        self.prefix.release()


class LeaseDesk:
    """Gives requests their leases. On the event loop.

    open_seconds_max: longest wait of a request for a memory to be opened; its own deadline may be sooner
    """

    def __init__(self, memories: Choosable[EngramMemory], prefixes: Choosable[OpenPrefix], open_seconds_max: float) -> None:
        self._engram = _Taking(memories, "engram memory", open_seconds_max)
        self._prefix = _Taking(prefixes, "prefix", open_seconds_max)

    async def take(self, asked: Request, engram: Choice | None, prefix: Choice | None) -> tuple[Request, Leases]:
        """The request, and the memories that it uses, their versions fixed now; waits for openings within the request's own time.

        engram: None: the default; prefix: None: none
        A prefix whose store does not answer, or does not end its opening, within the policy's wait is missing then: a request with
        late = mask goes on without it, its `missing` saying so. Raises what the choices raise, Unavailable where the policy is to fail, DeadlineExceeded.
        """
        leases = Leases(await self._engram.lease(asked, engram))
        try:
            return asked, replace(leases, prefix=await self._prefix_of(asked, prefix))
        except Unavailable:
            if prefix is None or asked.policy.late is Late.FAIL:
                leases.release()
                raise
            return replace(asked, missing=(missing_report(prefix.model, prefix.version),)), leases
        except BaseException:
            leases.release()
            raise

    async def _prefix_of(self, asked: Request, choice: Choice | None) -> Lease[OpenPrefix]:
        if choice is None:
            return Lease()
        began, patience = time.monotonic(), asked.policy.wait_seconds_max
        while True:
            waited = time.monotonic() - began
            try:
                return await self._prefix.lease(asked, choice, max(patience, WELL_SECONDS) - waited)
            except Unavailable:
                if time.monotonic() - began + AGAIN_SECONDS > patience:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)


@dataclass(frozen=True, slots=True)
class _Taking(Generic[MemoryT]):
    """Takes leases of one kind. what: in messages."""

    memories: Choosable[MemoryT]
    what: str
    open_seconds_max: float

    async def lease(self, asked: Request, choice: Choice | None, patience: float = math.inf) -> Lease[MemoryT]:
        """patience: seconds, after which an opening that is not over counts as a source that is away: Unavailable."""
        taken = self.memories.take(choice)
        left = asked.deadline.remaining_seconds() if asked.deadline is not None else self.open_seconds_max
        left = min(left, self.open_seconds_max)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(taken), min(left, patience))
        except BaseException as error:
            taken.add_done_callback(_give_back)  # it may have come just now: nobody would ever release it
            if not isinstance(error, TimeoutError):
                raise
            name = choice.model if choice is not None else ""
            if patience < left:
                waited = max(asked.policy.wait_seconds_max, WELL_SECONDS)
                raise Unavailable(f"{self.what} {name!r} is still being opened after {waited:g} s") from error
            raise DeadlineExceeded(f"{self.what} {name!r} is still being opened; try again soon") from error


def _give_back(taken: Future[Lease[MemoryT]]) -> None:
    if not taken.cancelled() and taken.exception() is None:
        taken.result().release()
