"""Who looks at the versions of a pool: lists with the processes that read each, watches of the list, holds of a version."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from engram_pool.domain.catalogue import Catalogue, Resident
from engram_pool.domain.changes import Changes
from engram_pool.domain.compute import Compute, Turnstile
from engram_pool.domain.storing import VersionStore


@dataclass(frozen=True, slots=True)
class Listed:
    """A version as callers see it; `readers`: processes on this host that hold it, the pool not counted, and HoldModel calls."""

    resident: Resident
    current: bool
    readers: int


class Readers:
    """Of the versions in `catalogue`; at most `watchers_max` watches and `holds_max` HoldModel calls at once."""

    def __init__(
        self, store: VersionStore, compute: Compute, catalogue: Catalogue, changes: Changes, *, watchers_max: int, holds_max: int
    ) -> None:
        self._store, self._compute, self._catalogue, self._changes = store, compute, catalogue, changes
        self._watching = Turnstile("watch", "watches", watchers_max, retry_after_seconds=1.0)
        self._holding = Turnstile("hold", "holds", holds_max, retry_after_seconds=1.0)

    async def listing(self) -> list[Listed]:
        """What there is, grouped by model, the current version first."""
        return await self.with_readers(self._catalogue.listed())

    async def with_readers(self, residents: list[Resident]) -> list[Listed]:
        """These versions as callers see them."""
        counts = await self._compute.run(self._store.readers, [resident.stored for resident in residents])
        return [Listed(r, self._catalogue.is_current(r), n + r.holds) for r, n in zip(residents, counts, strict=True)]

    async def hold(self, model: str, version: str) -> AsyncGenerator[Resident, None]:
        """Keep a version from being freed: the version at once, then nothing for as long as the caller stays.

        Raises NotFound, ResourceExhausted beyond `holds_max`, DataLoss once it is corrupt, Unavailable when the pool stops.
        """
        self._changes.refuse_if_draining()
        with self._holding.turn():
            resident = self._catalogue.find_readable(model, version)
            resident.check_intact()
            with resident.held():
                yield resident
                await self._changes.until(lambda: resident.corrupt)
                resident.check_intact()
                self._changes.refuse_if_draining()

    async def watch(self) -> AsyncGenerator[list[Listed], None]:
        """The list at once, and again after each change; changes in quick succession may be told as one.

        Raises ResourceExhausted beyond `watchers_max`, Unavailable when the pool stops.
        """
        with self._watching.turn():
            async with aclosing(self._changes.each()) as changes:
                async for _ in changes:
                    yield await self.listing()

    @property
    def holds(self) -> int:
        """HoldModel calls in progress."""
        return self._holding.inside

    @property
    def watchers(self) -> int:
        """Watches in progress."""
        return self._watching.inside

    def open_readers(self) -> int:
        """Processes that hold a version, counted once for each version, and HoldModel calls."""
        return sum(self._store.readers([resident.stored for resident in self._catalogue.all()])) + self._holding.inside
