"""A version that is asked for: found here, else copied from a replica that keeps it. What names mean is copied ahead.

Owns the copies in progress: however many ask for a version, it comes once.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.checking import check_announcement
from asm_store.domain.compute import Compute
from asm_store.domain.pointers import Pointers
from asm_store.domain.ports import Announced, Meters, Peers, Replica, Sharing
from asm_store.domain.publishing import Publishing
from asm_store.domain.versions import Kept, Key
from treadle.contract.errors import DataLoss, NotFound, ResourceExhausted, TreadleError, Unavailable

log = logging.getLogger("asm_store")
AGAIN_SECONDS = 5.0  # before what could not be copied ahead is tried again


class Bringing:
    """Of one event loop; `follow` in a task, `close` at the end."""

    def __init__(
        self, catalogue: Catalogue, pointers: Pointers, publishing: Publishing, sharing: Sharing, peers: Peers, compute: Compute,
        changes: Changes, meters: Meters,
    ) -> None:  # fmt: skip
        self._catalogue, self._pointers, self._publishing = catalogue, pointers, publishing
        self._sharing, self._peers, self._compute, self._changes, self._meters = sharing, peers, compute, changes, meters
        self._copying: dict[Key, asyncio.Task[Kept]] = {}

    def copying(self) -> list[Key]:
        """What is being copied now."""
        return list(self._copying)

    def here(self, name: str, version: str) -> Kept:
        """A version that this replica keeps. Raises NotFound for one that others keep, too."""
        key = self._catalogue.resolve(name, version)
        kept = self._catalogue.get(key)
        if kept is None:
            raise NotFound(f"{key[0]} {key[1]} is not kept by replica {self._sharing.name}")
        self._catalogue.used(kept)
        return kept

    async def resolve(self, name: str, version: str) -> Key:
        """Which version is meant, among all replicas: what is not known is asked for once more."""
        try:
            return self._catalogue.resolve(name, version)
        except NotFound:
            await self._sharing.refresh()
            return self._catalogue.resolve(name, version)

    async def bring(self, name: str, version: str) -> Kept:
        """The version, here when this returns; `version` as `Catalogue.resolve` takes it.

        Raises NotFound, Unavailable where no replica that keeps it answers, ResourceExhausted where it has no room.
        """
        self._changes.refuse_if_draining()
        key = await self.resolve(name, version)
        kept = self._catalogue.get(key) or await self._copy(key)
        self._catalogue.used(kept)
        return kept

    async def follow(self) -> None:
        """Copy ahead what names mean, until cancelled: whoever is told of a pointer finds its version here."""
        while True:
            seen = self._changes.generation
            for pointer in self._pointers.all():
                key = pointer.name, pointer.version
                if pointer.version and self._catalogue.get(key) is None and self._catalogue.holders(key):
                    try:
                        await self._copy(key)
                    except TreadleError as error:
                        log.warning(
                            "a current version is not here", extra={"dictionary": key[0], "version": key[1], "reason": str(error)}
                        )
            await self._changes.since(seen, AGAIN_SECONDS)
            if self._changes.draining:
                return

    async def close(self) -> None:
        """End the copies in progress."""
        for task in self._copying.values():
            task.cancel()
        await asyncio.gather(*self._copying.values(), return_exceptions=True)

    async def _copy(self, key: Key) -> Kept:
        """Copied once for all who ask; one who leaves ends it for nobody else."""
        task = self._copying.get(key)
        if task is None:
            task = self._copying[key] = asyncio.create_task(self._copy_from_any(key))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: Key, task: asyncio.Task[Kept]) -> None:
        self._copying.pop(key, None)
        if not task.cancelled():
            task.exception()  # taken note of: who asked has heard it, or left

    async def _copy_from_any(self, key: Key) -> Kept:
        reasons, no_room = [], None
        for replica in self._catalogue.holders(key):
            if not replica.alive:
                reasons.append(f"{replica.name} does not answer")
                continue
            try:
                with self._meters.measured("fetches"):
                    return await self._copy_from(replica, key)
            except TreadleError as error:  # whatever it is of one, another may have it whole
                reasons.append(f"{replica.name}: {error}")
                no_room = error if isinstance(error, ResourceExhausted) else no_room
        if (kept := self._catalogue.get(key)) is not None:
            return kept
        if no_room is not None:
            raise no_room  # it says what to do, and when to try again
        raise Unavailable(f"{key[0]} {key[1]} is kept by other replicas: {'; '.join(reasons) or 'by none any more'}")

    async def _copy_from(self, replica: Replica, key: Key) -> Kept:
        async with aclosing(self._peers.get(replica, key)) as events:
            announced = await self._publishing.first(events)
            if not isinstance(announced, Announced):
                raise DataLoss("a copy began without saying what comes")
            dictionary = await self._compute.run(check_announcement, announced.manifest_json, announced.files, announced.card_json)
            if (dictionary.name, dictionary.version) != key:
                raise DataLoss(f"{replica.name} answers with {dictionary.name} {dictionary.version}")
            published = await self._publishing.receive(announced, dictionary, events, None)
        log.info("version copied", extra={"dictionary": key[0], "version": key[1], "replica": replica.name})
        return published.kept
