"""What this replica tells the others, and takes in from them. Which way it travels is an adapter's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

from asm_store.domain.changes import Changes
from asm_store.domain.deleting import Deleting
from asm_store.domain.pointers import listed
from asm_store.domain.ports import Remote
from asm_store.domain.store import Store
from asm_store.domain.tombstones import Tombstones
from asm_store.domain.versions import Key, Pin, Pointer
from treadle.contract.errors import NotFound, ResourceExhausted

log = logging.getLogger("asm_store")


class Replicating:
    """For one event loop."""

    def __init__(self, store: Store, tombstones: Tombstones, deleting: Deleting, changes: Changes) -> None:
        self._store, self._tombstones, self._deleting, self._changes = store, tombstones, deleting, changes
        self._left_out = frozenset[str]()  # for want of room, at the last exchange

    def kept(self) -> dict[Key, Remote]:
        """What is here."""
        return {kept.key: Remote(kept.stored.record, kept.stored.manifest_json) for kept in self._store.catalogue.all()}

    def pointers(self) -> list[Pointer]:
        """What names mean here."""
        return self._store.pointers.all()

    def pins(self) -> dict[Key, Pin]:
        """Pins, and ends of pins, that were said of what is here."""
        return {kept.key: kept.pin for kept in self._store.catalogue.all() if kept.pin.changed_at_seconds}

    def tombstones(self) -> dict[Key, float]:
        """What was deleted, and when, seconds since the epoch."""
        return self._tombstones.all()

    async def learn(self, pointers: Iterable[Pointer], pins: Mapping[Key, Pin], deleted: Mapping[Key, float]) -> bool:
        """Take in what others know: of each the newer holds. Pins of what comes here later are learnt when they are read again.

        What finds no room on the disk is left out, for the next exchange to try again. False: not even `deleted` did, and the rest, which
        follows from it, is left out with it.
        """
        left_out = dict[str, ResourceExhausted]()
        try:
            await self._deleting.obey(dict(deleted))
        except ResourceExhausted as error:
            self._say({"deletions": error})
            return False
        await self._store.pointers.forget_old()
        for pointer in pointers:
            try:
                await self._learn_pointer(pointer)
            except ResourceExhausted as error:
                left_out[f"pointer {pointer.name}"] = error
        for kept in self._store.catalogue.all():
            if kept.key in pins:
                try:
                    with suppress(NotFound):  # it has gone meanwhile
                        await self._store.learn_pin(kept, pins[kept.key])
                except ResourceExhausted as error:
                    left_out["pin {} {}".format(*kept.key)] = error
        self._say(left_out)
        return True

    async def _learn_pointer(self, pointer: Pointer) -> None:
        if self._is_deleted_here(pointer):
            await self._store.pointers.clear(pointer.name, {pointer.version})
        else:
            await self._store.pointers.learn(pointer)

    def _say(self, left_out: Mapping[str, ResourceExhausted]) -> None:
        """Once of each, for as long as it is left out."""
        if news := left_out.keys() - self._left_out:
            reason = str(left_out[min(news)])
            log.error("no room for what other replicas said; tried again", extra={"left_out": listed(news), "reason": reason})
        self._left_out = frozenset(left_out)

    def _is_deleted_here(self, shared: Pointer) -> bool:
        """Whether it names what was deleted here, and stands against another word of the same revision."""
        key, known = (shared.name, shared.version), self._store.pointers.of(shared.name)
        in_conflict = shared.revision == known.revision and shared.version != known.version
        return in_conflict and self._tombstones.covers(key, self._store.catalogue.published_at(key))

    async def others_changed(self) -> None:
        """What others keep has changed: what could not be copied may be now."""
        await self._changes.announce()
