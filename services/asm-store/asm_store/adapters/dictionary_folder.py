"""Versions as files: `<data_dir>/<name>/<version>/`, with `manifest.json` written last; pointers and tombstones beside them.

A publish streams into `.publishing-<random>`; one rename makes it visible, so a killed process leaves only what the next start
sweeps. The folder is ours alone: owned by us, writable by nobody else, links are never followed. Does not decide what a name means
or what goes (domain).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asm_store.adapters.pointer_files import PointerFiles
from asm_store.adapters.version_files import StagedVersion, read_pin, read_version
from asm_store.domain.ports import Adopted, Removed
from asm_store.domain.versions import PIN_FILE, Key, Pin, Pointer, Stored
from treadle.chassis.file_locks import count_readers, hold_for_life, locked_alone
from treadle.chassis.small_files import (
    FOLDER_MODE,
    PARTIAL,
    is_real_folder,
    make_ours,
    no_room_is_refused,
    read_small,
    write_small,
)
from treadle.contract.dictionary import Dictionary
from treadle.contract.errors import DataLoss, InvalidArgument, Unavailable
from treadle.contract.lasting_files import sync_folder
from treadle.contract.version import check_name, check_version

log = logging.getLogger("asm_store")
STORE_LOCK, REPLICA_FILE = ".lock", ".replica"  # what is ours begins with a dot, as no name of a dictionary does
PUBLISHING, REMOVING, TORN = ".publishing-", ".removing-", ".torn-"
TORN_KEPT_MAX = 2  # kept aside for a look; the oldest make room
REPLICA_BYTES_MAX = 256


class DictionaryFolder:
    """The folder of one store. Made: it is checked, or made, and held until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidArgument if the folder is not safe to use, Unavailable if another store holds it."""
        self.path = folder.absolute()
        make_ours(self.path, "data_dir")
        lock = hold_for_life(self.path / STORE_LOCK)
        if lock is None:
            raise Unavailable(f"data_dir: another asm-store keeps {self.path}; stop it or give this one its own folder")
        self._lock = lock
        self._pointers = PointerFiles(self.path)

    def replica_name(self) -> str:
        """A name for this replica, made once."""
        path = self.path / REPLICA_FILE
        if not path.exists():
            write_small(path, f"replica-{secrets.token_hex(4)}".encode())
        return read_small(path, REPLICA_BYTES_MAX).decode()

    def stage(self) -> StagedVersion:
        """See Folder."""
        path = self.path / (PUBLISHING + secrets.token_hex(8))
        with no_room_is_refused(path):
            path.mkdir(FOLDER_MODE)
        return StagedVersion(path, self._put_in_place)

    def adopt(self, check: Callable[[Path, Dictionary], None] | None) -> Adopted:
        """See Folder. What cannot be read, which says nothing about its bytes, is left as it is: the next start tries again."""
        self._sweep()
        versions, torn = list[Stored](), 0
        for path in self._version_folders():
            try:
                stored = read_version(path)
                if check is not None:
                    check(path, stored.dictionary)
                versions.append(stored)
            except (DataLoss, InvalidArgument) as error:
                log.error("torn version set aside", extra={"path": str(path), "reason": str(error)})
                torn += 1
                self._move_aside(path)
            except OSError as error:
                log.error("version cannot be read; left as it is and not served", extra={"path": str(path), "reason": str(error)})
        self._pointers.keep_room()
        used = {stored.key: stored.lock_path.stat().st_mtime for stored in versions}
        pins = {stored.key: pin for stored in versions if (pin := read_pin(stored.folder)) is not None}
        return Adopted(versions, used, pins, self._pointers.read(), self._pointers.read_tombstones(), torn)

    def delete(self, stored: Stored, *, unread_only: bool) -> list[Removed] | None:
        """See Folder."""
        try:
            with locked_alone(stored.lock_path) as alone:
                if unread_only and not alone:
                    return None
                return self._remove(stored.folder, freed=alone)
        except FileNotFoundError:
            if not stored.folder.exists():  # somebody else has deleted the files
                return []
            if unread_only:  # its lock alone is missing: who maps it, nobody knows
                return None
            return self._remove(stored.folder, freed=False)

    def set_aside(self, stored: Stored) -> None:
        """See Folder."""
        self._move_aside(stored.folder)

    def readers(self, versions: Sequence[Stored]) -> list[int]:
        """See Folder."""
        return count_readers([stored.lock_path for stored in versions])

    def touch(self, stored: Stored, used_at_seconds: float) -> None:
        """See Folder."""
        os.utime(stored.lock_path, (used_at_seconds, used_at_seconds), follow_symlinks=False)

    def write_pin(self, stored: Stored, pin: Pin) -> None:
        """See Folder."""
        write_small(stored.folder / PIN_FILE, pin.to_json())

    def write_pointer(self, pointer: Pointer) -> None:
        """See Folder."""
        self._pointers.write(pointer)

    def forget_pointer(self, name: str) -> None:
        """See Folder."""
        self._pointers.forget(name)

    def write_tombstones(self, tombstones: Mapping[Key, float]) -> None:
        """See Folder."""
        self._pointers.write_tombstones(tombstones)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def _put_in_place(self, staged: Path, name: str, version: str) -> Stored:
        family = self.path / check_name(name)
        family.mkdir(FOLDER_MODE, exist_ok=True)
        path = family / check_version(version)
        if path.exists():  # not adopted, so not whole
            self._move_aside(path)
            family.mkdir(FOLDER_MODE, exist_ok=True)
        staged.rename(path)
        sync_folder(family)
        sync_folder(self.path)
        return read_version(path)

    def _remove(self, folder: Path, *, freed: bool) -> list[Removed]:
        # Out of sight before it is taken apart: a reader that comes now finds nothing rather than half of it.
        trash = self.path / (REMOVING + secrets.token_hex(8))
        files = [(file.name, file.lstat().st_size) for file in sorted(folder.iterdir())]
        folder.rename(trash)  # gone from here on, whatever fails
        _worked(sync_folder, folder.parent)
        removed = [Removed(folder / name, nbytes, _worked(Path.unlink, trash / name) and freed) for name, nbytes in files]
        for work, path in ((Path.rmdir, trash), (sync_folder, self.path), (_remove_if_empty, folder.parent)):
            _worked(work, path)
        self._pointers.keep_room()
        return removed

    def _move_aside(self, path: Path) -> None:
        target = self.path / f"{TORN}{path.parent.name}-{path.name}-{secrets.token_hex(4)}"
        path.rename(target)
        os.utime(target)  # its age is the time it lies aside
        _remove_if_empty(path.parent)
        aside = sorted(self.path.glob(TORN + "*"), key=lambda old: old.lstat().st_mtime_ns)
        for old in aside[:-TORN_KEPT_MAX]:
            shutil.rmtree(old, ignore_errors=True)

    def _version_folders(self) -> list[Path]:
        found = list[Path]()
        for family in sorted(self.path.iterdir()):
            if _is(check_name, family.name) and is_real_folder(family):
                found += [path for path in sorted(family.iterdir()) if _is(check_version, path.name) and is_real_folder(path)]
        return found

    def _sweep(self) -> None:
        for path in sorted(self.path.iterdir()):
            if path.name.startswith((PUBLISHING, REMOVING)) and is_real_folder(path):
                log.info("leftover swept", extra={"path": str(path)})
                shutil.rmtree(path, ignore_errors=True)  # what stays is swept at the next start
            elif path.name.startswith(".") and path.name.endswith(PARTIAL) and not is_real_folder(path):
                path.unlink(missing_ok=True)


def _remove_if_empty(family: Path) -> None:
    if not any(family.iterdir()):
        family.rmdir()


def _worked(work: Callable[[Path], object], path: Path) -> bool:
    """Whether it could be done to what is being deleted; else it is logged."""
    try:
        work(path)
    except OSError as error:
        log.error("leftover of a deleted version stays until the next start", extra={"path": str(path), "reason": str(error)})
        return False
    return True


def _is(check: Callable[[str], str], text: str) -> bool:
    try:
        return bool(check(text))
    except InvalidArgument:
        return False
