"""Room for versions: quotas of tenants and of the store, and what goes so that something new fits: the least recently used.

Never evicted is what somebody needs: a pinned version, one that a pointer names, one that is held, mapped or being read.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asm_store.domain.catalogue import Catalogue, oldest_first
from asm_store.domain.compute import Compute
from asm_store.domain.ports import Folder, Meters
from asm_store.domain.versions import Kept
from treadle.contract.errors import ResourceExhausted

log = logging.getLogger("asm_store")


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Bytes of a publish in progress."""

    tenant: str
    nbytes: int


class Room:
    """For one event loop; `make` under the lock that adds and deletes versions."""

    def __init__(
        self, catalogue: Catalogue, folder: Folder, compute: Compute, meters: Meters, *, file_bytes_max: int, versions_max: int,
        tenant_bytes_max: Callable[[str], int],
    ) -> None:  # fmt: skip
        """tenant_bytes_max: the quota of a tenant."""
        self._catalogue, self._folder, self._compute, self._meters = catalogue, folder, compute, meters
        self.file_bytes_max, self._versions_max, self._tenant_bytes_max = file_bytes_max, versions_max, tenant_bytes_max
        self._reserved: list[Reservation] = []
        self.evictions = 0

    @asynccontextmanager
    async def reserved(self, tenant: str, nbytes: int) -> AsyncIterator[None]:
        """Room for a publish that has begun. Raises ResourceExhausted if it would not fit, whatever can be evicted."""
        self._refuse_what_cannot_fit(tenant, nbytes, await self._needed(), self._reserved)
        reservation = Reservation(tenant, nbytes)
        self._reserved.append(reservation)
        try:
            yield
        finally:
            self._reserved.remove(reservation)

    async def make(self, tenant: str, nbytes: int) -> None:
        """Evict until a version of `nbytes` fits. Raises ResourceExhausted if what is left is needed.

        Nothing is gone then, but where somebody has begun to need what was not needed when this began.
        """
        self._refuse_what_cannot_fit(tenant, nbytes, await self._needed(), ())
        quota = self._tenant_bytes_max(tenant)
        await self._evict(lambda: self._catalogue.file_bytes(tenant) + nbytes - quota, tenant)
        await self._evict(lambda: self._catalogue.file_bytes() + nbytes - self.file_bytes_max, None)
        await self._evict(lambda: len(self._catalogue.all()) + 1 - self._versions_max, None)

    def _refuse_what_cannot_fit(
        self, tenant: str, nbytes: int, needed: Sequence[Kept], reserved: Sequence[Reservation]
    ) -> None:  # fmt: skip
        """needed: what cannot be evicted; reserved: what comes beside it."""
        fixed = sum(kept.stored.file_bytes for kept in needed)
        _refuse("the store", "file_bytes_max", nbytes, fixed + sum(one.nbytes for one in reserved), self.file_bytes_max)
        own = [one.nbytes for one in reserved if one.tenant == tenant]
        fixed = sum(kept.stored.file_bytes for kept in needed if kept.stored.record.tenant == tenant)
        _refuse(f"tenant {tenant}", "its quota", nbytes, fixed + sum(own), self._tenant_bytes_max(tenant))
        if len(needed) + len(reserved) >= self._versions_max:
            raise ResourceExhausted(
                f"{len(needed)} versions are in use, the limit versions_max is {self._versions_max}; unpin or delete some"
            )

    async def _evict(self, excess: Callable[[], int], tenant: str | None) -> None:
        for kept in oldest_first(self._catalogue.all()):
            if excess() <= 0:
                return
            if tenant in (None, kept.stored.record.tenant) and not self._catalogue.is_referenced(kept):
                outcome = await self._evict_one(kept)
                self._meters.evicted(outcome)
                if outcome == "ok":
                    self.evictions += 1
                    log.info("version evicted", extra={"dictionary": kept.key[0], "version": kept.key[1]})
        if excess() > 0:
            raise ResourceExhausted(
                "versions that could have been evicted are in use now, or cannot be taken away; unpin or delete some, or try again",
                1.0,
            )

    async def _evict_one(self, kept: Kept) -> str:
        """ok; read: somebody reads it; failed: its files cannot be taken away. Nobody is told where it lies while its files go."""
        (readers,) = await self._compute.run(self._folder.readers, [kept.stored])
        if readers or self._catalogue.is_referenced(kept):
            return "read"
        self._catalogue.drop(kept)
        try:
            removed = await self._compute.run(self._folder.delete, kept.stored, unread_only=True)
        except OSError as error:
            self._catalogue.add(kept)
            log.error("version cannot be evicted", extra={"path": str(kept.stored.folder), "reason": str(error)})
            return "failed"
        if removed is None:  # somebody has begun to read it just now
            self._catalogue.add(kept)
        return "read" if removed is None else "ok"

    async def _needed(self) -> list[Kept]:
        """What cannot be evicted now."""
        kept = self._catalogue.all()
        readers = await self._compute.run(self._folder.readers, [one.stored for one in kept])
        return [one for one, mapped in zip(kept, readers, strict=True) if mapped or self._catalogue.is_referenced(one)]


def _refuse(whose: str, limit: str, nbytes: int, fixed: int, most: int) -> None:
    if nbytes > most:
        raise ResourceExhausted(f"{nbytes} bytes do not fit {whose} at all: {limit} is {most}; make fewer entries, or raise it")
    if fixed + nbytes > most:
        raise ResourceExhausted(
            f"{nbytes} bytes do not fit {whose}: {limit} is {most}, and {fixed} of them are pinned, current, mapped, held or being "
            "published; unpin or delete some"
        )
