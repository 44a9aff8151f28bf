"""Deleting a version, every copy, with proof: what is gone from which replica, and who has still to do it.

In this order, so that `kill -9` leaves no doubt: the tombstone is on the disk, the pointer means nothing, the files go. A start
deletes what a tombstone covers. What could not be taken away is kept and listed, and is nobody's to promote, until that is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.compute import Compute, uninterrupted
from asm_store.domain.pointers import Pointers, listed
from asm_store.domain.ports import DeletedFile, Folder, Meters, Peers, Replica, Sharing
from asm_store.domain.tombstones import Tombstones
from asm_store.domain.versions import Kept, Key
from treadle.contract.checks import expect
from treadle.contract.errors import NotFound, TreadleError, Unavailable
from treadle.contract.version import VERSION_PREFIX_FORM, check_name, is_version_prefix

log = logging.getLogger("asm_store")
PROOF_BYTES_MAX = 1 << 20  # of an answer: it comes in one message
FILE_PROOF_BYTES, FILES_MAX = 512, 7  # of one file in it, with a path of some 300 bytes; of one version
PROOFS_MAX = 1024  # versions that were deleted here by their tombstone, and whose proof nobody has asked for
SKEW_SECONDS_MAX = 86_400.0  # by which another replica's clock may be ahead
UNKNOWN = "(unknown: Redis does not answer)"  # among pending replicas: who else keeps it cannot be asked


@dataclass(frozen=True, slots=True)
class Deleted:
    """What is gone. pending: replicas that keep a copy, or may, and did not answer."""

    files: list[DeletedFile]
    pending: list[str]


class Deleting:
    """Of one event loop. changing: the lock under which versions are added and deleted."""

    def __init__(
        self, catalogue: Catalogue, pointers: Pointers, tombstones: Tombstones, folder: Folder, sharing: Sharing, peers: Peers,
        compute: Compute, changes: Changes, meters: Meters, changing: asyncio.Lock, *, copying: Callable[[], Iterable[Key]],
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._catalogue, self._pointers, self._tombstones, self._folder = catalogue, pointers, tombstones, folder
        self._sharing, self._peers, self._compute, self._changes = sharing, peers, compute, changes
        self._meters, self._changing, self._copying, self._clock = meters, changing, copying, clock
        self._one_at_a_time, self._proofs = asyncio.Lock(), dict[Key, list[DeletedFile]]()  # proofs that nobody has asked for yet

    async def delete(self, name: str, version: str, *, here_only: bool, at_seconds: float = 0.0) -> Deleted:
        """Delete a version, or all of a name and its pointer where `version` is empty. Raises NotFound, InvalidArgument, Unavailable as `_remove`.

        here_only:  what is kept here, and no other replica is asked
        at_seconds: when, since the epoch, as the replica says that asks; 0: now. One deletion has one time, whatever clocks say: a
                    version that is published again behind it is alive everywhere
        """
        with self._meters.measured("deletes"):
            at = self._time_of(at_seconds)
            if here_only:
                await self._refuse_copies(check_name(name), version, at)
                return Deleted(
                    await uninterrupted(self._delete_here(name, lambda: self._here(name, version), at, whole=not version)), []
                )
            await self._sharing.refresh()  # who else keeps it
            keys = self._meant(name, version)
            files = await uninterrupted(self._delete_here(name, lambda: keys, at, whole=not version))
            others, pending = await self._delete_elsewhere(name, "" if not version else keys[0][1], at)
            return Deleted(files + others, pending)

    def _time_of(self, at_seconds: float) -> float:
        now = self._clock()
        expect(
            0.0 <= at_seconds <= now + SKEW_SECONDS_MAX,
            f"deleted_at_seconds: from 0 to {SKEW_SECONDS_MAX:g} s from now, got {at_seconds!r}",
        )
        return at_seconds or now

    async def _refuse_copies(self, name: str, version: str, at: float) -> None:
        """A copy that is on its way here comes no more, or has come: else it would outlive the proof. version: whole, as replicas say it, or empty."""
        known = {*self._copying(), *((name, each) for each in self._catalogue.versions_of(name))}
        coming = [key for key in known if key[0] == name and version in ("", key[1]) and self._catalogue.get(key) is None]
        if coming:
            await self._tombstones.bury({key: max(at, self._catalogue.published_at(key)) for key in coming})
            async with self._changing:  # one that had looked for its tombstone before is here now
                pass

    async def obey(self, deleted: dict[Key, float]) -> None:
        """Delete here what was deleted elsewhere, when that was after it was published. deleted: seconds since the epoch."""
        async with self._one_at_a_time:
            await self._tombstones.bury(deleted)
            covered = [kept for kept in self._catalogue.all() if self._is_covered(kept)]
            if not covered:
                return
            with self._listed_where_it_fails([kept.key for kept in covered]):
                for kept in covered:
                    await self._pointers.clear(kept.key[0], {kept.key[1]})
                with suppress(Unavailable):  # logged, and tried again when others are heard next, or at the next start
                    await self._remove(covered)

    @contextmanager
    def _listed_where_it_fails(self, keys: Iterable[Key]) -> Iterator[None]:
        """What a tombstone covers is listed no more; where the rest of the deletion fails, what is left is."""
        try:
            yield
        except BaseException:
            for key in keys:
                if (kept := self._catalogue.get(key)) is not None:
                    kept.undeleted = True
            raise

    def _is_covered(self, kept: Kept) -> bool:
        return self._tombstones.covers(kept.key, kept.stored.record.published_at_seconds)

    def _here(self, name: str, version: str) -> list[Key]:
        """What another replica asks to be deleted: what is here, and what the tombstone has deleted just before the question came.

        Raises NotFound where there is none of it here, which to that replica is no error; InvalidArgument as `Catalogue.resolve`.
        """
        check_name(name)
        expect(not version or is_version_prefix(version), f"version: {VERSION_PREFIX_FORM}, got {version!r}")
        known = {*(kept.key for kept in self._catalogue.all()), *self._proofs}
        found = sorted(key for key in known if key[0] == name and key[1].startswith(version))
        if not found and (version or not self._pointers.of(name).version):
            raise NotFound(f"{name} {version or 'with a version or a pointer'} is not kept by replica {self._sharing.name}")
        expect(not version or len(found) == 1, f"version: {version} is the beginning of {len(found)} versions of {name}")
        return found

    def _meant(self, name: str, version: str) -> list[Key]:
        if version:
            return [self._catalogue.resolve(name, version)]
        keys = [(check_name(name), each) for each in sorted(self._catalogue.versions_of(name))]
        if not keys and not self._pointers.of(name).version:
            raise NotFound(f"{name}: there is no version and no pointer of this name")
        most = max(1, PROOF_BYTES_MAX // (FILE_PROOF_BYTES * FILES_MAX * (1 + len(self._sharing.others))))
        expect(
            len(keys) <= most,
            f"{name} has {len(keys)} versions: the proof of more than {most} fits no answer; delete some one by one",
        )
        return keys

    async def _delete_here(self, name: str, meant: Callable[[], list[Key]], at: float, *, whole: bool) -> list[DeletedFile]:
        async with self._one_at_a_time:
            keys = meant()  # now: what a tombstone was just deleting has its proof
            # Of a copy that a faster clock has dated a tombstone is not earlier: else that would be alive.
            tombstones = {key: max(at, self._catalogue.published_at(key)) for key in keys}
            for key in keys:
                if tombstones[key] > self._tombstones.deleted_at(key):
                    self._proofs.pop(key, None)  # of a deletion before this one
            await self._tombstones.bury(tombstones)
            self._sharing.told()
            with self._listed_where_it_fails(keys):
                pointed = self._pointers.of(name).version
                await self._pointers.clear(name, {version for _, version in keys} | ({pointed} if whole and pointed else set()))
                await self._remove(kept for key in keys if (kept := self._catalogue.get(key)) is not None)
            return [file for key in keys for file in self._proofs.pop(key, ())]

    async def _remove(self, versions: Iterable[Kept]) -> None:
        """Raises Unavailable, once the others are gone, for one whose files cannot be deleted: it is kept and listed, and can be deleted again."""
        failed, changed = list[str](), False
        for kept in list(versions):
            async with self._changing:
                if kept.gone:
                    continue
                self._catalogue.drop(kept)  # nobody is told any more where it lies
                try:
                    removed = await self._compute.run(self._folder.delete, kept.stored, unread_only=False)
                except OSError as error:
                    if not kept.undeleted:  # each exchange with others tries again
                        log.error("version cannot be deleted", extra={"path": str(kept.stored.folder), "reason": str(error)})
                        kept.undeleted = changed = True
                    self._catalogue.add(kept)
                    failed.append(f"{kept.key[0]} {kept.key[1]} ({error.strerror})")
                    continue
            changed = True
            log.info("version deleted", extra={"dictionary": kept.key[0], "version": kept.key[1], "uses": kept.uses})
            self._proofs[kept.key] = [
                DeletedFile(*kept.key, str(file.path), file.nbytes, self._sharing.name, file.freed and not kept.uses)
                for file in removed or ()
            ]
        while len(self._proofs) > PROOFS_MAX:
            del self._proofs[next(iter(self._proofs))]
        if changed:  # else nobody is woken: replicas would keep each other busy with what stays as it is
            await self._changes.announce()
            self._sharing.told()
        if failed:
            raise Unavailable(f"the files of {listed(failed)} cannot be deleted; delete it again once that is mended")

    async def _delete_elsewhere(self, name: str, version: str, at: float) -> tuple[list[DeletedFile], list[str]]:
        others = list(self._sharing.others)
        answers = await asyncio.gather(*(self._ask(replica, name, version, at) for replica in others))
        files = [file for answer in answers for file in answer or ()]
        pending = [replica.name for replica, answer in zip(others, answers, strict=True) if answer is None]
        return files, pending + ([UNKNOWN] if self._sharing.stale else [])

    async def _ask(self, replica: Replica, name: str, version: str, at: float) -> list[DeletedFile] | None:
        """What it deleted; None: it keeps, or may keep, a copy, and does not answer."""
        keeps = any(key[0] == name and (not version or key[1] == version) for key in replica.versions)
        if not replica.alive:
            return None if keeps else []
        try:
            return await self._peers.delete(replica, name, version, at)
        except TreadleError as error:
            log.warning("a replica has not deleted", extra={"replica": replica.name, "dictionary": name, "reason": str(error)})
            return None
