"""What is kept, as callers see it: lists, opens, pins and holds. Starts with what the disk holds.

Owns who holds and pins. Publishing, deleting, copying and looking up are their own modules.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

from asm_store.domain.bringing import Bringing
from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.compute import Compute, Turnstile
from asm_store.domain.deleting import Deleting
from asm_store.domain.pointers import Pointers
from asm_store.domain.ports import Folder, Meters, Remote, Sharing
from asm_store.domain.promoting import Promoting
from asm_store.domain.tenancy import Caller, ask_may_change
from asm_store.domain.tombstones import Tombstones
from asm_store.domain.verifying import check_version_digests
from asm_store.domain.versions import Kept, Key, Pin, Pointer
from treadle.contract.checks import expect
from treadle.contract.errors import NotFound

log = logging.getLogger("asm_store")
TOUCH_SECONDS = 10.0  # how old the last use on the disk may be: after a crash the order of eviction is that much off


@dataclass(frozen=True, slots=True)
class Listed:
    """A version as callers see it. kept: None: other replicas keep it, `remote` says what is known; readers: on this host, and Holds."""

    key: Key
    current: bool
    kept: Kept | None
    remote: Remote | None
    readers: int


class Store:
    """Of one event loop."""

    def __init__(
        self, catalogue: Catalogue, pointers: Pointers, promoting: Promoting, tombstones: Tombstones, bringing: Bringing, deleting: Deleting,
        folder: Folder, sharing: Sharing, compute: Compute, changes: Changes, meters: Meters, *, holds_max: int, pin_seconds_max: float,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.catalogue, self.pointers, self.bringing, self.deleting, self.changes = catalogue, pointers, bringing, deleting, changes
        self.sharing, self._promoting, self._tombstones = sharing, promoting, tombstones
        self._folder, self._compute, self._meters, self._clock = folder, compute, meters, clock
        self._pin_seconds_max, self._pinning = pin_seconds_max, asyncio.Lock()
        self._holding = Turnstile("holds", "holds_max", holds_max, 1.0)
        self._touched, self._untouched = dict[Key, float](), False

    async def start(self, *, digests: bool) -> None:
        """Take in what is on the disk. digests: compare every one before anything is served."""
        adopted = await self._compute.run(self._folder.adopt, check_version_digests if digests else None)
        for stored in adopted.versions:
            self.catalogue.add(Kept(stored, adopted.used_at_seconds[stored.key], adopted.pins.get(stored.key, Pin())))
        self.pointers.take_in(adopted.pointers)
        self._tombstones.take_in(adopted.tombstones)
        self._meters.torn(adopted.torn)
        await self.deleting.obey({})

    async def listing(self, name: str, after: Key | None = None) -> list[Listed]:
        """All versions of a name, or of all; by name, the current one first, then the last published. after: only those behind it.

        What is being deleted is not among them, here or at another replica: its name means nothing any more while its files go, and who
        lists because of that would see what nobody tells it of again. What is kept here because its files could not be taken away is.
        """
        here = [kept for kept in self.catalogue.all() if name in ("", kept.key[0]) and (after is None or kept.key > after)]
        there = self.catalogue.remotes()  # at the same moment: what is copied meanwhile is in one of the two
        readers = await self._readers(here)
        found = [
            Listed(kept.key, self.pointers.names(*kept.key), kept, None, count) for kept, count in zip(here, readers, strict=True)
        ]
        for key, remote in there.items():
            if name in ("", key[0]) and (after is None or key > after):
                found.append(Listed(key, self.pointers.names(*key), None, remote, 0))
        alive = [one for one in found if not self._is_going(one)]
        return sorted(alive, key=lambda one: (one.key[0], not one.current, -_published_at(one), one.key[1]))

    def _is_going(self, one: Listed) -> bool:
        undeleted = one.kept is not None and one.kept.undeleted and not one.kept.gone
        return not undeleted and self._tombstones.covers(one.key, _published_at(one))

    async def listed(self, kept: Kept) -> Listed:
        """A version here as callers see it."""
        (readers,) = await self._readers([kept])
        return Listed(kept.key, self.pointers.names(*kept.key), kept, None, readers)

    async def open(self, name: str, version: str, expected: Mapping[str, str]) -> Kept:
        """A version that lies here. Raises what `Bringing.bring` raises, FingerprintMismatch naming the field that differs."""
        with self._meters.measured("opens"):
            kept = await self.bringing.bring(name, version)
            kept.stored.fingerprint.require(expected)
            await self._touch(kept)
            return kept

    async def promote(self, name: str, version: str, expected: str | None, caller: Caller) -> Pointer:
        """Flip the pointer of `name` to a version, which is here when this returns. Raises as `Promoting.promote` and `bring`."""
        with self._meters.measured("promotes"):
            expect(bool(version), "version: say which version the name is to mean")
            await ask_may_change(self.catalogue, caller, name)
            kept = await self.bringing.bring(name, version)
            return await self._promoting.promote(kept, expected, caller)

    async def pin(self, name: str, version: str, ttl_seconds: float, caller: Caller) -> float:
        """Keep a version from eviction, here; until when, seconds since the epoch. Raises InvalidArgument, and as `bring`."""
        expect(
            math.isfinite(ttl_seconds) and 0 < ttl_seconds <= self._pin_seconds_max,
            f"ttl_seconds: above 0, at most pin_seconds_max ({self._pin_seconds_max:g}), got {ttl_seconds!r}",
        )
        await ask_may_change(self.catalogue, caller, name)
        kept = await self.bringing.bring(name, version)
        async with self._pinning:  # of two at once the longer holds
            now = self._clock()
            until = max(kept.pin.until_seconds, now + ttl_seconds)
            await self._learn_pin(kept, Pin(until, max(now, kept.pin.changed_at_seconds)))
        self.sharing.told()
        return until

    async def unpin(self, name: str, version: str, caller: Caller) -> None:
        """End a pin. Raises as `bring`."""
        await ask_may_change(self.catalogue, caller, name)
        kept = await self.bringing.bring(name, version)
        await self.learn_pin(kept, Pin(0.0, max(self._clock(), kept.pin.changed_at_seconds)))
        self.sharing.told()

    async def learn_pin(self, kept: Kept, pin: Pin) -> None:
        """Take in a pin that was said after the one that is known."""
        async with self._pinning:
            await self._learn_pin(kept, pin)

    async def _learn_pin(self, kept: Kept, pin: Pin) -> None:
        if pin.changed_at_seconds >= kept.pin.changed_at_seconds and pin != kept.pin and not kept.gone:
            try:
                await self._compute.run(self._folder.write_pin, kept.stored, pin)
            except FileNotFoundError as error:
                raise NotFound(f"{kept.key[0]} {kept.key[1]} has just been evicted or deleted") from error
            kept.pin = pin

    async def hold(self, name: str, version: str) -> AsyncGenerator[Key, None]:
        """Keep a version from eviction: its name and version at once, then nothing for as long as the caller stays.

        Raises NotFound once it is deleted, ResourceExhausted beyond `holds_max`, Unavailable when the store stops.
        """
        with self._holding.turn():
            kept = await self.bringing.bring(name, version)
            kept.holds += 1
            try:
                yield kept.key
                await self.changes.until(lambda: kept.gone)
                self.changes.refuse_if_draining()
                raise NotFound(f"{kept.key[0]} {kept.key[1]} was deleted")
            finally:
                kept.holds -= 1

    @property
    def holds(self) -> int:
        """Hold calls in progress."""
        return self._holding.inside

    def open_readers(self) -> int:
        """Processes that map a version, counted once for each version, and Hold calls. Any thread."""
        return sum(self._folder.readers([kept.stored for kept in self.catalogue.all()])) + self.holds

    def remember_uses(self) -> None:
        """Write down when each version was used last: at the end."""
        for kept in self.catalogue.all():
            self._write_use(kept, kept.used_at_seconds)

    async def _touch(self, kept: Kept) -> None:
        if kept.used_at_seconds - self._touched.get(kept.key, 0.0) > TOUCH_SECONDS:
            self._touched = {one.key: self._touched.get(one.key, 0.0) for one in self.catalogue.all()}
            self._touched[kept.key] = kept.used_at_seconds
            await self._compute.run(self._write_use, kept, kept.used_at_seconds)

    def _write_use(self, kept: Kept, used_at_seconds: float) -> None:
        """Any thread. Where it cannot be written memory knows it, until the store ends; said once, until it can be again."""
        try:
            self._folder.touch(kept.stored, used_at_seconds)
        except OSError as error:
            if not (self._untouched or kept.gone):
                log.warning("last uses cannot be written", extra={"path": str(kept.stored.folder), "reason": str(error)})
                self._untouched = True
        else:
            self._untouched = False

    async def _readers(self, versions: list[Kept]) -> list[int]:
        counts = await self._compute.run(self._folder.readers, [kept.stored for kept in versions])
        return [count + kept.holds for kept, count in zip(versions, counts, strict=True)]


def _published_at(listed: Listed) -> float:
    if listed.kept is not None:
        return listed.kept.stored.record.published_at_seconds
    assert listed.remote is not None
    return listed.remote.record.published_at_seconds
