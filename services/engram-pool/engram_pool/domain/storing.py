"""Versions as they are kept: their tables mapped, written piece by piece, and the store that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, Table

Rows = NDArray[np.uint8]
TokenMap = NDArray[np.int32]
Ranges = tuple[tuple[int, int], ...]  # rows [first, last), rising


class Standing(StrEnum):
    """Where a version stands."""

    SERVED = "served"
    REPLACED = "replaced"  # still listed and served by its version; goes when no reader holds it
    REMOVED = "removed"  # off the list; its memory goes when no reader holds it


class TableSegment(Protocol):
    """A table's file, mapped read-only.

    offset: where the segment begins in `path`, bytes; `rows_offset_bytes` from there to the rows
    held: the rows that are here; None: all
    chunk_digests: sha256 of each chunk of the whole table; empty where they are not kept
    stored_bytes: what it takes, holes not counted
    """

    path: Path
    offset: int
    row_count: int
    row_bytes: int
    rows_offset_bytes: int
    file_bytes: int
    stored_bytes: int
    held: Ranges | None
    chunk_digests: tuple[bytes, ...]
    metadata: dict[str, str]

    @property
    def chunks(self) -> list[int]:
        """Chunks that are here, rising."""

    def chunk(self, chunk: int) -> NDArray[np.uint8]:
        """Bytes of one of them, uint8 [n], read-only; the segment owns the memory."""

    def check_chunk(self, chunk: int) -> None:
        """Compare the checksum of one. Raises DataLoss."""

    def fits(self, chunk: int, data: NDArray[np.uint8]) -> bool:
        """True if `data` is what a chunk held when it was written."""

    def will_need(self, chunk: int) -> None:
        """Start reading a chunk from disk."""

    def nodes(self) -> dict[int, int]:
        """How many of some sampled pages lie on each memory node; empty for a file on disk, or where the kernel does not tell."""

    def check_frame(self) -> None:
        """Compare what is around the rows, and the file's size. Raises DataLoss."""

    def spans_to_enter(self) -> list[NDArray[np.uint8]]:
        """Stretches of the mapping whose pages are worth entering; each keeps the mapping alive."""

    @property
    def rows(self) -> Rows:
        """u8 [row_count, row_bytes], read-only; the segment owns the memory."""

    @property
    def token_map(self) -> TokenMap | None:
        """int32 [vocabulary], for families that have one."""

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare every checksum. Raises DataLoss."""

    def page_bytes(self) -> int:
        """Page size in use for the mapping."""

    def close(self) -> None:
        """Unmap."""


class KeptFile(Protocol):
    """A file beside the tables of a version."""

    file_bytes: int

    def read(self, first: int, count: int) -> bytes:
        """`count` bytes from `first` on. Raises DataLoss if they are not there."""

    def verify(self) -> None:
        """Compare its sha256. Raises DataLoss."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """One version in the store, its segments mapped.

    segments:  by layer, owned by the store until `delete` or `release`
    lock_path: readers hold flock(LOCK_SH) on it
    fusion, card_json: weights and card of a grown memory; None and empty for other versions
    origin: where its rows came from, as `origins` writes it; empty where that is not known
    """

    model: EngramModel
    version: str
    segments: Mapping[int, TableSegment]
    lock_path: Path
    loaded_at_seconds: float
    standing: Standing = Standing.SERVED
    fusion: KeptFile | None = None
    card_json: bytes = b""
    origin: bytes = b""

    @property
    def held(self) -> dict[int, Ranges | None]:
        """The rows that are here, by layer; None: all."""
        return {layer: segment.held for layer, segment in self.segments.items()}

    @property
    def segment_bytes(self) -> int:
        """Bytes of all its segments, holes not counted."""
        return sum(segment.stored_bytes for segment in self.segments.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of its segments and of what is kept beside them."""
        return self.segment_bytes + len(self.card_json) + (self.fusion.file_bytes if self.fusion else 0)


@dataclass(frozen=True, slots=True)
class Adopted:
    """What the store held at start.

    versions: good ones, mapped
    corrupt:  set aside, as they are corrupt or torn
    current:  the current version, by model
    left:     (model, version) left as they are and not served: they could not be read now, or by this release
    before:   by model, the versions that were current before, the last one first
    """

    versions: Sequence[StoredVersion]
    corrupt: Sequence[str]
    current: Mapping[str, str]
    left: Sequence[tuple[str, str]] = ()
    before: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SetAside:
    """A corrupt version that was taken out of service and still takes room. `bytes` of its files."""

    name: str
    version: str
    path: Path
    bytes: int


class TableWriter(Protocol):
    """Takes the rows of one table, in order."""

    def append(self, rows: Rows) -> None:
        """Add rows [n, row_bytes], any n; copied."""

    def append_bytes(self, flat: NDArray[np.uint8]) -> None:
        """Add the next bytes of the rows, uint8 [n], any n; copied."""

    def skip(self, digest: bytes) -> None:
        """Pass over the next chunk, which is not kept; `digest`: its sha256."""

    def table(self) -> Table:
        """Rows and version, after the last row."""


class Staging(Protocol):
    """A version in the making: nobody sees it before `commit`."""

    def writer(
        self, layer: int, rows: int, row_bytes: int, token_map: TokenMap | None, header_bytes: int, held: Ranges | None
    ) -> TableWriter:
        """Begin a table, with so much room for what stands before its rows; `held`: the rows to keep, None: all.

        Raises ResourceExhausted if its bytes cannot be had.
        """

    def keep_fusion(self, pieces: Iterable[bytes]) -> str:
        """Write fusion weights beside the tables; their sha256. Raises ResourceExhausted if there is no room."""

    def keep_card(self, card_json: bytes) -> None:
        """Write the card of a grown memory beside the tables."""

    def keep_origin(self, origin: bytes) -> None:
        """Remember where the rows come from."""

    def commit(self, model: EngramModel) -> StoredVersion:
        """Make it visible at once, with all its tables, and map it."""

    def discard(self) -> None:
        """Give back what was written; nothing after a commit."""


class VersionStore(Protocol):
    """Keeps versions where readers on this host can map them."""

    @property
    def folder(self) -> Path:
        """Where they are."""

    @property
    def in_memory(self) -> bool:
        """True where the file system is memory, not a disk."""

    @property
    def read_only(self) -> bool:
        """True where another host writes the segments, and repairs them."""

    def free_bytes(self) -> int:
        """Bytes that can still be written."""

    def left_bytes(self) -> int:
        """Bytes of versions that `adopt` left as they were."""

    def list_set_aside(self) -> list[SetAside]:
        """Corrupt versions that were set aside, the oldest first."""

    def delete_set_aside(self, version: SetAside) -> bool:
        """Delete one; False, and nothing done, while a reader holds its lock."""

    def adopt(self, *, checksums: bool) -> Adopted:
        """Sweep what a killed process left half done and open what is whole; `checksums`: compare every one."""

    def stage(self) -> Staging:
        """Begin a new version."""

    def set_current(self, model: str, version: str | None, before: Sequence[str]) -> None:
        """Remember which version an empty version means, and which did before; None: no version of this model is left."""

    def set_standing(self, stored: StoredVersion, standing: Standing) -> None:
        """Remember the standing."""

    def readers(self, versions: Sequence[StoredVersion]) -> list[int]:
        """How many processes hold each version, this one not counted."""

    def delete(self, stored: StoredVersion, let_go: Callable[[], bool]) -> bool:
        """Delete a version that no reader holds and unmap it; False, and nothing done, if one does.

        let_go: asked once no other process holds it, before anything is unmapped; False: this one still reads it
        """

    def supersede(self, stored: StoredVersion) -> None:
        """Take a version out of sight before it is put in place anew with other rows; it stays mapped until `release`."""

    def sweep_superseded(self) -> None:
        """Delete what was superseded and nobody reads any more."""

    def restore_chunk(self, stored: StoredVersion, layer: int, chunk: int, data: NDArray[np.uint8]) -> None:
        """Write a chunk's own bytes again where they lie. Raises DataLoss if the file is not the one that is mapped, or OSError."""

    def set_aside(self, stored: StoredVersion) -> None:
        """Take a corrupt version out of every reader's way, and unmap it."""

    def release(self, stored: StoredVersion) -> None:
        """Unmap a version and leave its files."""

    def close(self, *, remove_if_empty: bool) -> None:
        """Let go of the folder; remove it if nothing is left in it and that is wanted."""
