"""Which version of a model comes after which: what is current, what was before, what is kept to go back to, what goes.

Owns these steps in state and on disk together. Callers make one change at a time; when memory goes is the pool's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engram_pool.domain.catalogue import Catalogue, Resident
from engram_pool.domain.compute import Compute
from engram_pool.domain.storing import Standing, VersionStore

log = logging.getLogger("engram_pool")
VERSIONS_KEPT_MAX = 2  # where no setting says more: to go back, and back once more


class Succession:
    """Over the versions of `catalogue`; at most `versions_kept_max` of a model are kept beside the current one."""

    def __init__(self, store: VersionStore, compute: Compute, catalogue: Catalogue, *, versions_kept_max: int) -> None:
        self._store, self._compute, self._catalogue = store, compute, catalogue
        self._versions_kept_max = versions_kept_max

    async def adopt(self, model: str, version: str, before: Sequence[str], *, rewrite: bool) -> None:
        """After a start: `version` is current again, or the newest one where that has gone; `rewrite`: then also on disk."""
        self._catalogue.remember_before(model, before)
        chosen = self._catalogue.get(model, version)
        if chosen is None or chosen.standing is not Standing.SERVED:
            chosen = self._catalogue.newest(model)
            if rewrite:
                await self._write_current(model, chosen)
        self._catalogue.make_current(model, chosen)

    async def advance(self, resident: Resident, *, keep_previous: bool) -> None:
        """A loaded version is current; the one before is kept, or goes as soon as no reader holds it."""
        previous = self._catalogue.current(resident.name)
        await self._make_current(resident)
        if previous is not None and previous is not resident and not keep_previous:
            await self.stand(previous, Standing.REPLACED)
        await self._drop_beyond_kept(resident.name)

    async def promote(self, model: str, version: str) -> tuple[Resident, str]:
        """A listed version is current, the one before for an empty `version`; it, and what was current. Raises NotFound."""
        current = self._catalogue.current(model)
        resident = self._catalogue.find(model, version) if version else self._catalogue.previous(model)
        if resident is not current:
            await self._make_current(resident)
            await self._drop_beyond_kept(model)
        return resident, current.version if current is not None else ""

    async def replace_unserved(self, model: str) -> None:
        """Keep the current version if it is still served, else go back to the newest that is."""
        current = self._catalogue.current(model)
        if current is None or current.standing is not Standing.SERVED:
            newest = self._catalogue.newest(model)
            await self._write_current(model, newest)
            self._catalogue.make_current(model, newest)

    async def stand(self, resident: Resident, standing: Standing) -> None:
        """From now on, also after a restart."""
        await self._compute.run(self._store.set_standing, resident.stored, standing)
        resident.standing = standing

    async def _make_current(self, resident: Resident) -> None:
        if resident.standing is not Standing.SERVED:
            await self.stand(resident, Standing.SERVED)
        await self._write_current(resident.name, resident)
        self._catalogue.make_current(resident.name, resident)

    async def _write_current(self, model: str, resident: Resident | None) -> None:
        before = self._catalogue.before(model, resident) if resident is not None else []
        await self._compute.run(self._store.set_current, model, resident.version if resident is not None else None, before)

    async def _drop_beyond_kept(self, model: str) -> None:
        """Those that were current longest ago go."""
        for resident in self._catalogue.kept(model)[self._versions_kept_max :]:
            fields = {"model": model, "version": resident.version, "versions_kept_max": self._versions_kept_max}
            log.info("version no longer kept", extra=fields)
            await self.stand(resident, Standing.REPLACED)
