"""What rows are loaded from: checkpoints, folders of grown memories, other pools. Each is opened, read in pieces and closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engram_pool.domain.storing import Rows
from treadle.contract import EngramModel


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
