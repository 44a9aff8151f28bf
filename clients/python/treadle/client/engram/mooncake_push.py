"""Pushes a version of this host's pool into a Mooncake Store: part by part, each read back before the next, the manifest last.

What was read back has to hash to the version, so a push that ends well is whole. One that was broken off is invisible, and a
second run goes on: parts that are there already are only compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.mooncake_store import (
    Blob,
    SegmentStore,
    StoredManifest,
    check_part_bytes,
    manifest_key,
    part_key,
    pointer_key,
)
from treadle.client.engram.pool_types import OpenedModel, Progress
from treadle.client.engram.sources import map_segments
from treadle.contract import DataLoss, EngramModel
from treadle.contract.table_manifest import CHUNK_BYTES, table_version
from treadle.kernels import crc32c


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push left in the store. `objects`: without the pointer to the version."""

    model: str
    version: str
    bytes: int
    objects: int
    replicas: int


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How to push. `replace`: remove objects first that are there already."""

    replicas: int = 2
    part_bytes: int = 64 << 20
    replace: bool = False


def push_version(
    store: SegmentStore, opened: OpenedModel, fusion: bytes, options: PushOptions, progress: Callable[[Progress], None] | None = None
) -> Pushed:  # fmt: skip
    """Push a version that lies on this host; fusion: its weights, empty for none.

    Raises NotFound if its segments are not on this host, DataLoss if what was read back is not the version, ResourceExhausted for
    no room in the store, Unavailable for too few replicas.
    """
    check_part_bytes(options.part_bytes)
    model, version = opened.resident.model, opened.resident.version
    with ExitStack() as stack:
        segments = map_segments(opened, stack)
        sources: dict[str, NDArray[np.uint8]] = {str(layer): segments[layer].rows.reshape(-1) for layer in model.layers}
        token_map = segments[model.layers[0]].token_map
        if token_map is not None:
            sources["token_map"] = np.frombuffer(token_map.astype("<i4").tobytes(), dtype=np.uint8)
        if fusion:
            sources["fusion"] = np.frombuffer(fusion, dtype=np.uint8)
        if opened.card_json:
            sources["card"] = np.frombuffer(opened.card_json, dtype=np.uint8)
        pushing = _Pushing(store, model, version, options, sum(source.nbytes for source in sources.values()), progress)
        blobs = {name: pushing.push(name, source) for name, source in sources.items()}
        del sources, token_map
    manifest = StoredManifest(model.to_json(), options.part_bytes, blobs)
    pushing.put_small(manifest_key(model.name, version), manifest.to_json())
    store.put_pointer(pointer_key(model.name), version.encode(), options.replicas)
    return Pushed(model.name, version, pushing.done, pushing.objects, options.replicas)


class _Pushing:
    """One push on its way."""

    def __init__(
        self, store: SegmentStore, model: EngramModel, version: str, options: PushOptions, total: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self._store, self._model, self._version, self._options = store, model, version, options
        self._total, self._progress = total, progress
        self.done, self.objects = 0, 0
        self._there, self._back = store.buffer(options.part_bytes), store.buffer(options.part_bytes)

    def push(self, name: str, source: NDArray[np.uint8]) -> Blob:
        """All parts of a blob. Raises DataLoss unless a layer's rows, read back, hash to its table's version."""
        crcs, digests = [], []
        for part, first in enumerate(range(0, source.nbytes, self._options.part_bytes)):
            data = source[first : first + self._options.part_bytes]
            self._say(name)
            back = self._put(part_key(self._model.name, self._version, name, part), data)
            crcs.append(crc32c(back))
            digests += list(_chunk_digests(back))
            self.done += data.nbytes
        if name.isdecimal():
            self._check_table(int(name), digests)
        self._say(name)
        return Blob(source.nbytes, tuple(crcs))

    def put_small(self, key: str, text: bytes) -> None:
        """One object of less than a part, compared byte by byte; a manifest of an earlier push gives way."""
        self._store.remove(key)
        self._put(key, np.frombuffer(text, dtype=np.uint8))

    def _put(self, key: str, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Put and read back; what was read, in a buffer of ours. Raises DataLoss if the store holds something else."""
        if self._options.replace:
            self._store.remove(key)
        there = self._there[: data.nbytes]
        np.copyto(there, data)
        self._store.put(key, there, self._options.replicas)
        self.objects += 1
        back = self._store.read(key, self._back[: data.nbytes])
        if back.ctypes.data != self._back.ctypes.data:
            self._back = self._store.buffer(self._options.part_bytes)
        if crc32c(back) != crc32c(there):
            raise DataLoss(f"{key}: the store holds other bytes under this key; push with --replace to put it anew")
        return back

    def _check_table(self, layer: int, digests: list[bytes]) -> None:
        table = self._model.table(layer)
        if (found := table_version(table.rows, self._model.row.bytes, digests)) != table.version:
            raise DataLoss(f"layer {layer}: the rows hash to {found}, the manifest says {table.version}: verify the version here")

    def _say(self, name: str) -> None:
        if self._progress is not None:
            self._progress(Progress(self.done, self._total, f"layer {name}" if name.isdecimal() else name))


def _chunk_digests(data: NDArray[np.uint8]) -> Iterator[bytes]:
    for first in range(0, data.nbytes, CHUNK_BYTES):
        yield hashlib.sha256(data[first : first + CHUNK_BYTES].data).digest()
