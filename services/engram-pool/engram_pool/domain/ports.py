"""What the domain needs from outside: a place for segments, checkpoints to read, somebody who counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, Table
from treadle.contract.owners import Door as Door
from treadle.contract.warm_state import WarmState

Rows = NDArray[np.uint8]
TokenMap = NDArray[np.int32]


class Standing(StrEnum):
    """Where a version stands."""

    SERVED = "served"
    REPLACED = "replaced"  # still listed and served by its version; goes when no reader holds it
    REMOVED = "removed"  # off the list; its memory goes when no reader holds it


Ranges = tuple[tuple[int, int], ...]  # rows [first, last), rising


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


class Warmth(Protocol):
    """How far the pages of a version are entered in this process."""

    bytes_entered: int

    @property
    def state(self) -> WarmState:
        """Cold, warming or warm."""

    def drop(self) -> None:
        """Let go of what is not entered yet: the version is unmapped."""


class Warmer(Protocol):
    """Enters pages in the background."""

    def warm(self, spans: Sequence[NDArray[np.uint8]]) -> Warmth:
        """Begin with these; returns at once."""

    def close(self) -> None:
        """Stop."""


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


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint. `dtype` in safetensors' words, e.g. BF16, F8_E4M3; `row_bytes` of its first dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class Checkpoint(Protocol):
    """Tensors in files, found by name, read in pieces."""

    @property
    def name(self) -> str:
        """What its file or folder is called."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, by name."""

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config.json beside the tensors, if there is one."""

    def read(self, tensor: Tensor, first_row: int, out: Rows) -> None:
        """Fill `out` [n, tensor.row_bytes], C-contiguous, with rows from `first_row` on. Raises DataLoss for a short file."""

    def close(self) -> None:
        """Close its files."""


class OpenCheckpoint(Protocol):
    """Opens a safetensors file or a folder of them. Raises NotFound, InvalidArgument or DataLoss."""

    def __call__(self, path: Path) -> Checkpoint: ...


class GrownFolder(Protocol):
    """What growing a memory has written, opened. Nothing of it has been believed yet."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def manifest_json(self) -> bytes:
        """Its manifest, at most MANIFEST_BYTES_MAX."""

    @property
    def card_json(self) -> bytes:
        """Its card, at most CARD_BYTES_MAX."""

    @property
    def rows(self) -> Checkpoint:
        """Its tables and token map."""

    @property
    def fusion_bytes(self) -> int:
        """Size of its fusion weights, at most FUSION_BYTES_MAX."""

    def fusion_pieces(self) -> Iterator[bytes]:
        """Its fusion weights, piece by piece. Raises DataLoss if the file has shrunk or fails."""

    def close(self) -> None:
        """Close its files."""


class OpenGrown(Protocol):
    """Opens a grown folder. Raises NotFound, InvalidArgument or DataLoss, naming the file."""

    def __call__(self, path: Path) -> GrownFolder: ...


class PeerVersion(Protocol):
    """A version that other pools hold."""

    @property
    def model(self) -> EngramModel:
        """Its manifest, tables included. Raises NotFound or Unavailable if no pool has it."""

    @property
    def card_json(self) -> bytes:
        """The card of a grown memory, or empty."""

    def describe(self, layer: int) -> tuple[list[bytes], bytes]:
        """(sha256 of each chunk of a table, token map as int32 little-endian). Raises Unavailable, or DataLoss for odd sizes."""

    def read(self, layer: int, first_byte: int, byte_count: int) -> Iterator[bytes]:
        """These bytes of a table as one peer after the other has them; not compared with anything.

        Raises Unavailable, naming each peer and its reason, when there is no further one.
        """

    def fusion(self) -> bytes:
        """Its fusion weights. Raises NotFound, Unavailable, DataLoss."""

    def close(self) -> None:
        """Close the connections."""


class OpenPeers(Protocol):
    """A version at other pools, which are asked, in order, when something of it is needed; empty: the first one's current."""

    def __call__(self, endpoints: Sequence[str], model: str, version: str) -> PeerVersion: ...


class Meters(Protocol):
    """Counts what happened."""

    def load_ended(self, outcome: str) -> None:
        """A load ended: ok, refused, cancelled or failed."""

    def rows_loaded(self, byte_count: int) -> None:
        """Bytes of rows were written."""

    def gather_ended(self, outcome: str, rows: int, seconds: float) -> None:
        """A Gather or Lookup ended after handing out `rows`."""

    def corrupt(self, segments: int) -> None:
        """Segments were found corrupt or torn."""

    def left(self, versions: int) -> None:
        """Versions were left unserved at start: they could not be read."""

    def promoted(self) -> None:
        """A version was made current by name."""

    def fusion_read(self, byte_count: int) -> None:
        """Bytes of fusion weights were handed out."""

    def scrubbed(self, outcome: str, chunks: int) -> None:
        """Chunks were checked in the background: ok, bad or repaired."""


class Doors(Protocol):
    """Native ways to the rows of published versions, beside gRPC. Called from any thread."""

    @property
    def open_doors(self) -> Sequence[Door]:
        """Where they are, the fastest first."""

    def publish(self, stored: StoredVersion) -> None:
        """Serve a version from now on, or again. Its segments stay mapped until it was let go."""

    def withdraw(self, stored: StoredVersion) -> None:
        """Take a version out of sight at once; requests that have begun read it to their end."""

    def read(self, stored: StoredVersion) -> bool:
        """True while a request reads a version that was withdrawn."""

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        """Withdraw; True once no request reads it. False, and it is served on, where one still does after `seconds`."""

    def drain(self) -> None:
        """Refuse new requests as UNAVAILABLE from now on."""

    def close(self) -> None:
        """End every request and connection; nothing reads a segment afterwards."""


class NoDoors:
    """The Doors of a pool that has gRPC alone."""

    open_doors: Sequence[Door] = ()

    def publish(self, stored: StoredVersion) -> None:
        """See Doors."""

    def withdraw(self, stored: StoredVersion) -> None:
        """See Doors."""

    def read(self, stored: StoredVersion) -> bool:
        """See Doors."""
        return False

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        """See Doors."""
        return True

    def drain(self) -> None:
        """See Doors."""

    def close(self) -> None:
        """See Doors."""
