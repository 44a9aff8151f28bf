"""A version in messages of at most 1 MiB: on its way to a store, and on its way from one into a folder.

Owns order, checksums and limits of both streams. What a store makes of them is its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client.asm.mapped import file_digest
from treadle.client.asm.records import Progress, ProgressCallback, StoredDictionary
from treadle.contract.dictionary import DICTIONARY_BYTES_MAX, Dictionary
from treadle.contract.dictionary_file import (
    CARD_BYTES_MAX,
    CARD_FILE,
    MANIFEST_FILE,
    PREFIX_KV_FILE,
    TENSORS_FILE,
    check_digests,
    map_tensors,
    read_manifest,
    tensor_offsets,
)
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, TreadleError, Unavailable
from treadle.contract.lasting_files import sync_folder, write_through
from treadle.kernels import crc32c

MESSAGE_BYTES_MAX = 1 << 20
PIECE_BYTES = MESSAGE_BYTES_MAX - 4096  # of a file in one message; the rest is for the names around it
LOOK_SECONDS = 0.5  # between two looks whether a message is late: so much later it may be noticed


class PublishMessages:
    """The messages that publish a folder. Iterate once.

    gRPC iterates in a thread of its own and swallows what is raised there: `failure` keeps it for whoever made the call.
    """

    def __init__(self, folder: Path, promote: bool, progress: ProgressCallback | None) -> None:
        """Reads and digests the files. Raises NotFound, InvalidArgument, DataLoss naming the file."""
        self.dictionary: Dictionary = read_manifest(folder)
        self.failure: BaseException | None = None
        self._folder, self._promote, self._progress, self._done = folder, promote, progress, 0
        tensor_offsets(folder / TENSORS_FILE, self.dictionary)  # a torn file is refused before a byte travels
        names = (TENSORS_FILE, PREFIX_KV_FILE) if self.dictionary.prefix_kv is not None else (TENSORS_FILE,)
        for name in names:
            if not (folder / name).is_file():
                raise NotFound(f"{folder} holds no {name}, which its manifest names")
        self._total = sum((folder / name).stat().st_size for name in names)
        self.card_json = _card_of(folder)
        self._files = [self._described(name) for name in names]

    def __iter__(self) -> Iterator[pb.PublishRequest]:
        try:
            begin = pb.PublishBegin(
                manifest_json=self.dictionary.to_json(), files=self._files, card_json=self.card_json, promote=self._promote
            )
            yield pb.PublishRequest(begin=begin)
            self._done = 0
            for info in self._files:
                yield from self._pieces(info)
            yield pb.PublishRequest(end=pb.PublishEnd())
        except Exception as error:
            self.failure = error
            raise

    def _described(self, name: str) -> pb.FileInfo:
        path = self._folder / name
        self._tell(f"reading {name}")
        # The manifest has the digest of the prefix KV, and the store compares it: that file is read once, to be sent.
        digest = self.dictionary.prefix_kv if name == PREFIX_KV_FILE and self.dictionary.prefix_kv else file_digest(path)
        self._done += path.stat().st_size
        return pb.FileInfo(name=name, bytes=path.stat().st_size, sha256=digest)

    def _pieces(self, info: pb.FileInfo) -> Iterator[pb.PublishRequest]:
        with (self._folder / info.name).open("rb") as file:
            offset = 0
            while data := file.read(min(PIECE_BYTES, info.bytes - offset)):
                yield pb.PublishRequest(piece=pb.FilePiece(name=info.name, offset_bytes=offset, data=data, crc32c=crc32c(data)))
                offset += len(data)
                self._done += len(data)
                self._tell(f"sending {info.name}")
        if offset != info.bytes:
            raise DataLoss(f"{self._folder / info.name} became shorter while it was sent: {offset} of {info.bytes} bytes")

    def _tell(self, step: str) -> None:
        if self._progress is not None:
            self._progress(Progress(self._done, self._total, step))


class Download:
    """Puts a version together in a folder of its own, which takes its place whole or not at all, on the disk too. A context manager.

    folder: must not exist, or be empty; its parent is made
    bytes_max: of its files
    """

    def __init__(self, folder: Path, progress: ProgressCallback | None, bytes_max: int = DICTIONARY_BYTES_MAX) -> None:
        """Raises InvalidArgument for a folder that holds something, ResourceExhausted where none can be made."""
        self._folder, self._progress, self._bytes_max = folder, progress, bytes_max
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidArgument(f"{folder}: a new or empty folder is needed")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        except OSError as error:
            raise ResourceExhausted(f"{folder.parent}: {error.strerror}") from error
        self._stored: StoredDictionary | None = None
        self._card = b""
        self._expected: list[pb.FileInfo] = []
        self._done, self._total = 0, 0
        self._file: BinaryIO | None = None  # of the first of those that are expected, and its digest so far
        self._digest = hashlib.sha256()
        self._offset = 0
        self._files = ExitStack()

    def __enter__(self) -> Download:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, message: pb.GetResponse) -> None:
        """Take one, in order. Raises DataLoss naming the file, ResourceExhausted where it cannot be written."""
        try:
            if message.WhichOneof("event") == "begin":
                self._begin(message.begin)
            else:
                self._add_piece(message.piece)
        except OSError as error:
            raise ResourceExhausted(f"{self._partial}: {error.strerror}") from error

    def whole(self) -> StoredDictionary:
        """Compare everything, and put the folder into its place. Raises DataLoss naming what is missing or differs."""
        if self._stored is None:
            raise DataLoss("the store ended the stream before it said what comes")
        if self._expected:
            raise DataLoss(f"{self._expected[0].name}: the stream ended at byte {self._offset} of {self._expected[0].bytes}")
        dictionary = self._stored.dictionary
        check_digests(map_tensors(self._partial / TENSORS_FILE, dictionary), dictionary)
        try:
            if self._card:
                write_through(self._partial / CARD_FILE, self._card)
            write_through(self._partial / MANIFEST_FILE, dictionary.to_json())
            sync_folder(self._partial)
            self._partial.chmod(0o755)  # a temporary folder is for its owner alone; this one is not temporary any more
            with suppress(FileNotFoundError):
                self._folder.rmdir()
            os.replace(self._partial, self._folder)
        except OSError as error:
            raise ResourceExhausted(f"{self._folder}: {error.strerror}") from error
        return self._stored

    def _begin(self, begin: pb.GetBegin) -> None:
        if self._stored is not None:
            raise DataLoss("the store began twice")
        self._stored = stored = StoredDictionary.of(begin.dictionary)
        self._card = begin.dictionary.card_json
        names = [TENSORS_FILE] + ([PREFIX_KV_FILE] if stored.dictionary.prefix_kv is not None else [])
        if [info.name for info in begin.files] != names:
            raise DataLoss(f"{', '.join(names)} expected, the store sends {', '.join(info.name for info in begin.files)}")
        kept = begin.files[-1]
        if kept.name == PREFIX_KV_FILE and kept.sha256 != stored.dictionary.prefix_kv:
            raise DataLoss(f"{kept.name}: the store's sha256 is not the manifest's")
        self._expected = list(begin.files)
        self._total = sum(info.bytes for info in begin.files)
        free = shutil.disk_usage(self._partial).free
        if self._total > self._bytes_max:
            raise ResourceExhausted(f"{self._total} bytes come, {self._bytes_max} are allowed")
        if self._total > free:
            raise ResourceExhausted(f"{self._total} bytes come, there is room for {free} in {self._folder.parent}")

    def _add_piece(self, piece: pb.FilePiece) -> None:
        if not self._expected or piece.name != self._expected[0].name or piece.offset_bytes != self._offset:
            raise DataLoss(f"{piece.name}: a piece at byte {piece.offset_bytes} came out of order")
        info = self._expected[0]
        if crc32c(piece.data) != piece.crc32c:
            raise DataLoss(f"{piece.name}: the piece at byte {piece.offset_bytes} does not fit its checksum")
        if self._offset + len(piece.data) > info.bytes:
            raise DataLoss(f"{piece.name}: more than its {info.bytes} bytes came")
        if self._file is None:
            self._file, self._digest = self._files.enter_context((self._partial / info.name).open("wb")), hashlib.sha256()
        self._file.write(piece.data)
        self._digest.update(piece.data)
        self._offset += len(piece.data)
        self._done += len(piece.data)
        if self._progress is not None:
            self._progress(Progress(self._done, self._total, f"receiving {info.name}"))
        if self._offset == info.bytes:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if self._digest.hexdigest() != info.sha256:
                raise DataLoss(f"{info.name}: its sha256 is not what the store said")
            self._expected.pop(0)
            self._file, self._offset = None, 0


class AnswersInTime:
    """What a call streams, each message within its own time; one alarm for all of them. A context manager: leaving it ends the call."""

    def __init__(self, call: Any, answers: Iterator[pb.GetResponse]) -> None:
        """answers: of `call`, with the errors of the contract."""
        self._call, self._answers = call, answers
        self._over, self._silent = threading.Event(), threading.Event()
        self._due = math.inf  # when the message that is waited for is late, monotonic; inf: none is waited for
        self._alarm = threading.Thread(target=self._listen, name="treadle-silence-alarm", daemon=True)

    def __enter__(self) -> AnswersInTime:
        self._alarm.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._call.cancel()
        self._alarm.join()

    def next(self, seconds: float) -> pb.GetResponse | None:
        """The next message, None at the end. Raises Unavailable, the call cancelled, where none comes for so long."""
        self._due = time.monotonic() + seconds
        try:
            return next(self._answers, None)
        except TreadleError as error:
            if self._silent.is_set():
                raise Unavailable(f"the store has said nothing for {seconds:g} s; try again") from error
            raise
        finally:
            self._due = math.inf

    def _listen(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            if time.monotonic() > self._due:
                self._silent.set()
                self._call.cancel()
                return


def _card_of(folder: Path) -> bytes:
    path = folder / CARD_FILE
    if not path.is_file():
        return b""
    if path.stat().st_size > CARD_BYTES_MAX:
        raise InvalidArgument(f"{path}: {path.stat().st_size} bytes, the limit is {CARD_BYTES_MAX}")
    return path.read_bytes()
