"""What lies beside the segments of a grown memory: its fusion weights and its card.

Each segment's header names them by sha256, so that one which is lost, torn or exchanged is found when the version is mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from treadle.chassis.small_files import FILE_MODE, no_room_is_refused, open_plain, read_small
from treadle.contract import DataLoss, EngramModel
from treadle.contract.engram_model import CARD_BYTES_MAX

FUSION_NAME, CARD_NAME = "fusion.safetensors", "card.json"
KEPT_KEY = "files"  # in a segment's metadata: canonical JSON, name -> sha256
PIECE_BYTES = 1 << 20
HASHED_AT_ONCE_BYTES = 64 << 20  # some 50 ms


class KeptWeights:
    """Fusion weights as a file of `file_bytes`, opened for each read: a version may be moved aside meanwhile."""

    def __init__(self, path: Path, digest: str) -> None:
        """Raises DataLoss if there is no such plain file, OSError if the system fails."""
        self._path, self._digest = path, digest
        descriptor = open_plain(self._path)
        try:
            self.file_bytes = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def read(self, first: int, count: int) -> bytes:
        """`count` bytes from `first` on. Raises DataLoss if the file is gone or has shrunk."""
        descriptor = open_plain(self._path)
        try:
            data = os.pread(descriptor, count, first)
        except OSError as error:
            raise DataLoss(f"{self._path} cannot be read at byte {first}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        if len(data) != count:
            raise DataLoss(f"{self._path} ends at byte {first + len(data)}, {self.file_bytes} expected")
        return data

    def verify(self) -> None:
        """Read it all and compare its sha256. Raises DataLoss."""
        digest = hashlib.sha256()
        for first in range(0, self.file_bytes, PIECE_BYTES):
            digest.update(self.read(first, min(PIECE_BYTES, self.file_bytes - first)))
        if digest.hexdigest() != self._digest:
            raise DataLoss(f"{self._path} hashes to {digest.hexdigest()}, {self._digest} was written")


def write_kept(path: Path, pieces: Iterable[bytes]) -> str:
    """Write a new file and make it last; its sha256. Raises ResourceExhausted if there is no room."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with no_room_is_refused(path), os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fchmod(descriptor, FILE_MODE)  # whatever the umask
        os.fsync(descriptor)
    return digest.hexdigest()


def read_kept(folder: Path, model: EngramModel, headers: Sequence[Mapping[str, str]]) -> tuple[KeptWeights | None, bytes]:
    """Weights and card of the version in `folder`, as its segments' metadata name them; None and empty without.

    Digests are compared, but for weights above HASHED_AT_ONCE_BYTES: a start must not wait for them (`KeptWeights.verify`).

    Raises DataLoss if one is missing or another than was written, OSError if the system fails.
    """
    if len({header.get(KEPT_KEY) for header in headers}) != 1:
        raise DataLoss(f"{folder}: its segments name different files beside them")
    named = _named(folder, headers[0].get(KEPT_KEY, "{}"))
    weights, card_json = None, b""
    if (digest := named.get(FUSION_NAME)) is not None:
        if model.fusion is None or model.fusion.weights != digest:
            raise DataLoss(f"{folder / FUSION_NAME} belongs to another version")
        weights = KeptWeights(folder / FUSION_NAME, digest)
        if weights.file_bytes <= HASHED_AT_ONCE_BYTES:
            weights.verify()
    if (digest := named.get(CARD_NAME)) is not None:
        card_json = read_small(folder / CARD_NAME, CARD_BYTES_MAX)
        if hashlib.sha256(card_json).hexdigest() != digest:
            raise DataLoss(f"{folder / CARD_NAME} is not what was written")
    return weights, card_json


def _named(folder: Path, text: str) -> dict[str, str]:
    try:
        named = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"{folder}: a segment's list of files is damaged") from error
    if not isinstance(named, dict):
        raise DataLoss(f"{folder}: a segment's list of files is damaged")
    return named
