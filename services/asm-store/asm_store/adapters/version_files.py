"""The files of one version: written into a staging folder, read back and compared with each other.

Does not know where versions lie beside each other (dictionary_folder).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from asm_store.domain.ports import Result
from asm_store.domain.versions import LOCK_FILE, PIN_FILE, RECORD_BYTES_MAX, RECORD_FILE, Pin, Record, Stored
from treadle.chassis.small_files import FILE_MODE, no_room_is_refused, read_small, write_small
from treadle.contract.dictionary import MANIFEST_BYTES_MAX, Dictionary
from treadle.contract.dictionary_file import CARD_BYTES_MAX, CARD_FILE, MANIFEST_FILE, TENSORS_FILE, tensor_offsets
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle.contract.lasting_files import sync_folder

PIN_BYTES_MAX = 1024


class StagedVersion:
    """A version being written in `folder`; put_in_place: the one rename that makes it visible."""

    def __init__(self, folder: Path, put_in_place: Callable[[Path, str, str], Stored]) -> None:
        self.folder, self._put_in_place = folder, put_in_place
        self._open: dict[str, int] = {}

    def write(self, work: Callable[[Path], Result]) -> Result:
        """See Staged."""
        with no_room_is_refused(self.folder):
            return work(self.folder)

    def append(self, name: str, data: bytes) -> None:
        """See Staged."""
        rest = memoryview(data)
        with no_room_is_refused(self.folder / name):
            if name not in self._open:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._open[name] = os.open(self.folder / name, flags, FILE_MODE)
            while rest:
                rest = rest[os.write(self._open[name], rest) :]

    def sync(self) -> None:
        """See Staged."""
        for descriptor in self._open.values():
            with no_room_is_refused(self.folder):
                os.fchmod(descriptor, FILE_MODE)  # whatever the umask
                os.fsync(descriptor)
        self._close()

    def describe(self, record: Record, manifest_json: bytes, card_json: bytes) -> None:
        """See Staged."""
        self._close()
        if card_json:
            write_small(self.folder / CARD_FILE, card_json)
        write_small(self.folder / LOCK_FILE, b"")
        write_small(self.folder / RECORD_FILE, record.to_json())
        write_small(self.folder / MANIFEST_FILE, manifest_json)
        sync_folder(self.folder)

    def commit(self, record: Record) -> Stored:
        """See Staged."""
        with no_room_is_refused(self.folder):
            return self._put_in_place(self.folder, record.name, record.version)

    def discard(self) -> None:
        """See Staged."""
        self._close()
        shutil.rmtree(self.folder, ignore_errors=True)  # gone already where it was committed; what stays is swept at the next start

    def _close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def read_version(path: Path) -> Stored:
    """The version in the folder `<name>/<version>`, its sizes and the layout of its tensors compared; no tensor is read.

    Raises DataLoss if something is torn, missing or belongs to another version; OSError if the system fails, or for a manifest of
    another release: then nothing is known about the version.
    """
    manifest_json = read_small(path / MANIFEST_FILE, MANIFEST_BYTES_MAX)
    if hashlib.sha256(manifest_json).hexdigest() != path.name:
        raise DataLoss(f"{path / MANIFEST_FILE} is not the manifest of this version")
    try:
        dictionary = Dictionary.from_json(manifest_json)
    except InvalidArgument as error:  # its digest is right: it was written so
        raise OSError(f"{path / MANIFEST_FILE} is of another release: {error}") from error
    record = Record.from_json(read_small(path / RECORD_FILE, RECORD_BYTES_MAX))
    if record.key != (path.parent.name, path.name) or dictionary.name != record.name:
        raise DataLoss(f"{path} holds {dictionary.name} and the record of {record.name} {record.version}")
    for file in record.files:
        found = path / file.name
        if found.is_symlink() or not found.is_file() or found.stat().st_size != file.nbytes:
            raise DataLoss(f"{found}: {file.nbytes} bytes were published, and are not there")
    try:
        offsets = tensor_offsets(path / TENSORS_FILE, dictionary)
    except NotFound as error:
        raise DataLoss(str(error)) from error
    card = read_small(path / CARD_FILE, CARD_BYTES_MAX) if (path / CARD_FILE).exists() else b""
    if not (path / LOCK_FILE).exists():
        write_small(path / LOCK_FILE, b"")
    return Stored(record, dictionary, manifest_json, card, dictionary.fingerprint, offsets, path)


def read_pin(path: Path) -> Pin | None:
    """The pin of the version in `path`; None: there is none, or it is damaged, which ends it."""
    try:
        return Pin.from_json(read_small(path / PIN_FILE, PIN_BYTES_MAX))
    except (DataLoss, InvalidArgument):
        return None
