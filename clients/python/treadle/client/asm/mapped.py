"""A dictionary where it lies: mapped read-only under its version's shared lock, in milliseconds whatever its size.

Owns the lock and the mapping. Does not know what the numbers mean (`treadle.nn`) or how a store is asked (`store`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import weakref
from pathlib import Path
from types import TracebackType

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client.asm.records import StoredDictionary
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, Tensors, check_digests, map_tensors, read_manifest
from treadle.contract.errors import DataLoss, NotFound


class Leaving(NotFound):
    """The version is being removed, or was, while it was opened: another one may be meant by now."""


class Elsewhere(NotFound):
    """Where the store says that its files lie, this process sees none: another host, another mount namespace, or no right to read them."""


class MappedDictionary:
    """One version, mapped. `close()`, use as a context manager, or forget it: then its lock is free and a store may free the version.

    dictionary, version: the manifest and its digest
    tensors:        by name, read-only views of the file, bf16 as uint16; of this object until `close`, which empties it. A view that
                    a caller has kept stays readable: its memory goes with the last view
    path:           file of the tensors
    prefix_kv_path: file of the exact prefix KV; None: none is kept. There as long as this is open
    """

    def __init__(self, dictionary: Dictionary, version: str, path: Path, prefix_kv_path: Path | None, *,
                 lock: int | None = None) -> None:  # fmt: skip
        """Map the file. lock: descriptor that holds the version, owned from here on, also where mapping fails.

        Raises NotFound, DataLoss.
        """
        self._release = weakref.finalize(self, _close, lock)
        self.dictionary, self.version, self.path, self.prefix_kv_path = dictionary, version, path, prefix_kv_path
        try:
            self.tensors: Tensors = map_tensors(path, dictionary)
        except FileNotFoundError as error:
            self._release()
            raise NotFound(f"no such file: {path}") from error
        except BaseException:
            self._release()
            raise

    @property
    def name(self) -> str:
        """Its name."""
        return self.dictionary.name

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return not self._release.alive

    def verify(self) -> None:
        """Compare every byte with its digest, the prefix KV's too. Raises DataLoss naming the tensor or file."""
        check_digests(self.tensors, self.dictionary)
        if self.prefix_kv_path is not None and file_digest(self.prefix_kv_path) != self.dictionary.prefix_kv:
            raise DataLoss(f"{self.prefix_kv_path.name}: its sha256 is not the manifest's")

    def close(self) -> None:
        """Let go of the version. Twice is once."""
        self.tensors = {}
        self._release()

    def __enter__(self) -> MappedDictionary:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def map_folder(folder: Path, *, verify: bool = False) -> MappedDictionary:
    """Map a dictionary's folder, as `treadle asm build` or `get` leaves it. verify: read and compare all of it.

    Raises NotFound, InvalidArgument naming the manifest's field, DataLoss naming the tensor or file.
    """
    dictionary = read_manifest(folder)
    prefix_kv = folder / PREFIX_KV_FILE if dictionary.prefix_kv is not None else None
    if prefix_kv is not None and not prefix_kv.is_file():
        raise NotFound(f"{folder}: the manifest names a prefix KV, {PREFIX_KV_FILE} is not there")
    return _verified(MappedDictionary(dictionary, dictionary.version, folder / TENSORS_FILE, prefix_kv), verify)


def map_opened(opened: pb.OpenResponse, *, verify: bool = False) -> MappedDictionary:
    """Map what a store of this host has opened, holding its lock.

    Where the tensors lie the file itself says: at this path there may be another store's, laid out in another way.
    Raises Leaving if the version goes away meanwhile, Elsewhere for a store on another host, DataLoss.
    """
    stored = StoredDictionary.of(opened.dictionary)
    what, lock_path = f"{stored.name}@{stored.version}", Path(opened.lock_path)
    lock = _shared_lock(lock_path, what)
    locked = os.fstat(lock)
    prefix_kv = Path(opened.prefix_kv_path) if opened.prefix_kv_path else None
    try:
        mapped = MappedDictionary(stored.dictionary, stored.version, Path(opened.path), prefix_kv, lock=lock)
        mapped = _verified(mapped, verify)
    except NotFound as error:
        if _still_there(lock_path, locked):
            raise
        raise _left(what) from error
    if not _still_there(lock_path, locked):  # a delete waits for no reader: its other files may be gone
        mapped.close()
        raise _left(what)
    return mapped


def file_digest(path: Path) -> str:
    """sha256 of a file. Raises NotFound."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error


def _verified(mapped: MappedDictionary, verify: bool) -> MappedDictionary:
    if verify:
        try:
            mapped.verify()
        except BaseException:
            mapped.close()
            raise
    return mapped


def _shared_lock(path: Path, what: str) -> int:
    """The version's lock, shared: a store frees a version only under the exclusive one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if len(path.parents) > 2 and path.parents[2].is_dir():  # DATA/NAME/VERSION/lock, and DATA is here: the version has left
            raise _left(what) from error
        raise _elsewhere(path, what, error) from error
    except OSError as error:
        raise _elsewhere(path, what, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:
            raise _left(what)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Leaving(f"{what} is being removed") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _still_there(path: Path, locked: os.stat_result) -> bool:
    """Whether the lock that is held is still its version's: the file at `path`."""
    try:
        return os.path.samestat(path.stat(), locked)
    except FileNotFoundError:
        return False


def _left(what: str) -> Leaving:
    return Leaving(f"{what} was removed while it was being opened; of a store on another host, `get` it and `map_folder` that")


def _elsewhere(path: Path, what: str, error: OSError) -> Elsewhere:
    return Elsewhere(
        f"{what}: {path}: {error.strerror}; where the store is on another host, or its folder cannot be read, "
        "open it with a cache, or `get` it into a folder and `map_folder` that"
    )


def _close(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
