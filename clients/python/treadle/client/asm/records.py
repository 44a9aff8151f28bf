"""What a store says, as plain values, and the messages that they come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client.asm.manifests import ReadManifests
from treadle.contract.dictionary import LOG_BASE, Dictionary
from treadle.contract.errors import DataLoss, InvalidArgument
from treadle.contract.version import VERSION_PREFIX_FORM, check_name, is_version_prefix


@dataclass(frozen=True, slots=True)
class Ref:
    """A version of a name. version: 8 to 64 hexadecimal digits from its beginning; "": the one that the pointer names."""

    name: str
    version: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.version and not is_version_prefix(self.version):
            raise InvalidArgument(f"version of {self.name}: {VERSION_PREFIX_FORM}, got {self.version!r}")

    @classmethod
    def of(cls, ref: Ref | str) -> Ref:
        """`ref` itself, or what NAME or NAME@VERSION means. Raises InvalidArgument."""
        if isinstance(ref, Ref):
            return ref
        name, at, version = ref.partition("@")
        if at and not version:
            raise InvalidArgument(f"{ref!r}: the version is missing behind the @")
        return cls(name, version)

    @property
    def message(self) -> pb.DictionaryRef:
        """As the wire has it."""
        return pb.DictionaryRef(name=self.name, version=self.version)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long call is. step: what is done now, in a word."""

    bytes_done: int
    bytes_total: int
    step: str


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class StoredDictionary:
    """One version that a store keeps. Times are seconds since the epoch.

    current:              its name's pointer names it
    file_bytes:           of all its files
    pinned_until_seconds: 0: it is not pinned
    readers:              processes on the store's host that hold it now
    card:                 what its builder says of it; empty: nothing
    """

    dictionary: Dictionary
    version: str
    current: bool
    file_bytes: int
    published_at_seconds: float
    used_at_seconds: float
    pinned_until_seconds: float
    readers: int
    tenant: str
    card: dict[str, Any]

    @classmethod
    def of(cls, message: pb.Dictionary, manifests: ReadManifests | None = None) -> StoredDictionary:
        """Read one. manifests: those that need not be read again. Raises DataLoss where the manifest is not what the version is the digest of."""
        dictionary, version = (manifests or ReadManifests()).read(message.manifest_json)
        if (message.ref.name, message.ref.version) != (dictionary.name, version):
            raise DataLoss(
                f"the store calls it {message.ref.name}@{message.ref.version}, its manifest says {dictionary.name}@{version}"
            )
        return cls(
            dictionary, version, message.current, message.file_bytes, message.published_at_seconds, message.used_at_seconds,
            message.pinned_until_seconds, message.readers, message.tenant, _card(message.card_json),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Its name."""
        return self.dictionary.name

    @property
    def ref(self) -> Ref:
        """Name and full version."""
        return Ref(self.name, self.version)


@dataclass(frozen=True, slots=True)
class Published:
    """What was published. existed: the store had it already, nothing was written.

    card_taken: False: the folder has another card than the version that was there, which keeps its own, at every replica
    """

    stored: StoredDictionary
    existed: bool
    card_taken: bool = True


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a name means. version: ""; nothing any more; revision: counts the changes of this name, from 1."""

    name: str
    version: str
    revision: int

    @classmethod
    def of(cls, message: pb.Pointer) -> Pointer:
        """Read one."""
        return cls(message.name, message.version, message.revision)


@dataclass(frozen=True, slots=True)
class DeletedFile:
    """A file that is gone. freed: False while a process maps it: its name is gone, its memory goes with that process."""

    ref: Ref
    path: str
    bytes: int
    replica: str
    freed: bool


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete did. pending_replicas: did not answer, and delete it when they next hear of it; empty: every copy is gone."""

    files: tuple[DeletedFile, ...]
    pending_replicas: tuple[str, ...]

    @classmethod
    def of(cls, message: pb.DeleteResponse) -> Deleted:
        """Read one."""
        files = tuple(
            DeletedFile(Ref(file.ref.name, file.ref.version), file.path, file.bytes, file.replica, file.freed)
            for file in message.files
        )
        return cls(files, tuple(message.pending_replicas))


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """How a store is doing. tenant_bytes: kept for each tenant; replica, replicas: its name and those of the others that it knows."""

    build_version: str
    proto_version: str
    pid: int
    versions: int
    file_bytes: int
    file_bytes_max: int
    tenant_bytes: dict[str, int]
    lookups: int
    evictions: int
    draining: bool
    replica: str
    replicas: tuple[str, ...]

    @classmethod
    def of(cls, message: pb.StatusResponse) -> StoreStatus:
        """Read one."""
        return cls(
            message.build_version, message.proto_version, message.pid, message.versions, message.file_bytes, message.file_bytes_max,
            dict(message.tenant_bytes), message.lookups, message.evictions, message.draining, message.replica,
            tuple(message.replicas),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FoundStates:
    """States of queries.

    states:  f32 [T, heads, head_dim]; log_z: f32 [T, heads], natural logarithm
    cosines: f32 [T, B, G / c], of each lookup to the entry that it found
    """

    states: NDArray[np.float32]
    log_z: NDArray[np.float32]
    cosines: NDArray[np.float32]

    @classmethod
    def of(cls, message: pb.LookupResponse, tokens: int, dictionary: Dictionary) -> FoundStates:
        """Read the states of `tokens` queries. Raises DataLoss for another size or logarithm."""
        if message.log_base != LOG_BASE:
            raise DataLoss(f"log_z comes with base {message.log_base!r}, {LOG_BASE!r} expected")
        heads, head_dim = dictionary.model.heads, dictionary.model.head_dim
        return cls(
            _numbers("states", message.states, (tokens, heads, head_dim)),
            _numbers("log_z", message.log_z, (tokens, heads)),
            _numbers("cosines", message.cosines, (tokens, dictionary.codebooks, dictionary.lookups)),
        )

    @classmethod
    def joined(cls, parts: list[FoundStates]) -> FoundStates:
        """Parts of one call, in order; at least one."""
        return cls(
            np.concatenate([part.states for part in parts]), np.concatenate([part.log_z for part in parts]),
            np.concatenate([part.cosines for part in parts]),
        )  # fmt: skip


def _numbers(name: str, data: bytes, shape: tuple[int, ...]) -> NDArray[np.float32]:
    found = np.frombuffer(data, "<f4")
    if found.size != np.prod(shape):
        raise DataLoss(f"{name}: {len(data)} bytes came, {list(shape)} float32 expected")
    return found.reshape(shape)


def _card(text: bytes) -> dict[str, Any]:
    if not text:
        return {}
    try:
        card = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"card: not JSON: {error}") from error
    if not isinstance(card, dict):
        raise DataLoss(f"card: an object expected, got {type(card).__name__}")
    return card
