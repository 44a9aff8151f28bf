"""How a version enters memory and how it leaves: in reach of the doors, warmed; withdrawn, unmapped, deleted.

Nothing is unmapped under a call or a request that reads it. When a version goes is the pool's and the succession's.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from engram_pool.domain.catalogue import Catalogue, Resident
from engram_pool.domain.compute import Compute
from engram_pool.domain.ports import Doors, Warmer
from engram_pool.domain.storing import StoredVersion, VersionStore

REQUESTS_END_SECONDS = 2.0  # how long requests at a native door may keep a version that is to be deleted; else it is tried again


class Residence:
    """Of the versions in `catalogue`. Callers make one change at a time."""

    def __init__(self, store: VersionStore, compute: Compute, catalogue: Catalogue, doors: Doors, warmer: Warmer | None) -> None:
        self._store, self._compute, self._catalogue = store, compute, catalogue
        self._doors, self._warmer = doors, warmer
        self._unmapping: list[Resident] = []  # off the list for good, unmapped when their last call ends

    async def supersede(self, resident: Resident) -> None:
        """Out of sight, as it is put in place anew with other rows; calls that read it go on, none begins."""
        self._doors.withdraw(resident.stored)
        resident.closing = True
        await self._compute.run(self._store.supersede, resident.stored)
        self._catalogue.drop(resident)
        self._unmapping.append(resident)

    async def set_aside(self, resident: Resident) -> None:
        """A corrupt version, out of every reader's way."""
        self._catalogue.drop(resident)
        self._unmapping.append(resident)
        await self._compute.run(self._store.set_aside, resident.stored)

    async def release_all(self) -> None:
        """Unmap everything and leave the files, at the end."""
        for resident in [*self._catalogue.all(), *self._unmapping]:
            await self._release(resident)
        if self._warmer is not None:
            await self._compute.run(self._warmer.close)

    async def release_unused(self) -> None:
        """Unmap versions that are off the list for good, once their last call has ended."""
        for resident in [r for r in self._unmapping if r.calls == 0 and not self._doors.read(r.stored)]:
            self._unmapping.remove(resident)
            await self._release(resident)

    async def _release(self, resident: Resident) -> None:
        resident.closing = True
        if resident.warmth is not None:
            resident.warmth.drop()
        await self._compute.run(self._store.release, resident.stored)

    async def delete(self, resident: Resident) -> bool:
        """Its memory goes, and its files; False, and nothing done, while somebody reads it."""
        if resident.calls or resident.holds:
            return False
        resident.closing = True  # no call begins while the thread unmaps
        try:
            let_go = partial(self._doors.let_go, resident.stored, REQUESTS_END_SECONDS)
            deleted = await self._compute.run(self._store.delete, resident.stored, let_go)
        except OSError:
            resident.closing = False
            await self._compute.run(self._doors.publish, resident.stored)
            raise
        resident.closing = deleted
        if deleted:
            if resident.warmth is not None:
                resident.warmth.drop()
            self._catalogue.drop(resident)
        return deleted

    async def take_in(self, stored: StoredVersion) -> Resident:
        """Into the catalogue, in reach of the doors, its pages entered in the background."""
        pages, nodes = await self._compute.run(_memory_of, stored)
        resident = Resident(stored, stored.standing, page_bytes=pages, nodes=nodes)
        await self._compute.run(self._doors.publish, stored)
        if self._warmer is not None:
            resident.warmth = self._warmer.warm([span for s in stored.segments.values() for span in s.spans_to_enter()])
        self._catalogue.add(resident)
        return resident


def _memory_of(stored: StoredVersion) -> tuple[int, dict[int, int]]:
    """(smallest page size in use, sampled pages by memory node)."""
    segments = stored.segments.values()
    nodes: Counter[int] = Counter()
    for segment in segments:
        nodes.update(segment.nodes())
    return min(segment.page_bytes() for segment in segments), dict(nodes)
