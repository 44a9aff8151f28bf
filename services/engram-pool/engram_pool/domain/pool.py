"""The versions of one host: taken in at start, published, promoted, verified, removed and reaped.

Owns their life cycle: every change of them passes here, one at a time. Does not make versions (loading), read their rows
(gathering) or know how they are kept (the store); its parts know which is current (succession), how one enters memory and
leaves it (residence), what is done about a damaged one (damages), who looks at them (readers). All state changes on the event loop; files are touched in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from engram_pool.domain.catalogue import Catalogue, Resident
from engram_pool.domain.changes import Changes
from engram_pool.domain.compute import Compute, Turnstile, to_the_end
from engram_pool.domain.damages import Damages, Mend
from engram_pool.domain.occupancy import Occupancy
from engram_pool.domain.ports import Doors, Meters, NoDoors, Warmer
from engram_pool.domain.progress import Progress
from engram_pool.domain.readers import Readers
from engram_pool.domain.residence import Residence
from engram_pool.domain.room import LIST_BYTES_MAX, Room
from engram_pool.domain.storing import Ranges, SetAside, Staging, Standing, VersionStore
from engram_pool.domain.succession import VERSIONS_KEPT_MAX, Succession
from engram_pool.domain.verification import Verification
from treadle.contract import DataLoss, EngramModel, InvalidArgument
from treadle.contract.owners import Door, Holding

log = logging.getLogger("engram_pool")
READERS_LEAVE_SECONDS = 2.0  # at the end, how long readers that are leaving too are waited for
READERS_POLL_SECONDS = 0.05
WORK_ENDS_SECONDS = 30.0  # at the end, how long cancelled calls may take to clean up after themselves


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
        self._doors: Doors = doors or NoDoors()
        self._more_doors: list[Door] = []
        self._store, self._compute, self._meters = store, compute, meters
        self._catalogue = Catalogue()
        self.changes = Changes()
        self.occupancy = Occupancy(store, self._catalogue)
        self.readers = Readers(store, compute, self._catalogue, self.changes, watchers_max=watchers_max, holds_max=holds_max)
        self._residence = Residence(store, compute, self._catalogue, self._doors, warmer)
        self.room = Room(store, self._catalogue, table_bytes_max=table_bytes_max, list_bytes_max=list_bytes_max)
        self._succession = Succession(store, compute, self._catalogue, versions_kept_max=versions_kept_max)
        self._reap_grace_seconds = reap_grace_seconds
        self._verifying = Turnstile("verification", "verifications", 1, retry_after_seconds=5.0)
        self._change = asyncio.Lock()  # one change of the versions at a time: each spans files and state
        self._damages = Damages(
            compute, meters, self._doors, self._catalogue, self._residence, self._succession, self.changes, self._change,
            others_repair=store.read_only,
        )  # fmt: skip
        self._working, self._idle = 0, asyncio.Event()
        self._idle.set()

    def repair_with(self, mend: Mend) -> None:
        """From now on damaged chunks are repaired; before, a version with one goes out of service."""
        self._damages.repair_with(mend)

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
            (await self._residence.take_in(stored)).keep_until = time.monotonic() + self._reap_grace_seconds
        for name in sorted({stored.model.name for stored in adopted.versions}):
            current = adopted.current.get(name, "")
            readable = (name, current) not in adopted.left  # else it is current again once it can be read
            await self._succession.adopt(name, current, adopted.before.get(name, ()), rewrite=readable)
        took = round(time.monotonic() - begun, 3)
        counts = {"versions": len(adopted.versions), "corrupt": len(adopted.corrupt), "left": len(adopted.left)}
        log.info("versions adopted", extra={**counts, "seconds": took})

    async def drain(self) -> None:
        """Refuse new work from now on and end watches and loads."""
        self.changes.draining = True
        self._doors.drain()
        await self.changes.announce()

    async def stop(self, *, keep_segments: bool) -> None:
        """Unmap everything, once work in progress has ended; without `keep_segments` delete what no reader holds."""
        self.changes.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), WORK_ENDS_SECONDS)
        except TimeoutError:
            log.error("work in progress does not end", extra={"calls": self._working})
        deadline = time.monotonic() + READERS_LEAVE_SECONDS
        async with self._change:
            await self._compute.run(self._doors.close)  # before anything is unmapped
            left = [] if keep_segments else self._catalogue.all()
            while left := [resident for resident in left if not await self._residence.delete(resident)]:
                if time.monotonic() > deadline:
                    log.warning("segments left to their readers", extra={"versions": len(left)})
                    break
                await asyncio.sleep(READERS_POLL_SECONDS)
            await self._residence.release_all()
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
        self.changes.refuse_if_draining()
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    # -- reading the list -----------------------------------------------------------------------------------------------

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

    def holdings(self) -> list[Holding]:
        """Which rows of which versions can be read here, replaced versions included."""
        return [resident.holding for resident in self._catalogue.all() if not resident.closing and not resident.corrupt]

    @property
    def doors(self) -> tuple[Door, ...]:
        """Native ways to the rows, the fastest first."""
        return (*self._doors.open_doors, *self._more_doors)

    def add_door(self, door: Door) -> None:
        """Tell of a door that is not one of the native ones."""
        self._more_doors.append(door)

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
        return await to_the_end(self._damages.see_to(resident, damage))

    @property
    def others_repair(self) -> bool:
        """True where another host writes the segments: a corrupt version waits here until its checksums fit again."""
        return self._store.read_only

    async def found_whole(self, resident: Resident) -> None:
        """Serve a version again that was corrupt and whose every chunk fits now."""
        await to_the_end(self._damages.found_whole(resident))

    async def _publish(
        self, staging: Staging, model: EngramModel, keep_previous: bool, held: Mapping[int, Ranges | None]
    ) -> Resident:
        resident = self._catalogue.get(model.name, model.version)
        if resident is not None and resident.stored.held != held:
            log.info("version put in place anew, with other rows", extra={"model": model.name, "version": model.version})
            await self._residence.supersede(resident)
            resident = None
        if resident is None:
            resident = await self._residence.take_in(await self._compute.run(staging.commit, model))
            size = resident.stored.segment_bytes
            log.info("version loaded", extra={"model": model.name, "version": model.version, "bytes": size})
        await self._succession.advance(resident, keep_previous=keep_previous)
        await self.changes.announce()
        return resident

    async def _promote(self, model: str, version: str) -> tuple[Resident, str]:
        resident, previous = await self._succession.promote(model, version)
        if resident.version != previous:
            log.info("version promoted", extra={"model": model, "version": resident.version, "previous": previous})
            self._meters.promoted()
            await self.changes.announce()
        return resident, previous

    async def _remove(self, model: str, version: str) -> Removal:
        going = [r for r in self._catalogue.listed() if r.name == model and version in ("", r.version)]
        await self._residence.release_unused()  # a mapping of our own would keep the memory of what is deleted
        aside = [a for a in await self._compute.run(self._store.list_set_aside) if a.name == model and version in ("", a.version)]
        if not going and not aside:
            self._catalogue.find(model, version)  # raises NotFound, saying what there is
        for resident in going:
            await self._succession.stand(resident, Standing.REMOVED)
        await self._succession.replace_unserved(model)
        await self._reap()
        await self.changes.announce()
        kept = [old for old in aside if not await self._compute.run(self._store.delete_set_aside, old)]
        held = sum(self._catalogue.get(r.name, r.version) is r for r in going) + len(kept)
        return Removal((*going, *aside), held)

    async def _reap(self) -> int:
        now = time.monotonic()
        due = [r for r in self._catalogue.retired() if r.standing is Standing.REMOVED or r.keep_until <= now]
        gone = [resident for resident in due if await self._residence.delete(resident)]
        await self._residence.release_unused()
        await self._compute.run(self._store.sweep_superseded)
        for resident in gone:
            log.info("version deleted", extra={"model": resident.name, "version": resident.version})
        if any(resident.standing is Standing.REPLACED for resident in gone):
            await self.changes.announce()
        return len(gone)

    @asynccontextmanager
    async def _one_change(self) -> AsyncIterator[None]:
        async with self._change:
            self.changes.refuse_if_draining()
            yield
