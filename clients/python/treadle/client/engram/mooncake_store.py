"""A Mooncake Store as a place for segments: large pinned objects, replicas counted, every byte compared with a checksum.

Owns what the store's answers mean: 0 for a put that changed nothing, nothing instead of an error, fewer replicas than asked for.
Does not know what the objects are for (`mooncake_push`, and the pool's loads).
"""

from __future__ import annotations

import json
import mmap
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.mooncake_engine import PROTOCOLS, load
from treadle.contract import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable, canonical_json
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels import crc32c

SCHEMA = "treadle.store-manifest/1"
PART_BYTES_MIN, PART_BYTES_MAX = 64 << 20, 1 << 30  # of an object: the store's cost is by object, not by byte
REPLICAS_MAX = 16
MANIFEST_BYTES_MAX = 4 << 20
CONNECT_SECONDS_MAX = 5.0  # the library itself takes minutes to notice that there is no master
LOCAL_BYTES = 16 << 20  # the library's own buffer, for its small calls
RETRY_SECONDS_MAX = 30.0  # reads of a replica whose node died fail for 10 s, though others are whole: the master has to notice
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.25, 4.0
POINTER_BYTES = 64  # a version
GIVEN_UP_MAX = 64  # buffers left to reads that failed, in the life of a process; over tcp they take addresses and no memory
_NOT_FOUND, _NO_SPACE = -704, -200


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes kept as parts of `part_bytes` each, the last one shorter; `crcs`: CRC32C of each."""

    byte_count: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """What was pushed of a version: `manifest_json` hashes to it; blobs are its layers by number, `token_map`, `fusion`, `card`."""

    manifest_json: bytes
    part_bytes: int
    blobs: Mapping[str, Blob]

    def to_json(self) -> bytes:
        """As an object of the store."""
        blobs = {name: {"bytes": blob.byte_count, "crc32c": list(blob.crcs)} for name, blob in self.blobs.items()}
        return canonical_json({
            "schema": SCHEMA, "manifest": self.manifest_json.decode(), "part_bytes": self.part_bytes, "blobs": blobs,
        })  # fmt: skip

    @classmethod
    def from_json(cls, text: bytes) -> StoredManifest:
        """Read one. Raises DataLoss for what is none."""
        try:
            values: dict[str, Any] = json.loads(text)
            blobs = {
                str(name): Blob(int(blob["bytes"]), tuple(int(crc) for crc in blob["crc32c"]))
                for name, blob in values["blobs"].items()
            }
            found = cls(str(values["manifest"]).encode(), int(values["part_bytes"]), blobs)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise DataLoss(f"the store's manifest is damaged: {error!r}") from error
        check_part_bytes(found.part_bytes)
        for name, blob in found.blobs.items():
            if values.get("schema") != SCHEMA or blob.byte_count < 1 or len(blob.crcs) != -(-blob.byte_count // found.part_bytes):
                raise DataLoss(f"the store's manifest is damaged: {name} has {blob.byte_count} bytes in {len(blob.crcs)} parts")
        return found


def check_part_bytes(part_bytes: int) -> None:
    """Raise InvalidArgument unless parts of that size are allowed: whole chunks, 64 MiB to 1 GiB."""
    if not PART_BYTES_MIN <= part_bytes <= PART_BYTES_MAX or part_bytes % CHUNK_BYTES:
        raise InvalidArgument(
            f"part bytes: a multiple of {CHUNK_BYTES} from {PART_BYTES_MIN} to {PART_BYTES_MAX}, got {part_bytes}"
        )


def manifest_key(model: str, version: str) -> str:
    """Where the manifest of a version is; written last."""
    return f"treadle/{model}/{version}/manifest"


def part_key(model: str, version: str, blob: str, part: int) -> str:
    """Where a part of a blob is."""
    return f"treadle/{model}/{version}/{blob}/{part}"


def pointer_key(model: str) -> str:
    """Where the version is that was pushed last."""
    return f"treadle/{model}/current"


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Registered memory and the array over it."""

    memory: mmap.mmap
    array: NDArray[np.uint8]


_given_up: list[_Buffer] = []  # a failed read may still write here: never freed


class SegmentStore:
    """A client of a Mooncake Store that gives it no memory of its own. Use as a context manager; not thread-safe."""

    def __init__(self, master: str, protocol: str = "tcp") -> None:
        """master: host:port. Raises InvalidArgument, Unavailable if Mooncake is not installed or the master does not answer."""
        if protocol not in PROTOCOLS:
            raise InvalidArgument(f"protocol: {' or '.join(PROTOCOLS)}, got {protocol!r}")
        self.master, self._mooncake = master, load("mooncake.store")
        self._store = self._mooncake.MooncakeDistributedStore()
        code = self._store.setup(_our_address(master), "P2PHANDSHAKE", 0, LOCAL_BYTES, protocol, "", master)
        if code != 0:
            raise Unavailable(
                f"the Mooncake Store at {master} does not take us (code {code}); the library's log on stderr says why"
            )
        self._buffers: list[_Buffer] = []

    def buffer(self, byte_count: int) -> NDArray[np.uint8]:
        """Registered memory, u8 [byte_count], until the store is closed."""
        if len(_given_up) >= GIVEN_UP_MAX:
            raise ResourceExhausted(f"{GIVEN_UP_MAX} buffers were given up to reads that failed, the limit: restart this process")
        memory = mmap.mmap(-1, max(byte_count, mmap.PAGESIZE))
        array = np.frombuffer(memory, dtype=np.uint8)
        code = self._store.register_buffer(array.ctypes.data, array.nbytes)
        if code != 0:
            raise ResourceExhausted(
                f"Mooncake does not register {array.nbytes} bytes (code {code}); over rdma: ulimit -l unlimited"
            )
        self._buffers.append(_Buffer(memory, array))
        return array[:byte_count]

    def put(self, key: str, data: NDArray[np.uint8], replicas: int) -> None:
        """Store `data`, which lies in a `buffer`, pinned, in `replicas` places; an object that is there already is left as it is.

        What it holds is for the caller to read back. Raises ResourceExhausted for no room, Unavailable for too few places.
        """
        code = self._store.put_from(key, data.ctypes.data, data.nbytes, self._config(replicas))
        self._check_put(key, code, data.nbytes)
        places = self._places(key)
        if len(places) < replicas:
            raise Unavailable(
                f"{key} has {len(places)} of {replicas} replicas: the store took it all the same; start more store nodes with room, "
                "or push with fewer replicas (an object keeps the replicas that it was put with: push with --replace)"
            )

    def put_pointer(self, key: str, text: bytes, replicas: int) -> None:
        """Store a few bytes in place of what was there."""
        self._check_put(key, self._store.upsert(key, text, self._config(replicas)), len(text))
        if len(self._places(key)) < replicas:
            raise Unavailable(f"{key} has fewer than {replicas} replicas")

    def read(self, key: str, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """An object of exactly out.nbytes, `out` in a `buffer`. Returns where it is: after a failure another buffer than `out`.

        Raises NotFound, DataLoss for another size, Unavailable when no replica could be read for RETRY_SECONDS_MAX.
        """
        until, pause = time.monotonic() + RETRY_SECONDS_MAX, PAUSE_SECONDS
        while True:
            count = int(self._store.get_into(key, out.ctypes.data, out.nbytes))
            if count == out.nbytes:
                return out
            if count == _NOT_FOUND:
                raise NotFound(f"the store at {self.master} has no {key}")
            size = int(self._store.get_size(key))
            if count >= 0 or 0 <= size != out.nbytes:
                raise DataLoss(f"{key}: {out.nbytes} bytes expected, the store has {max(size, count)}")
            out = self._replaced(out)
            if time.monotonic() + pause > until:
                raise Unavailable(f"{key} could not be read for {RETRY_SECONDS_MAX:g} s (code {count}): are its store nodes alive?")
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def size(self, key: str, most: int) -> int:
        """Bytes of an object. Raises NotFound, DataLoss beyond `most`, Unavailable."""
        size = int(self._store.get_size(key))
        if size == _NOT_FOUND:
            raise NotFound(f"the store at {self.master} has no {key}: it was not pushed, or the store's master was restarted since")
        if size < 0:
            raise Unavailable(f"the store at {self.master} does not answer (code {size})")
        if not 0 < size <= most:
            raise DataLoss(f"{key}: {size} bytes, at most {most} expected")
        return size

    def remove(self, key: str) -> None:
        """Remove an object, pinned and leased or not; nothing where there is none. Raises Unavailable."""
        code = int(self._store.remove(key, True))
        if code not in (0, _NOT_FOUND):
            raise Unavailable(f"{key} could not be removed (code {code})")

    def close(self) -> None:
        """Let go of buffers and connections."""
        for buffer in self._buffers:
            self._store.unregister_buffer(buffer.array.ctypes.data)
        self._buffers.clear()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _replaced(self, spoilt: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Another buffer for one into which a read has failed, and may still write."""
        place = next(at for at, buffer in enumerate(self._buffers) if buffer.array.ctypes.data == spoilt.ctypes.data)
        given_up = self._buffers.pop(place)
        given_up.memory.madvise(mmap.MADV_DONTNEED)  # its addresses stay, its pages come back only where something is written
        _given_up.append(given_up)
        return self.buffer(spoilt.nbytes)

    def _config(self, replicas: int) -> Any:
        if not 1 <= replicas <= REPLICAS_MAX:
            raise InvalidArgument(f"replicas: 1 to {REPLICAS_MAX}, got {replicas}")
        config = self._mooncake.ReplicateConfig()
        config.replica_num, config.with_hard_pin = replicas, True  # unpinned objects are evicted when room is short
        return config

    def _check_put(self, key: str, code: int, byte_count: int) -> None:
        if code == _NO_SPACE:
            raise ResourceExhausted(f"the store has no room for {key} ({byte_count} bytes for each replica): add store nodes")
        if code != 0:
            raise Unavailable(f"{key} could not be put (code {code}): is the master at {self.master} alive, are there store nodes?")

    def _places(self, key: str) -> set[str]:
        """Where whole replicas in memory are."""
        complete = self._mooncake.ReplicaStatus.COMPLETE
        found = [each for each in self._store.get_replica_desc(key) if each.is_memory_replica() and each.status == complete]
        return {str(each.get_memory_descriptor().buffer_descriptor.transport_endpoint) for each in found}


class StoredVersion:
    """A pushed version, read part by part, each compared with its checksum."""

    def __init__(self, store: SegmentStore, model: str, version: str) -> None:
        """version: empty for the one that was pushed last. Raises NotFound, DataLoss, Unavailable."""
        self._store, self.model = store, model
        self.version = version or self._small(pointer_key(model), POINTER_BYTES).decode(errors="replace")
        self.manifest = StoredManifest.from_json(self._small(manifest_key(model, self.version), MANIFEST_BYTES_MAX))
        self._part = store.buffer(self.manifest.part_bytes)
        self._loaded: tuple[str, int, NDArray[np.uint8]] | None = None

    def read(self, blob: str, first: int, out: NDArray[np.uint8]) -> None:
        """Fill flat `out` with the bytes of a blob from `first` on. Raises NotFound, DataLoss, Unavailable."""
        if blob not in self.manifest.blobs or first + out.nbytes > self.manifest.blobs[blob].byte_count:
            raise DataLoss(f"{self.model} {self.version}: the store has no bytes {first} to {first + out.nbytes} of {blob}")
        part_bytes, done = self.manifest.part_bytes, 0
        while done < out.nbytes:
            part, skipped = divmod(first + done, part_bytes)
            data = self._load(blob, part)
            count = min(out.nbytes - done, data.nbytes - skipped)
            out[done : done + count] = data[skipped : skipped + count]
            done += count

    def _load(self, blob: str, part: int) -> NDArray[np.uint8]:
        if self._loaded is not None and self._loaded[:2] == (blob, part):
            return self._loaded[2]
        kept = self.manifest.blobs[blob]
        length = min(self.manifest.part_bytes, kept.byte_count - part * self.manifest.part_bytes)
        key, self._loaded = part_key(self.model, self.version, blob, part), None
        data = self._store.read(key, self._part[:length])
        if data.ctypes.data != self._part.ctypes.data:  # a read failed on the way: the next part needs a whole buffer again
            self._part = self._store.buffer(self.manifest.part_bytes)
        if crc32c(data) != kept.crcs[part]:
            raise DataLoss(f"{key} is damaged: its CRC32C differs from what was pushed")
        self._loaded = blob, part, data
        return data

    def _small(self, key: str, most: int) -> bytes:
        return bytes(self._store.read(key, self._store.buffer(self._store.size(key, most))))


def _our_address(master: str) -> str:
    """The address of this host towards the master, by which store nodes reach us. Raises Unavailable if nobody listens there."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"a store is host:port of its master, got {master!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS_MAX) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unavailable(f"no Mooncake Store at {master} ({error}): is mooncake_master running there, and reachable?") from error
