"""What the domain needs from outside: the folder of the versions, the other replicas, and someone who counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from asm_store.domain.versions import FileInfo, Key, Pin, Pointer, Record, Stored
from treadle.contract.dictionary import Dictionary

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Adopted:
    """What was found at a start. used_at_seconds: of each version; torn: how many were set aside."""

    versions: Sequence[Stored]
    used_at_seconds: Mapping[Key, float]
    pins: Mapping[Key, Pin]
    pointers: Sequence[Pointer]
    tombstones: Mapping[Key, float]
    torn: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A file that is gone. freed: False while a process still maps it, or where its bytes could not be freed."""

    path: Path
    nbytes: int
    freed: bool


class Staged(Protocol):
    """A version that is being written out of sight. Any thread, one at a time."""

    @property
    def folder(self) -> Path:
        """Where its files lie."""

    def write(self, work: Callable[[Path], Result]) -> Result:
        """What `work` answers, which writes files into the folder itself. Raises ResourceExhausted where it finds no room, and as it does."""

    def append(self, name: str, data: bytes) -> None:
        """Write bytes behind those that the file has. Raises ResourceExhausted without room."""

    def sync(self) -> None:
        """Force what was written to the disk, and let go of it: nothing is appended any more."""

    def describe(self, record: Record, manifest_json: bytes, card_json: bytes) -> None:
        """Write what is said of it beside its files, the manifest last: only the rename is left. Raises ResourceExhausted."""

    def commit(self, record: Record) -> Stored:
        """Show what was described, by one rename, in place of nothing or of what was torn. Raises ResourceExhausted."""

    def discard(self) -> None:
        """Remove it, unless it was committed."""


class Folder(Protocol):
    """Versions, pointers, pins and tombstones on the disk. Any thread."""

    def stage(self) -> Staged:
        """Begin a version. Raises ResourceExhausted without room."""

    def adopt(self, check: Callable[[Path, Dictionary], None] | None) -> Adopted:
        """Take in what is there; sweep what a killed process left; set aside what is torn. check: raises for a torn version."""

    def delete(self, stored: Stored, *, unread_only: bool) -> list[Removed] | None:
        """Delete a version's files. unread_only: None, and nothing done, while a process maps it, or may: without its lock file nobody knows.

        Raises OSError, and nothing is done, where they cannot be taken out of sight. What stays of them after that is logged, not freed,
        and swept at the next start.
        """

    def set_aside(self, stored: Stored) -> None:
        """Take a torn version out of sight, for a look; the last few are kept."""

    def readers(self, versions: Sequence[Stored]) -> list[int]:
        """Processes that map each, this one not counted."""

    def touch(self, stored: Stored, used_at_seconds: float) -> None:
        """Remember when it was last used. Raises OSError."""

    def write_pin(self, stored: Stored, pin: Pin) -> None:
        """Remember a pin."""

    def write_pointer(self, pointer: Pointer) -> None:
        """Remember what a name means, in one file that is replaced at once."""

    def forget_pointer(self, name: str) -> None:
        """Forget a name that means nothing."""

    def write_tombstones(self, tombstones: Mapping[Key, float]) -> None:
        """Remember what was deleted, and when."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A version as another replica tells of it."""

    record: Record
    manifest_json: bytes


@dataclass(frozen=True, slots=True)
class Replica:
    """Another replica, as last heard. alive: it has renewed its lease; versions: what it keeps."""

    name: str
    address: str
    alive: bool
    versions: Mapping[Key, Remote]


@dataclass(frozen=True, slots=True)
class DeletedFile:
    """Proof of a file that is gone: which version it belonged to, at which replica."""

    name: str
    version: str
    path: str
    nbytes: int
    replica: str
    freed: bool


@dataclass(frozen=True, slots=True)
class Announced:
    """What comes, as a caller or another replica says. published_at_seconds: None: now."""

    manifest_json: bytes
    files: tuple[FileInfo, ...]
    card_json: bytes
    tenant: str
    promote: bool = False
    published_at_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file on their way in. crc32c: of `data`."""

    name: str
    offset_bytes: int
    data: bytes
    crc32c: int


class End:
    """All was sent."""


class Peers(Protocol):
    """Calls of other replicas. Errors are those of `treadle.contract.errors`; Unavailable for one that does not answer."""

    def get(self, replica: Replica, key: Key) -> AsyncGenerator[Announced | Piece | End, None]:
        """A version's files, the announcement first."""

    async def delete(self, replica: Replica, name: str, version: str, at_seconds: float) -> list[DeletedFile]:
        """Delete what it keeps of a version, or of a name where `version` is empty, as of then, since the epoch. None there: an empty list."""


class Sharing(Protocol):
    """What replicas know together. A store that stands alone has `Alone`."""

    @property
    def name(self) -> str:
        """Of this replica."""

    @property
    def others(self) -> Sequence[Replica]:
        """As last heard."""

    @property
    def stale(self) -> bool:
        """True while what is shared cannot be read: what is known is the last that was heard."""

    async def refresh(self) -> None:
        """Read again what others keep, where that can be read."""

    async def flip(self, mine: Pointer, decide: Callable[[Pointer], Pointer]) -> Pointer:
        """Set a pointer by compare-and-set: `decide` is told what it is among all replicas and answers what it shall be, or raises.

        mine: as this replica knows it. Raises Unavailable where it cannot be compared with what the others know.
        """

    async def claim(self, name: str, tenant: str) -> bool:
        """Whether `tenant` may take a name that is nobody's, until the others know of them; False: another tenant is taking it.

        Raises Unavailable where the others cannot be asked.
        """

    def told(self) -> None:
        """Something of this replica has changed: others are told soon."""


class Meters(Protocol):
    """Counts what happens."""

    def measured(self, what: str) -> AbstractContextManager[None]:
        """Count one of publishes, promotes, extends, deletes, lookups, opens, gets or fetches by how the body ends, and time it."""

    def evicted(self, outcome: str) -> None:
        """Count an eviction: ok, read (a process maps it, so that it stays), or failed (its files cannot be taken away)."""

    def torn(self, versions: int) -> None:
        """Count versions found torn."""


class Alone:
    """The Sharing of a store without a Redis."""

    others: Sequence[Replica] = ()
    stale = False

    def __init__(self, name: str) -> None:
        self.name = name

    async def refresh(self) -> None:
        """See Sharing."""

    async def flip(self, mine: Pointer, decide: Callable[[Pointer], Pointer]) -> Pointer:
        """See Sharing."""
        return decide(mine)

    async def claim(self, name: str, tenant: str) -> bool:
        """See Sharing: who adds versions here does so one by one."""
        return True

    def told(self) -> None:
        """See Sharing."""
