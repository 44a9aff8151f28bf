"""Where the segments of versions lie: in files of their own beside the manifest, or in regions of a DAX device.

Owns the step from (folder of a version, layer) to a writer or a mapped segment. Which version lies in which folder, and when one may
go, is not known here; `free` is called under the lock that readers share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from engram_pool.adapters.chunk_files import restore_chunk
from engram_pool.adapters.host_memory import free_bytes, is_memory
from engram_pool.domain.storing import Ranges, TableSegment, TokenMap
from treadle.chassis.small_files import read_small, write_small
from treadle.contract import DataLoss, EngramModel, Table
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels.dax_directory import ID_BYTES, Region, RegionState
from treadle.kernels.dax_space import DaxSpace
from treadle.kernels.dax_writer import RegionWriter
from treadle.kernels.segment import Segment, SegmentWriter

log = logging.getLogger("engram_pool.store")
PLACE_BYTES_MAX = 4096


class Writer(Protocol):
    """A segment being written."""

    def append(self, rows: NDArray[np.uint8]) -> None:
        """Add rows."""

    def append_bytes(self, flat: NDArray[np.uint8]) -> None:
        """Add bytes of rows."""

    def skip(self, digest: bytes) -> None:
        """Pass over a chunk that is not kept."""

    def table(self) -> Table:
        """Rows and version, after the last row."""

    def publish(self, metadata: Mapping[str, str]) -> None:
        """Write what stands around the rows, and make it last."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class SegmentPlaces(Protocol):
    """Where segments lie."""

    def writer(
        self,
        folder: Path,
        layer: int,
        rows: int,
        row_bytes: int,
        token_map: TokenMap | None,
        header_bytes: int,
        held: Ranges | None,
    ) -> Writer:
        """Begin a segment for a version that is made in `folder`. Raises ResourceExhausted."""

    def seal(self, folder: Path, model: EngramModel) -> None:
        """All segments of the version in `folder` are written: they count from now on, whatever happens to us."""

    def map(self, folder: Path, layer: int) -> Segment:
        """Map a segment of the version in `folder`. Raises DataLoss if it is missing or damaged."""

    def restore_chunk(self, segment: TableSegment, chunk: int, data: NDArray[np.uint8]) -> None:
        """Write a chunk's own bytes again where they lie. Raises DataLoss, Unavailable or OSError if that cannot be."""

    def free(self, folder: Path) -> None:
        """Give back what the version in `folder` takes outside of it, before the folder is deleted."""

    def free_bytes(self, folder: Path) -> int:
        """Bytes that can still be written."""

    def in_memory(self, folder: Path) -> bool:
        """True where segments take no disk."""

    def orphans(self, folders: list[Path]) -> list[tuple[str, str, Mapping[int, bytes]]]:
        """Whole versions that none of `folders` has: (model, version, by layer what `adopt` writes into a new folder)."""

    def adopt(self, folder: Path, places: Mapping[int, bytes]) -> EngramModel:
        """Make a folder for an orphan; its manifest. Raises DataLoss."""

    @property
    def read_only(self) -> bool:
        """True where another host writes the segments, and repairs them."""

    @property
    def device_nodes(self) -> Mapping[str, int]:
        """Memory nodes of a device, by kind; none for files."""

    def close(self) -> None:
        """Let go."""


class FilePlaces:
    """One file for each segment, in the version's folder: deleted with it. numa: see SegmentWriter."""

    def __init__(self, numa: str = "") -> None:
        self._numa = numa

    def writer(
        self,
        folder: Path,
        layer: int,
        rows: int,
        row_bytes: int,
        token_map: TokenMap | None,
        header_bytes: int,
        held: Ranges | None,
    ) -> SegmentWriter:
        """See SegmentPlaces."""
        return SegmentWriter(
            folder / segment_name(layer), rows=rows, row_bytes=row_bytes, token_map=token_map, header_bytes=header_bytes, held=held,
            numa=self._numa,
        )  # fmt: skip

    def seal(self, folder: Path, model: EngramModel) -> None:
        """The manifest in the folder does it."""

    def map(self, folder: Path, layer: int) -> Segment:
        """See SegmentPlaces."""
        path = folder / segment_name(layer)
        if path.is_symlink() or not path.is_file():
            raise DataLoss(f"{path} is missing, or no plain file")
        return Segment(path)

    def restore_chunk(self, segment: TableSegment, chunk: int, data: NDArray[np.uint8]) -> None:
        """See SegmentPlaces."""
        restore_chunk(segment, chunk, data)

    def free(self, folder: Path) -> None:
        """The folder is all."""

    def free_bytes(self, folder: Path) -> int:
        """See SegmentPlaces."""
        return free_bytes(folder)

    def in_memory(self, folder: Path) -> bool:
        """See SegmentPlaces."""
        return is_memory(folder)

    def orphans(self, folders: list[Path]) -> list[tuple[str, str, Mapping[int, bytes]]]:
        """None: a file has a folder."""
        return []

    def adopt(self, folder: Path, places: Mapping[int, bytes]) -> EngramModel:
        """Never asked for."""
        raise DataLoss(f"{folder}: files need no adoption")

    @property
    def read_only(self) -> bool:
        """See SegmentPlaces."""
        return False

    @property
    def device_nodes(self) -> Mapping[str, int]:
        """See SegmentPlaces."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


class DaxPlaces:
    """Regions of a device; the version's folder, on an ordinary file system, says where each lies and holds the readers' lock."""

    def __init__(self, space: DaxSpace) -> None:
        self._space = space

    def writer(
        self,
        folder: Path,
        layer: int,
        rows: int,
        row_bytes: int,
        token_map: TokenMap | None,
        header_bytes: int,
        held: Ranges | None,
    ) -> RegionWriter:
        """See SegmentPlaces."""
        load = hashlib.sha256(folder.name.encode()).digest()[:ID_BYTES]
        writer = RegionWriter(self._space, layer=layer, load=load, rows=rows, row_bytes=row_bytes, token_map=token_map, held=held)
        write_small(folder / place_name(layer), self._place(writer.region, writer.size_bytes))
        return writer

    def seal(self, folder: Path, model: EngramModel) -> None:
        """See SegmentPlaces."""
        load = hashlib.sha256(folder.name.encode()).digest()[:ID_BYTES]
        tables = {layer: model.table(layer).version for layer in model.layers}
        self._space.make_ready(load, model.name, model.version, tables)

    def map(self, folder: Path, layer: int) -> Segment:
        """See SegmentPlaces."""
        offset, size = self._read(folder / place_name(layer))
        region = self._region(offset)
        if region is None or region.state is RegionState.WRITING or region.layer != layer:
            raise DataLoss(f"{self._space.facts.path}: no whole segment of layer {layer} at byte {offset}")
        return Segment(self._space.facts.path, offset, size)

    def restore_chunk(self, segment: TableSegment, chunk: int, data: NDArray[np.uint8]) -> None:
        """See SegmentPlaces."""
        region = self._region(segment.offset)
        if region is None or region.state is not RegionState.READY:
            raise DataLoss(f"{segment.path}: no whole segment at byte {segment.offset} any more")
        begin = segment.rows_offset_bytes + chunk * CHUNK_BYTES
        self._space.rows_of(region)[begin : begin + data.size] = data
        self._space.flush(region, begin, begin + data.size)
        if not np.array_equal(segment.chunk(chunk), data):
            raise DataLoss(f"{segment.path}: chunk {chunk} was written again and still reads otherwise; suspect the memory")

    def free(self, folder: Path) -> None:
        """See SegmentPlaces. Regions that other hosts may read stay where they are, retired."""
        if offsets := self._offsets(folder):
            self._space.give_back(offsets)

    def free_bytes(self, folder: Path) -> int:
        """See SegmentPlaces."""
        return self._space.directory.free_bytes if self._space.writable else 0

    def in_memory(self, folder: Path) -> bool:
        """See SegmentPlaces."""
        return True

    def orphans(self, folders: list[Path]) -> list[tuple[str, str, Mapping[int, bytes]]]:
        """See SegmentPlaces: after a reboot, or on another host, the device knows more than the folder does."""
        known = {offset for folder in folders for offset in self._offsets(folder)}
        found: dict[tuple[str, str], dict[int, bytes]] = {}
        for region in self._space.directory.regions:
            if region.state is RegionState.READY and region.offset not in known:
                place = self._place(region, region.size_bytes)
                found.setdefault((region.model, region.version.hex()), {})[region.layer] = place
        return [(model, version, places) for (model, version), places in found.items()]

    def adopt(self, folder: Path, places: Mapping[int, bytes]) -> EngramModel:
        """See SegmentPlaces."""
        for layer, place in places.items():
            write_small(folder / place_name(layer), place)
        with self.map(folder, next(iter(places))) as segment:
            model = EngramModel.from_json(segment.metadata.get("model", "").encode())
        if set(places) != set(model.layers):
            raise DataLoss(f"{self._space.facts.path}: layers {sorted(places)} of {model.name} {model.version} are there, not all")
        return model

    @property
    def read_only(self) -> bool:
        """See SegmentPlaces."""
        return not self._space.writable

    @property
    def device_nodes(self) -> Mapping[str, int]:
        """See SegmentPlaces."""
        return {"numa": self._space.facts.numa_node, "target": self._space.facts.target_node}

    def close(self) -> None:
        """See SegmentPlaces."""
        self._space.close()

    def _place(self, region: Region, size_bytes: int) -> bytes:
        return json.dumps({"device": str(self._space.facts.path), "offset": region.offset, "bytes": size_bytes}).encode()

    def _offsets(self, folder: Path) -> set[int]:
        """Where the segments of a folder lie on this device."""
        offsets = set()
        for path in folder.glob(place_name("*")):
            try:
                offsets.add(self._read(path)[0])
            except DataLoss as error:
                log.error("a place on the device is not known", extra={"path": str(path), "reason": str(error)})
        return offsets

    def _read(self, path: Path) -> tuple[int, int]:
        """(offset, bytes). Raises DataLoss for a place on another device, or one that is damaged."""
        try:
            place = json.loads(read_small(path, PLACE_BYTES_MAX))
            offset, size, device = int(place["offset"]), int(place["bytes"]), place["device"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataLoss(f"{path} is damaged: {error!r}") from error
        if device != str(self._space.facts.path):
            raise DataLoss(f"{path} lies on {device}, the pool was started with {self._space.facts.path}")
        return offset, size

    def _region(self, offset: int) -> Region | None:
        return next((region for region in self._space.directory.regions if region.offset == offset), None)


def segment_name(layer: int) -> str:
    """File name of a layer's table."""
    return f"layer-{layer}.safetensors"


def place_name(layer: int | str) -> str:
    """File name of what says where a layer's table lies on a device."""
    return f"layer-{layer}.dax"


def host_id(name: str, machine_id: Path = Path("/etc/machine-id")) -> bytes:
    """Who we are in a device's directory, 16 bytes: by a name that was given, the machine id, or the host's name."""
    if not name:
        try:
            name = machine_id.read_text().strip()
        except OSError:
            name = ""
    return hashlib.sha256((name or os.uname().nodename).encode()).digest()[:ID_BYTES]
