"""How a version comes in: announced, received piece by piece, checked wholly, and only then shown, by one rename.

For callers' publishes, for copies from other replicas and for what extending makes. Whatever fails leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.checking import check_announcement, check_files
from asm_store.domain.compute import Check, Compute, Turnstile, uninterrupted
from asm_store.domain.ports import Announced, End, Folder, Meters, Piece, Sharing, Staged
from asm_store.domain.promoting import Promoting
from asm_store.domain.room import Room
from asm_store.domain.tenancy import Caller, ask_may_change, ask_may_publish, check_may_change
from asm_store.domain.tombstones import Tombstones
from asm_store.domain.versions import FileInfo, Kept, Key, Record
from treadle.contract.checks import expect
from treadle.contract.dictionary import Dictionary
from treadle.contract.errors import DataLoss, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from treadle.kernels import crc32c

log = logging.getLogger("asm_store")
PIECE_BYTES_MAX = 1 << 20
RETRY_SECONDS = 1.0
Events = AsyncIterator[Announced | Piece | End]
Announce = Callable[[Check, Path], tuple[Announced, Dictionary]]  # told what to call between its steps, and a folder


@dataclass(frozen=True, slots=True)
class Published:
    """What was published. existed: it was there already, and nothing was written."""

    kept: Kept
    existed: bool


class Publishing:
    """Of one event loop. changing: the lock under which versions are added and deleted."""

    def __init__(
        self, catalogue: Catalogue, promoting: Promoting, room: Room, tombstones: Tombstones, folder: Folder, sharing: Sharing,
        compute: Compute, changes: Changes, meters: Meters, changing: asyncio.Lock, *, publishes_max: int, seconds_max: float,
        silence_seconds: float, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._catalogue, self._promoting, self._room, self._tombstones = catalogue, promoting, room, tombstones
        self._folder, self._sharing, self._compute, self._changes = folder, sharing, compute, changes
        self._meters, self._changing, self._clock = meters, changing, clock
        self._seconds_max, self._silence_seconds = seconds_max, silence_seconds
        self.turns = Turnstile("publishes", "publishes_max", publishes_max, RETRY_SECONDS)

    async def publish(self, announced: Announced, events: Events, caller: Caller) -> Published:
        """A caller's version. Raises what the proto says of Publish."""
        with self._meters.measured("publishes"), self.turns.turn():
            dictionary = await self._compute.run(check_announcement, announced.manifest_json, announced.files, announced.card_json)
            if announced.promote:
                dictionary.require_whole()
            await ask_may_change(self._catalogue, caller, dictionary.name)
            published = await self.receive(announced, dictionary, events, caller)
            if announced.promote:
                await self.promote(published.kept, caller)
            return published

    async def first(self, events: Events) -> Announced | Piece | End:
        """What a caller begins with. Raises DataLoss, DeadlineExceeded."""
        return await self._next(events, "its beginning")

    async def receive(self, announced: Announced, dictionary: Dictionary, events: Events, caller: Caller | None) -> Published:
        """The bytes of a version that was announced. caller: whose it becomes; None: a copy keeps its owner.

        Raises DataLoss, InvalidArgument, ResourceExhausted, DeadlineExceeded, and as `commit`.
        """
        self._changes.refuse_if_draining()
        key = dictionary.name, hashlib.sha256(announced.manifest_json).hexdigest()
        if (existing := self._existing(key)) is not None:
            return existing
        async with self._staged(announced.tenant, _bytes_of(announced)) as staged:
            await self._receive(staged, announced.files, events)
            await self._compute.run_stoppable(_check, staged.folder, dictionary)
            return await self.commit(staged, announced, dictionary, caller)

    async def make(self, announce: Announce, caller: Caller, nbytes: int) -> Published:
        """A version that is written here. announce: writes the files, in a thread; nbytes: about what they take. Raises as `receive`."""
        async with self._staged(caller.tenant, nbytes) as staged:
            announced, dictionary = await self._compute.run_stoppable(_write, staged, announce)
            await self._compute.run_stoppable(_check, staged.folder, dictionary)
            return await self.commit(staged, announced, dictionary, caller)

    async def commit(self, staged: Staged, announced: Announced, dictionary: Dictionary, caller: Caller | None) -> Published:
        """Show what was written and checked.

        Raises ResourceExhausted, NotFound for a copy of what was deleted meanwhile, AccessDenied where another tenant has taken
        the name meanwhile, Unavailable for a new name of a tenant where the other replicas cannot be asked whether it is theirs.
        """
        if caller is not None:
            await ask_may_publish(self._catalogue, caller, dictionary.name)
        return await uninterrupted(self._commit_and_tell(staged, announced, dictionary, caller))

    async def promote(self, kept: Kept, caller: Caller, expected: str | None = None) -> None:
        """Let its name mean it, once it is published. Raises as `Promoting.promote`, saying that it is published."""
        try:
            await self._promoting.promote(kept, expected, caller)
        except Unavailable as error:
            raise Unavailable(f"{kept.key[0]} {kept.key[1]} is published and not promoted: {error}") from error

    @asynccontextmanager
    async def _staged(self, tenant: str, nbytes: int) -> AsyncIterator[Staged]:
        """Room, time and a folder for one version; what was not committed is gone at the end."""
        try:
            async with asyncio.timeout(self._seconds_max), self._room.reserved(tenant, nbytes):
                staged = self._folder.stage()
                try:
                    yield staged
                finally:
                    await uninterrupted(self._compute.run(staged.discard))
        except TimeoutError as error:
            raise DeadlineExceeded(f"it did not end within publish_seconds_max, {self._seconds_max:g} s") from error

    def _existing(self, key: Key) -> Published | None:
        """Raises Unavailable for what is deleted and whose files are still here: called there, it would go with the next attempt."""
        kept = self._catalogue.get(key)
        if kept is None:
            return None
        if self._tombstones.covers(key, kept.stored.record.published_at_seconds):
            raise Unavailable(f"{key[0]} {key[1]} is deleted and its files are not gone yet: delete it again, then publish it")
        return Published(kept, existed=True)

    async def _commit_and_tell(
        self, staged: Staged, announced: Announced, dictionary: Dictionary, caller: Caller | None
    ) -> Published:
        published = await self._commit(staged, announced, dictionary, caller)
        await self._changes.announce()
        self._sharing.told()
        return published

    async def _commit(self, staged: Staged, announced: Announced, dictionary: Dictionary, caller: Caller | None) -> Published:
        async with self._changing:
            if caller is not None:
                check_may_change(self._catalogue, caller, dictionary.name)
            key = dictionary.name, hashlib.sha256(announced.manifest_json).hexdigest()
            if (existing := self._existing(key)) is not None:
                return existing
            at = announced.published_at_seconds
            if at is None:
                at = max(self._clock(), self._tombstones.deleted_at(key) + 0.001)  # after its deletion, whatever clocks say
            elif self._tombstones.covers(key, at):
                raise NotFound(f"{key[0]} {key[1]} was deleted meanwhile")
            record = Record(*key, announced.tenant, at, announced.files)
            await self._compute.run(staged.describe, record, announced.manifest_json, announced.card_json)
            await self._room.make(announced.tenant, _bytes_of(announced))  # only a rename can fail after that
            stored = await self._compute.run(staged.commit, record)
            kept = Kept(stored, self._clock())
            self._catalogue.add(kept)
        log.info(
            "version published",
            extra={"dictionary": key[0], "version": key[1], "bytes": stored.file_bytes, "tenant": record.tenant},
        )
        return Published(kept, existed=False)

    async def _receive(self, staged: Staged, files: tuple[FileInfo, ...], events: Events) -> None:
        for file in files:
            digest, offset = hashlib.sha256(), 0
            while offset < file.nbytes:
                event = await self._next(events, f"byte {offset} of {file.nbytes} of {file.name}")
                if isinstance(event, End):
                    raise DataLoss(f"{file.name}: the end came at byte {offset} of {file.nbytes}")
                piece = _check_place(event, file, offset)
                await self._compute.run(_take, staged, digest, piece)
                offset += len(piece.data)
            if digest.hexdigest() != file.sha256:
                raise DataLoss(f"{file.name}: its sha256 is {digest.hexdigest()}, {file.sha256} was announced")
        if not isinstance(await self._next(events, "all files, before the end was said"), End):
            raise InvalidArgument("publish: more came where the end was due")
        await self._compute.run_long(staged.sync)

    async def _next(self, events: Events, where: str) -> Announced | Piece | End:
        try:
            async with asyncio.timeout(self._silence_seconds):
                return await anext(events)
        except StopAsyncIteration:
            raise DataLoss(f"publish: the stream ended early, at {where}") from None
        except TimeoutError as error:
            raise DeadlineExceeded(f"publish: nothing came for {self._silence_seconds:g} s, at {where}") from error


def _check(check: Check, folder: Path, dictionary: Dictionary) -> None:
    check_files(folder, dictionary, pace=lambda _: check())


def _write(check: Check, staged: Staged, announce: Announce) -> tuple[Announced, Dictionary]:
    return staged.write(partial(announce, check))


def _check_place(event: Announced | Piece | End, file: FileInfo, offset: int) -> Piece:
    if not isinstance(event, Piece):
        raise InvalidArgument("publish: it began twice")
    expect(event.name == file.name, f"piece.name: {file.name} is due, got {event.name!r}")
    expect(event.offset_bytes == offset, f"piece.offset_bytes: {file.name}: {offset} is due, got {event.offset_bytes}")
    expect(0 < len(event.data) <= PIECE_BYTES_MAX, f"piece.data: {file.name}: 1 to {PIECE_BYTES_MAX} bytes, got {len(event.data)}")
    expect(
        offset + len(event.data) <= file.nbytes, f"piece.data: {file.name}: more than the {file.nbytes} bytes that were announced"
    )
    return event


def _take(staged: Staged, digest: hashlib._Hash, piece: Piece) -> None:
    found = crc32c(piece.data)
    if found != piece.crc32c:
        raise DataLoss(
            f"{piece.name}: the crc32c of the bytes at {piece.offset_bytes} is {found:08x}, {piece.crc32c:08x} came with them"
        )
    digest.update(piece.data)
    staged.append(piece.name, piece.data)


def _bytes_of(announced: Announced) -> int:
    return sum(file.nbytes for file in announced.files) + len(announced.manifest_json) + len(announced.card_json)
