"""The versions of one host: taken in at start, published, listed, watched, verified, removed and reaped.

Owns which version is current and when a version's memory goes. Does not make versions (loading), read their rows
(gathering) or know how they are kept (the store). All state changes on the event loop; files are touched in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from engram_pool.domain.catalogue import Catalogue, Resident
from engram_pool.domain.compute import Compute, Turnstile, to_the_end
from engram_pool.domain.ports import Doors, Meters, NoDoors, Warmer
from engram_pool.domain.progress import Progress
from engram_pool.domain.room import LIST_BYTES_MAX, Room
from engram_pool.domain.storing import Ranges, SetAside, Staging, Standing, StoredVersion, VersionStore
from engram_pool.domain.succession import VERSIONS_KEPT_MAX, Succession
from engram_pool.domain.verification import Damaged, Verification
from treadle.contract import DataLoss, EngramModel, InvalidArgument, TreadleError, Unavailable
from treadle.contract.owners import Door, Holding
from treadle.contract.warm_state import WarmState

log = logging.getLogger("engram_pool")
READERS_LEAVE_SECONDS = 2.0  # at the end, how long readers that are leaving too are waited for
READERS_POLL_SECONDS = 0.05
Mend = Callable[[StoredVersion, Damaged], object]  # raises where the chunk's bytes cannot be had or written
REQUESTS_END_SECONDS = 2.0  # how long requests at a native door may keep a version that is to be deleted; else it is tried again
WORK_ENDS_SECONDS = 30.0  # at the end, how long cancelled calls may take to clean up after themselves


@dataclass(frozen=True, slots=True)
class Listed:
    """A version as callers see it; `readers`: processes on this host that hold it, the pool not counted, and HoldModel calls."""

    resident: Resident
    current: bool
    readers: int


@dataclass(frozen=True, slots=True)
class Removal:
    """Versions taken off the list or deleted where they lay aside, and how many of them readers still hold in memory."""

    removed: tuple[Resident | SetAside, ...]
    awaiting_readers: int


class Pool:
    """All versions that this process keeps. Start it before anything else, stop it last."""

    def __init__(
        self,
        store: VersionStore,
        compute: Compute,
        meters: Meters,
        *,
        table_bytes_max: int,
        watchers_max: int,
        holds_max: int = 1024,
        versions_kept_max: int = VERSIONS_KEPT_MAX,
        reap_grace_seconds: float = 0.0,
        list_bytes_max: int = LIST_BYTES_MAX,
        doors: Doors | None = None,
        warmer: Warmer | None = None,
    ) -> None:
        """warmer: enters the pages of what is mapped; None: they are entered as they are touched"""
        self.draining = False
        self._doors: Doors = doors or NoDoors()
        self._more_doors: list[Door] = []
        self._warmer = warmer
        self._mend: Mend | None = None
        self._store, self._compute, self._meters = store, compute, meters
        self._catalogue = Catalogue()
        self.room = Room(store, self._catalogue, table_bytes_max=table_bytes_max, list_bytes_max=list_bytes_max)
        self._succession = Succession(store, compute, self._catalogue, versions_kept_max=versions_kept_max)
        self._watching = Turnstile("watch", "watches", watchers_max, retry_after_seconds=1.0)
        self._holding = Turnstile("hold", "holds", holds_max, retry_after_seconds=1.0)
        self._reap_grace_seconds = reap_grace_seconds
        self._verifying = Turnstile("verification", "verifications", 1, retry_after_seconds=5.0)
        self._change = asyncio.Lock()  # one change of the versions at a time: each spans files and state
        self._changed, self._generation = asyncio.Condition(), 0
        self._unmapping: list[Resident] = []  # off the list for good, unmapped when their last call ends
        self._working, self._idle = 0, asyncio.Event()
        self._idle.set()

    def repair_with(self, mend: Mend) -> None:
        """From now on damaged chunks are repaired; before, a version with one goes out of service."""
        self._mend = mend

    # -- life -----------------------------------------------------------------------------------------------------------

    async def start(self, *, checksums: bool) -> None:
        """Take in what the store holds. Corrupt and torn versions are set aside and never served.

        What could not be read is left as it is, for the next start. Superseded versions stay for `reap_grace_seconds`.
        """
        begun = time.monotonic()
        adopted = await self._compute.run(self._store.adopt, checksums=checksums)
        self._meters.corrupt(len(adopted.corrupt))
        self._meters.left(len(adopted.left))
        for stored in adopted.versions:
            (await self._take_in(stored)).keep_until = time.monotonic() + self._reap_grace_seconds
        for name in sorted({stored.model.name for stored in adopted.versions}):
            current = adopted.current.get(name, "")
            readable = (name, current) not in adopted.left  # else it is current again once it can be read
            await self._succession.adopt(name, current, adopted.before.get(name, ()), rewrite=readable)
        took = round(time.monotonic() - begun, 3)
        counts = {"versions": len(adopted.versions), "corrupt": len(adopted.corrupt), "left": len(adopted.left)}
        log.info("versions adopted", extra={**counts, "seconds": took})

    async def drain(self) -> None:
        """Refuse new work from now on and end watches and loads."""
        self.draining = True
        self._doors.drain()
        await self._announce()

    async def stop(self, *, keep_segments: bool) -> None:
        """Unmap everything, once work in progress has ended; without `keep_segments` delete what no reader holds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), WORK_ENDS_SECONDS)
        except TimeoutError:
            log.error("work in progress does not end", extra={"calls": self._working})
        deadline = time.monotonic() + READERS_LEAVE_SECONDS
        async with self._change:
            await self._compute.run(self._doors.close)  # before anything is unmapped
            left = [] if keep_segments else self._catalogue.all()
            while left := [resident for resident in left if not await self._delete(resident)]:
                if time.monotonic() > deadline:
                    log.warning("segments left to their readers", extra={"versions": len(left)})
                    break
                await asyncio.sleep(READERS_POLL_SECONDS)
            for resident in [*self._catalogue.all(), *self._unmapping]:
                await self._release(resident)
            if self._warmer is not None:
                await self._compute.run(self._warmer.close)
            await self._compute.run(self._store.close, remove_if_empty=not keep_segments)

    async def reap_forever(self, interval_seconds: float) -> None:
        """Every `interval_seconds`, delete the retired versions that nobody reads."""
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                await self.reap()
            except OSError as error:  # a full or broken disk must not end the reaper
                log.error("reaping failed", exc_info=error)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Work that `stop` waits for. Raises Unavailable once the pool stops."""
        self.refuse_if_draining()
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    # -- reading the list -----------------------------------------------------------------------------------------------

    def refuse_if_draining(self) -> None:
        """Raise Unavailable once the pool stops."""
        if self.draining:
            raise Unavailable("the pool stops and takes no new work")

    def find(self, model: str, version: str, expected_fingerprint: Mapping[str, str] | None = None) -> Resident:
        """A listed version, the current one for an empty `version`.

        Raises NotFound, DataLoss while a chunk of it is damaged, and FingerprintMismatch naming the field that differs from
        `expected_fingerprint`.
        """
        resident = self._catalogue.find(model, version)
        resident.check_intact()
        resident.model.fingerprint.require(expected_fingerprint or {})
        return resident

    def find_readable(self, model: str, version: str, *, damaged_too: bool = False) -> Resident:
        """As `find`; a version that is named is found until its memory goes, removed or not. Raises NotFound, DataLoss.

        damaged_too: for a reader that compares digests itself
        """
        resident = self._catalogue.find_readable(model, version)
        if not damaged_too:
            resident.check_intact()
        return resident

    def residents(self) -> list[Resident]:
        """Every version in memory."""
        return self._catalogue.all()

    def refuse_without_weights(self, model: EngramModel) -> None:
        """Raise InvalidArgument if a grown memory is here already, but was loaded without its weights: a load would not add them."""
        resident = self._catalogue.get(model.name, model.version)
        if resident is not None and resident.stored.fusion is None:
            raise InvalidArgument(f"{model.name} {model.version} is here without its fusion weights: remove it, then load it again")

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
        self.refuse_if_draining()
        with self._holding.turn():
            resident = self.find_readable(model, version)
            with resident.held():
                yield resident
                async with self._changed:
                    await self._changed.wait_for(lambda: self.draining or resident.corrupt)
                resident.check_intact()
                self.refuse_if_draining()

    async def watch(self) -> AsyncGenerator[list[Listed], None]:
        """The list at once, and again after each change; changes in quick succession may be told as one.

        Raises ResourceExhausted beyond `watchers_max`, Unavailable when the pool stops.
        """
        with self._watching.turn():
            async with aclosing(self.changes()) as changes:
                async for _ in changes:
                    yield await self.listing()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Once at once, and again after each change. Raises Unavailable when the pool stops."""
        seen = -1
        while True:
            async with self._changed:
                while not self.draining and self._generation == seen:
                    await self._changed.wait()
                seen = self._generation
            self.refuse_if_draining()
            yield

    def holdings(self) -> list[Holding]:
        """Which rows of which versions can be read here, replaced versions included."""
        return [_holding(resident) for resident in self._catalogue.all() if not resident.closing and not resident.corrupt]

    @property
    def holds(self) -> int:
        """HoldModel calls in progress."""
        return self._holding.inside

    @property
    def doors(self) -> tuple[Door, ...]:
        """Native ways to the rows, the fastest first."""
        return (*self._doors.open_doors, *self._more_doors)

    def add_door(self, door: Door) -> None:
        """Tell of a door that is not one of the native ones."""
        self._more_doors.append(door)

    @property
    def watchers(self) -> int:
        """Watches in progress."""
        return self._watching.inside

    @property
    def table_bytes(self) -> int:
        """Bytes of all segments in memory, retired ones included."""
        return self._catalogue.table_bytes

    @property
    def set_aside_bytes(self) -> int:
        """Bytes of corrupt versions that were set aside."""
        return sum(version.bytes for version in self._store.list_set_aside())

    @property
    def in_memory(self) -> bool:
        """True where segments lie in memory, not on a disk."""
        return self._store.in_memory

    @property
    def models_resident(self) -> int:
        """Versions on the list."""
        return len(self._catalogue.listed())

    @property
    def page_bytes(self) -> int:
        """Smallest page size in use for a table; 0 without tables."""
        return min((resident.page_bytes for resident in self._catalogue.all()), default=0)

    @property
    def warm_bytes(self) -> int:
        """Bytes of tables whose pages were entered in this process."""
        return sum(resident.warmth.bytes_entered for resident in self._catalogue.all() if resident.warmth is not None)

    def versions_in(self, state: WarmState) -> int:
        """Versions that stand so."""
        return sum(resident.warm_state is state for resident in self._catalogue.all())

    def node_bytes(self, node: int) -> int:
        """Bytes of segments in memory on a node, by a sample of their pages."""
        total = 0
        for resident in self._catalogue.all():
            if sampled := sum(resident.nodes.values()):
                total += resident.stored.segment_bytes * resident.nodes.get(node, 0) // sampled
        return total

    def open_readers(self) -> int:
        """Processes that hold a version, counted once for each version, and HoldModel calls."""
        return sum(self._store.readers([resident.stored for resident in self._catalogue.all()])) + self._holding.inside

    # -- changing it ----------------------------------------------------------------------------------------------------

    async def publish(
        self, staging: Staging, model: EngramModel, *, keep_previous: bool, held: Mapping[int, Ranges | None] | None = None
    ) -> Resident:
        """Make a finished version visible and current; a version that is here already, with the same rows, becomes current again.

        held:          the rows that are here, by layer; None: all
        keep_previous: False lets the version that was current go as soon as no reader holds it; True keeps it, with what was kept
                       before, up to `versions_kept_max` versions of a model beside the current one
        """
        async with self._one_change():
            return await to_the_end(self._publish(staging, model, keep_previous, dict(held or dict.fromkeys(model.layers))))

    async def promote(self, model: str, version: str) -> tuple[Resident, str]:
        """Make a listed version current; an empty `version` means the one that was current before the present one.

        Returns it, and the version that was current until now: the same where nothing changes. Raises NotFound saying what there is.
        """
        async with self._one_change():
            return await to_the_end(self._promote(model, version))

    async def remove(self, model: str, version: str) -> Removal:
        """Take a version off the list, or all of a model for an empty `version`. Raises NotFound."""
        async with self._one_change():
            return await to_the_end(self._remove(model, version))

    async def reap(self) -> int:
        """Delete the retired versions that nobody reads; how many went."""
        async with self._change:
            return await to_the_end(self._reap())

    async def verify(self, model: str, version: str) -> AsyncGenerator[Progress, None]:
        """Compare every checksum of a version. A mismatch takes it out of service and raises DataLoss."""
        with self.at_work(), self._verifying.turn():
            resident = self.find(model, version)
            try:
                with resident.in_use():
                    async with aclosing(Verification(resident.stored).run(self._compute)) as events:
                        async for progress in events:
                            yield progress
            except DataLoss as error:
                await self.found_damaged(resident, error)
                raise

    async def found_damaged(self, resident: Resident, damage: DataLoss) -> bool:
        """Take a version out of service; True if the damage could be repaired and it is served again.

        New calls meet DataLoss and calls in progress end. It leaves the list only if nobody has the chunk's bytes.
        """
        return await to_the_end(self._found_damaged(resident, damage))

    async def _found_damaged(self, resident: Resident, damage: DataLoss) -> bool:
        if resident.corrupt:  # somebody else has found it too, and sees to it
            return False
        log.error("corrupt version", extra={"model": resident.name, "version": resident.version, "reason": str(damage)})
        self._meters.corrupt(1)
        resident.corrupt = True
        self._doors.withdraw(resident.stored)
        await self._announce()
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
                await self._announce()
                return True
        async with self._change:
            await self._take_out_of_service(resident)
        return False

    async def _publish(
        self, staging: Staging, model: EngramModel, keep_previous: bool, held: Mapping[int, Ranges | None]
    ) -> Resident:
        resident = self._catalogue.get(model.name, model.version)
        if resident is not None and resident.stored.held != held:
            log.info("version put in place anew, with other rows", extra={"model": model.name, "version": model.version})
            self._doors.withdraw(resident.stored)
            resident.closing = True  # calls that read it go on; none begins
            await self._compute.run(self._store.supersede, resident.stored)
            self._catalogue.drop(resident)
            self._unmapping.append(resident)
            resident = None
        if resident is None:
            resident = await self._take_in(await self._compute.run(staging.commit, model))
            size = resident.stored.segment_bytes
            log.info("version loaded", extra={"model": model.name, "version": model.version, "bytes": size})
        await self._succession.advance(resident, keep_previous=keep_previous)
        await self._announce()
        return resident

    async def _promote(self, model: str, version: str) -> tuple[Resident, str]:
        resident, previous = await self._succession.promote(model, version)
        if resident.version != previous:
            log.info("version promoted", extra={"model": model, "version": resident.version, "previous": previous})
            self._meters.promoted()
            await self._announce()
        return resident, previous

    async def _remove(self, model: str, version: str) -> Removal:
        going = [r for r in self._catalogue.listed() if r.name == model and version in ("", r.version)]
        await self._release_unused()  # a mapping of our own would keep the memory of what is deleted
        aside = [a for a in await self._compute.run(self._store.list_set_aside) if a.name == model and version in ("", a.version)]
        if not going and not aside:
            self._catalogue.find(model, version)  # raises NotFound, saying what there is
        for resident in going:
            await self._succession.stand(resident, Standing.REMOVED)
        await self._succession.replace_unserved(model)
        await self._reap()
        await self._announce()
        kept = [old for old in aside if not await self._compute.run(self._store.delete_set_aside, old)]
        held = sum(self._catalogue.get(r.name, r.version) is r for r in going) + len(kept)
        return Removal((*going, *aside), held)

    async def _reap(self) -> int:
        now = time.monotonic()
        due = [r for r in self._catalogue.retired() if r.standing is Standing.REMOVED or r.keep_until <= now]
        gone = [resident for resident in due if await self._delete(resident)]
        await self._release_unused()
        await self._compute.run(self._store.sweep_superseded)
        for resident in gone:
            log.info("version deleted", extra={"model": resident.name, "version": resident.version})
        if any(resident.standing is Standing.REPLACED for resident in gone):
            await self._announce()
        return len(gone)

    async def _release_unused(self) -> None:
        """Unmap versions that are off the list for good, once their last call has ended."""
        for resident in [r for r in self._unmapping if r.calls == 0 and not self._doors.read(r.stored)]:
            self._unmapping.remove(resident)
            await self._release(resident)

    async def _release(self, resident: Resident) -> None:
        resident.closing = True
        if resident.warmth is not None:
            resident.warmth.drop()
        await self._compute.run(self._store.release, resident.stored)

    async def _delete(self, resident: Resident) -> bool:
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

    async def _take_in(self, stored: StoredVersion) -> Resident:
        pages, nodes = await self._compute.run(_memory_of, stored)
        resident = Resident(stored, stored.standing, page_bytes=pages, nodes=nodes)
        await self._compute.run(self._doors.publish, stored)
        if self._warmer is not None:
            resident.warmth = self._warmer.warm([span for s in stored.segments.values() for span in s.spans_to_enter()])
        self._catalogue.add(resident)
        return resident

    async def _take_out_of_service(self, resident: Resident) -> None:
        self._doors.withdraw(resident.stored)
        if self._catalogue.get(resident.name, resident.version) is not resident:
            return
        self._catalogue.drop(resident)
        self._unmapping.append(resident)
        await self._compute.run(self._store.set_aside, resident.stored)
        await self._succession.replace_unserved(resident.name)
        await self._announce()

    async def _announce(self) -> None:
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    @asynccontextmanager
    async def _one_change(self) -> AsyncIterator[None]:
        async with self._change:
            self.refuse_if_draining()
            yield


def _holding(resident: Resident) -> Holding:
    segments = resident.stored.segments
    held = {layer: ((0, each.row_count),) if each.held is None else each.held for layer, each in segments.items()}
    return Holding(resident.name, resident.version, held)


def _memory_of(stored: StoredVersion) -> tuple[int, dict[int, int]]:
    """(smallest page size in use, sampled pages by memory node)."""
    segments = stored.segments.values()
    nodes: Counter[int] = Counter()
    for segment in segments:
        nodes.update(segment.nodes())
    return min(segment.page_bytes() for segment in segments), dict(nodes)
