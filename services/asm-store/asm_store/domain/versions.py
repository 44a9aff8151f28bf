"""What a store knows of a version, a pointer and a deletion, and how these are written down."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from treadle.contract.checks import expect, is_int, object_fields
from treadle.contract.dictionary import DICTIONARY_BYTES_MAX, Dictionary
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE
from treadle.contract.errors import InvalidArgument
from treadle.contract.fingerprint import Fingerprint
from treadle.contract.version import check_name, check_version

LOCK_FILE, RECORD_FILE, PIN_FILE = "lock", "record.json", "pin.json"
RECORD_BYTES_MAX = 64 << 10
FILES = (TENSORS_FILE, PREFIX_KV_FILE)  # those whose bytes are streamed
TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
REVISION_MAX = 1 << 53
CLEARED_SECONDS = 90.0 * 86_400  # then a name that means nothing is forgotten, as deletions are
Key = tuple[str, str]  # name and version


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a version: its name, size, and the sha256 of its bytes."""

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        expect(self.name in FILES, f"files: {' or '.join(FILES)}, got {self.name!r}")
        expect(
            is_int(self.nbytes, 1, DICTIONARY_BYTES_MAX),
            f"files: {self.name}: bytes 1 to {DICTIONARY_BYTES_MAX}, got {self.nbytes!r}",
        )
        check_version(self.sha256)


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a published version beside its manifest. published_at_seconds: since the epoch, the same at every replica."""

    name: str
    version: str
    tenant: str
    published_at_seconds: float
    files: tuple[FileInfo, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        check_version(self.version)
        expect(_is_tenant(self.tenant), f"tenant: got {self.tenant!r}")
        expect(is_seconds(self.published_at_seconds), f"published_at_seconds: got {self.published_at_seconds!r}")

    @property
    def key(self) -> Key:
        """Name and version."""
        return self.name, self.version

    def to_json(self) -> bytes:
        """As text, for the disk and for other replicas."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Record:
        """Read it back. Raises InvalidArgument."""
        try:
            fields = object_fields(
                "record", json.loads(text), {"name", "version", "tenant", "published_at_seconds", "files"}, set()
            )
            files = tuple(FileInfo(**one) for one in fields["files"])
            return cls(fields["name"], fields["version"], fields["tenant"], fields["published_at_seconds"], files)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"record: damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class Stored:
    """A version whose files are here. offsets: of each tensor in dictionary.safetensors, bytes from its beginning."""

    record: Record
    dictionary: Dictionary
    manifest_json: bytes
    card_json: bytes
    fingerprint: Fingerprint
    offsets: Mapping[str, int]
    folder: Path

    @property
    def key(self) -> Key:
        """Name and version."""
        return self.record.key

    @property
    def file_bytes(self) -> int:
        """Bytes on disk of what was published."""
        return sum(file.nbytes for file in self.record.files) + len(self.manifest_json) + len(self.card_json)

    @property
    def lock_path(self) -> Path:
        """The file that readers lock."""
        return self.folder / LOCK_FILE

    @property
    def tensors_path(self) -> Path:
        """The file of the tensors."""
        return self.folder / TENSORS_FILE

    @property
    def prefix_kv_path(self) -> Path | None:
        """The file of the exact prefix KV; None: not kept."""
        return None if self.dictionary.prefix_kv is None else self.folder / PREFIX_KV_FILE


@dataclass(frozen=True, slots=True)
class Pin:
    """Until when a version is pinned, and when that was said, seconds since the epoch: what was said last holds."""

    until_seconds: float = 0.0
    changed_at_seconds: float = 0.0

    def to_json(self) -> bytes:
        """As text, for the disk and for other replicas."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Pin:
        """Read it back. Raises InvalidArgument."""
        try:
            fields = object_fields("pin", json.loads(text), {"until_seconds", "changed_at_seconds"}, set())
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"pin: damaged: {error}") from error
        expect(all(is_seconds(value) for value in fields.values()), "pin: damaged")
        return cls(**fields)


@dataclass(slots=True)
class Kept:
    """A version that is here, and who uses it. holds: Hold calls; uses: calls of ours that read its files; gone: deleted.

    undeleted: its deletion has failed behind the tombstone, and is still to be done
    """

    stored: Stored
    used_at_seconds: float
    pin: Pin = field(default_factory=Pin)
    holds: int = 0
    uses: int = 0
    gone: bool = False
    undeleted: bool = False

    @property
    def key(self) -> Key:
        """Name and version."""
        return self.stored.key

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A call of ours reads its files: it is not evicted."""
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a name means. version: empty: nothing, since `cleared_at_seconds`; revision: counts its changes, 0: it never meant anything.

    owner: tenant whose the name is for as long as it means something, whatever becomes of its versions; empty: not known
    """

    name: str
    version: str = ""
    revision: int = 0
    cleared_at_seconds: float = 0.0
    owner: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.version:
            check_version(self.version)
        expect(is_int(self.revision, 0, REVISION_MAX), f"revision: got {self.revision!r}")
        expect(is_seconds(self.cleared_at_seconds), f"cleared_at_seconds: got {self.cleared_at_seconds!r}")
        expect(self.owner == "" or _is_tenant(self.owner), f"owner: got {self.owner!r}")

    def is_over(self, now: float) -> bool:
        """Whether it means nothing, and has for so long that every replica that comes back has heard it."""
        return not self.version and 0 < self.cleared_at_seconds < now - CLEARED_SECONDS

    def to_json(self) -> bytes:
        """As text, for the disk and for other replicas."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Pointer:
        """Read it back. Raises InvalidArgument."""
        try:
            optional = {"cleared_at_seconds", "owner"}
            return cls(**object_fields("pointer", json.loads(text), {"name", "version", "revision"}, optional))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(f"pointer: damaged: {error}") from error


def is_seconds(value: object) -> bool:
    """Whether it is a time since the epoch."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1e11


def _is_tenant(value: object) -> bool:
    return isinstance(value, str) and TENANT.fullmatch(value) is not None
