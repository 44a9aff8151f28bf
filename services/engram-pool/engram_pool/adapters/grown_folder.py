"""A grown folder on this host: manifest, rows, fusion weights and card as plain files, none of them large beyond its limit.

Owns the files it opens. Does not say whether they fit together (domain).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engram_pool.adapters.safetensors_checkpoint import SafetensorsCheckpoint, open_plain, resolved_below
from treadle.contract import DataLoss, InvalidArgument, NotFound
from treadle.contract.engram_model import CARD_BYTES_MAX, FUSION_BYTES_MAX, MANIFEST_BYTES_MAX

MANIFEST, ROWS, FUSION, CARD = "manifest.json", "rows.safetensors", "fusion.safetensors", "card.json"
PIECE_BYTES = 1 << 20


class OpenedGrownFolder:
    """The files of a grown folder. Made: all of them are there, and none is too large."""

    def __init__(self, path: Path) -> None:
        """Raises NotFound, InvalidArgument or DataLoss, naming the file."""
        self.path = path
        with ExitStack() as opened:
            self.manifest_json = _read(path / MANIFEST, MANIFEST_BYTES_MAX)
            self.card_json = _read(path / CARD, CARD_BYTES_MAX)
            self._fusion, self.fusion_bytes = _open(path / FUSION, FUSION_BYTES_MAX)
            opened.callback(os.close, self._fusion)
            with _naming(path / ROWS):
                self.rows = SafetensorsCheckpoint(path.name, [path / ROWS], None)
            opened.callback(self.rows.close)
            self._opened = opened.pop_all()

    def fusion_pieces(self) -> Iterator[bytes]:
        """The fusion weights in order. Raises DataLoss if the file has shrunk or fails."""
        for first in range(0, self.fusion_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, self.fusion_bytes - first)
            try:
                piece = os.pread(self._fusion, count, first)
            except OSError as error:
                raise DataLoss(f"{self.path / FUSION}: cannot be read at byte {first}: {error.strerror}") from error
            if len(piece) != count:
                raise DataLoss(f"{self.path / FUSION}: the file ends at byte {first + len(piece)}, it had {self.fusion_bytes}")
            yield piece

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


def open_grown(path: Path, *, allowed_folder: Path | None = None) -> OpenedGrownFolder:
    """Open the folder `path`. Its files are plain files: a link among them is refused, wherever it leads.

    allowed_folder: refuse a folder outside it, links resolved
    Raises NotFound if it or a file of it is missing, InvalidArgument for a link, a file too large or of another kind, DataLoss for
    a torn one.
    """
    try:
        folder = resolved_below(path, allowed_folder)
        found = folder.is_dir()
    except OSError as error:  # a loop of links, a name too long
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    if not found:
        raise NotFound(f"no folder {path} on the pool's host")
    return OpenedGrownFolder(folder)


def _read(path: Path, bytes_max: int) -> bytes:
    descriptor, size = _open(path, bytes_max)
    with _naming(path), os.fdopen(descriptor, "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) != size:
        raise DataLoss(f"{path} changes while it is read")
    return data


def _open(path: Path, bytes_max: int) -> tuple[int, int]:
    """Descriptor and size."""
    with _naming(path):
        descriptor = open_plain(path)
        size = os.fstat(descriptor).st_size
    if size > bytes_max:
        os.close(descriptor)
        raise InvalidArgument(f"{path}: {size} bytes, the limit is {bytes_max}")
    return descriptor, size


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the system as ours, with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path} is missing: a grown folder holds {MANIFEST}, {ROWS}, {FUSION} and {CARD}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidArgument(f"{path} is a link: a grown folder holds plain files") from error
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
