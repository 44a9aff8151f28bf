"""What names mean: one pointer a name, flipped by compare-and-set, followed by watchers.

Owns the pointers and their order of revisions. Does not know which versions are here (catalogue).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

from asm_store.domain.changes import Changes
from asm_store.domain.compute import Compute, Turnstile, uninterrupted
from asm_store.domain.ports import Folder, Sharing
from asm_store.domain.versions import Pointer
from treadle.contract.checks import expect
from treadle.contract.errors import Overtaken, ResourceExhausted, Unavailable

log = logging.getLogger("asm_store")
POINTERS_MAX = 8192  # names; those that mean nothing are forgotten first
HEARTBEAT_SECONDS = 0.8  # a watcher hears something every second, also on a busy machine
WATCHED_MAX = 1024  # names of one Watch; more: watch all
NAMES_IN_WORDS = 8  # of a list in a message


@dataclass(frozen=True, slots=True)
class Told:
    """What a watcher is told. complete: the first list ends here; no pointers and not complete: a sign of life."""

    pointers: Sequence[Pointer]
    complete: bool = False


class Pointers:
    """Of one event loop."""

    def __init__(self, folder: Folder, sharing: Sharing, compute: Compute, changes: Changes, *, watchers_max: int) -> None:
        self._folder, self._sharing, self._compute, self._changes = folder, sharing, compute, changes
        self._known: dict[str, Pointer] = {}
        self._flipping, self._writing = asyncio.Lock(), asyncio.Lock()
        self._watching = Turnstile("watches", "watchers_max", watchers_max, 1.0)

    def take_in(self, found: Iterable[Pointer]) -> None:
        """What was on the disk at the start."""
        self._known = {pointer.name: pointer for pointer in found}

    def all(self) -> list[Pointer]:
        """By name."""
        return [self._known[name] for name in sorted(self._known)]

    def of(self, name: str) -> Pointer:
        """The pointer of a name; revision 0 where it never meant anything."""
        return self._known.get(name, Pointer(name))

    def names(self, name: str, version: str) -> bool:
        """Whether the pointer of `name` names this version."""
        known = self._known.get(name)
        return known is not None and bool(version) and known.version == version

    @property
    def watchers(self) -> int:
        """Watches in progress."""
        return self._watching.inside

    async def promote(self, name: str, version: str, expected: str | None, check: Callable[[], None], tenant: str) -> Pointer:
        """Let `name` mean `version`. expected: what it must mean now, empty for nothing; None: whatever it means.

        check: raises, at the flip, where it must not be. tenant: whose the version is, and the name from now on where it is nobody's.

        Naming what it means already is no change. Raises Overtaken naming both, Unavailable without the Redis that replicas share.
        """

        def decide(now: Pointer) -> Pointer:
            check()
            if expected is not None and now.version != expected:
                raise Overtaken(
                    f"{name} means {now.version or 'nothing'} (revision {now.revision}), expected was {expected or 'nothing'}"
                )
            return now if now.version == version else Pointer(name, version, now.revision + 1, owner=now.owner or tenant)

        return await uninterrupted(self._flip(name, decide))

    async def clear(self, name: str, versions: set[str]) -> None:
        """Let `name` mean nothing if it means one of `versions`. Holds here even where others cannot be asked: what is deleted is gone."""

        def decide(now: Pointer) -> Pointer:
            return Pointer(name, "", now.revision + 1, time.time()) if now.version in versions else now

        try:
            await uninterrupted(self._flip(name, decide))
        except Unavailable:
            await uninterrupted(self.learn(decide(self.of(name))))

    async def learn(self, pointer: Pointer) -> bool:
        """Take in what replicas share of a name if it is newer than what is known, or another word of the same revision: True.

        Two words of one revision: this replica cleared the name while it was cut off, and others changed it.
        """
        async with self._writing:  # the newest is written last
            if newer(known := self.of(pointer.name), pointer) is known or pointer == known:
                return False
            try:
                await self._make_room(pointer.name)
            except ResourceExhausted as error:
                log.error("a pointer of another replica is left out", extra={"pointer": pointer.name, "reason": str(error)})
                return False
            await uninterrupted(self._compute.run(self._folder.write_pointer, pointer))
            self._known[pointer.name] = pointer
        await self._changes.announce()
        return True

    async def forget_old(self) -> None:
        """Forget names that have meant nothing for CLEARED_SECONDS: every replica does."""
        async with self._writing:
            await self._forget(pointer.name for pointer in self._known.values() if pointer.is_over(time.time()))

    async def watch(self, names: Sequence[str]) -> AsyncGenerator[Told, None]:
        """The pointers at once, then each change, a sign of life in between; names: empty: all.

        Raises InvalidArgument beyond WATCHED_MAX names, ResourceExhausted beyond `watchers_max`, Unavailable when the store stops.
        """
        expect(len(names) <= WATCHED_MAX, f"names: {WATCHED_MAX} at most, got {len(names)}; none: all are watched")
        asked = frozenset(names)
        with self._watching.turn():
            told: dict[str, Pointer] = {}
            first = True
            while True:
                self._changes.refuse_if_draining()
                seen = self._changes.generation
                news = [p for p in self.all() if p != told.get(p.name) and (not asked or p.name in asked)]
                told |= {pointer.name: pointer for pointer in news}
                if news or first:
                    yield Told(news, complete=first)
                first = False
                if not await self._changes.since(seen, HEARTBEAT_SECONDS):
                    yield Told(())

    async def _flip(self, name: str, decide: Callable[[Pointer], Pointer]) -> Pointer:
        async with self._flipping:
            async with self._writing:
                await self._make_room(name)
            pointer = await self._sharing.flip(self.of(name), decide)
            await self.learn(pointer)
        return pointer

    async def _make_room(self, name: str) -> None:
        """Under `_writing`."""
        if name in self._known or len(self._known) < POINTERS_MAX:
            return
        await self._forget(pointer.name for pointer in self._known.values() if not pointer.version)
        if len(self._known) >= POINTERS_MAX:
            raise ResourceExhausted(f"{POINTERS_MAX} names have versions already: delete some, all versions of a name")

    async def _forget(self, names: Iterable[str]) -> None:
        """Under `_writing`: a name that is written again meanwhile would lose its file."""
        for name in list(names):
            await uninterrupted(self._compute.run(self._folder.forget_pointer, name))
            del self._known[name]


def listed(names: Iterable[str]) -> str:
    """Names in a message, the first few."""
    all_names = sorted(names)
    more = len(all_names) - NAMES_IN_WORDS
    return ", ".join(all_names[:NAMES_IN_WORDS]) + (f" and {more} more" if more > 0 else "") if all_names else "none"


def newer(mine: Pointer, theirs: Pointer | None) -> Pointer:
    """Which of two of a name holds: the one with more changes; of two alike, the one that replicas share."""
    return mine if theirs is None or mine.revision > theirs.revision else theirs
