"""What is done about a damaged version: out of service at once, repaired if its bytes can be had, else set aside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engram_pool.domain.catalogue import Catalogue, Resident
from engram_pool.domain.changes import Changes
from engram_pool.domain.compute import Compute
from engram_pool.domain.ports import Doors, Meters
from engram_pool.domain.residence import Residence
from engram_pool.domain.storing import StoredVersion
from engram_pool.domain.succession import Succession
from engram_pool.domain.verification import Damaged
from treadle.contract import DataLoss, TreadleError

log = logging.getLogger("engram_pool")
Mend = Callable[[StoredVersion, Damaged], object]  # raises where the chunk's bytes cannot be had or written


class Damages:
    """Of the versions in `catalogue`. change: held while a version leaves the list; a repair goes on without it."""

    def __init__(
        self, compute: Compute, meters: Meters, doors: Doors, catalogue: Catalogue, residence: Residence, succession: Succession,
        changes: Changes, change: asyncio.Lock,
    ) -> None:  # fmt: skip
        self._compute, self._meters, self._doors, self._catalogue = compute, meters, doors, catalogue
        self._residence, self._succession, self._changes, self._change = residence, succession, changes, change
        self._mend: Mend | None = None

    def repair_with(self, mend: Mend) -> None:
        """See `Pool.repair_with`."""
        self._mend = mend

    async def see_to(self, resident: Resident, damage: DataLoss) -> bool:
        """See `Pool.found_damaged`. One step: let no cancellation split it."""
        if resident.corrupt:  # somebody else has found it too, and sees to it
            return False
        log.error("corrupt version", extra={"model": resident.name, "version": resident.version, "reason": str(damage)})
        self._meters.corrupt(1)
        resident.corrupt, resident.damaged_at_ns = True, time.time_ns()
        self._doors.withdraw(resident.stored)
        await self._changes.announce()
        if self._mend is not None and isinstance(damage, Damaged):
            try:
                with resident.in_use():
                    await self._compute.run(self._mend, resident.stored, damage)
            except (TreadleError, OSError) as error:
                fields = {"model": resident.name, "version": resident.version, "reason": str(error)}
                log.error("corrupt version cannot be repaired", extra=fields)
            else:
                resident.corrupt = False
                await self._compute.run(self._doors.publish, resident.stored)
                await self._changes.announce()
                return True
        async with self._change:
            await self._take_out_of_service(resident)
        return False

    async def _take_out_of_service(self, resident: Resident) -> None:
        self._doors.withdraw(resident.stored)
        if self._catalogue.get(resident.name, resident.version) is not resident:
            return
        await self._residence.set_aside(resident)
        await self._succession.replace_unserved(resident.name)
        await self._changes.announce()
