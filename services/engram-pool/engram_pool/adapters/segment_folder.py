"""Versions as files: `<folder>/<model>/<version>/layer-<n>.safetensors`, `lock`, and `model.json` written last.

A load streams into `.loading-<random>`; one rename makes it visible, so a killed process leaves only what the next start
sweeps. The folder is ours alone: owned by us, writable by nobody else, links are never followed. Does not decide which version
is current or when one goes (domain).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_pool.adapters.device_orphans import make_folders
from engram_pool.adapters.host_memory import file_system_type
from engram_pool.adapters.segment_places import FilePlaces, SegmentPlaces
from engram_pool.adapters.version_files import (
    LOCK_NAME,
    RETIRED_NAME,
    StagedVersion,
    map_version,
)
from engram_pool.domain.storing import Adopted, SetAside, Standing, StoredVersion
from treadle.chassis.file_locks import count_readers, hold_for_life, locked_alone
from treadle.chassis.small_files import FOLDER_MODE, is_real_folder, make_ours, write_small
from treadle.contract import DataLoss, EngramModel, InvalidArgument, TreadleError, Unavailable
from treadle.contract.lasting_files import sync_folder
from treadle.contract.version import check_name, check_version

log = logging.getLogger("engram_pool.store")
POOL_LOCK_NAME, CURRENT_NAME = "pool.lock", "current.json"
LOADING, REMOVING, CORRUPT = ".loading-", ".removing-", ".corrupt-"
CORRUPT_KEPT_MAX = 2  # corrupt versions kept aside for a look; the oldest make room
CURRENT_BYTES_MAX = 4096


class SegmentFolder:
    """The store of one pool. Made: the folder is checked, or made, and held until `close`."""

    def __init__(self, folder: Path, places: SegmentPlaces | None = None) -> None:
        """places: where segments lie; None: in files below `folder`. Raises InvalidArgument if the folder is not safe to use, Unavailable if another pool holds it."""
        self.folder = folder.absolute()
        make_segment_dir(self.folder)
        lock = hold_for_life(self.folder / POOL_LOCK_NAME)
        if lock is None:
            raise Unavailable(f"segment_dir: another engram-pool keeps {self.folder}; stop it or give this one its own folder")
        self._pool_lock = lock
        self._left: set[Path] = set()  # versions that `adopt` left as they were
        self._superseded: list[Path] = []
        self._places: SegmentPlaces = places or FilePlaces()
        self.in_memory = self._places.in_memory(self.folder)

    @property
    def device_nodes(self) -> Mapping[str, int]:
        """Memory nodes of the device that segments lie on, by kind; none for files."""
        return self._places.device_nodes

    def left_bytes(self) -> int:
        """Bytes of versions that `adopt` left as they were."""
        return sum(_folder_bytes(path) for path in self._left)

    def list_set_aside(self) -> list[SetAside]:
        """Corrupt versions that were set aside, the oldest first."""
        found = []
        for path in self.folder.glob(CORRUPT + "*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                if is_real_folder(path):
                    name, version = _origin(path)
                    found.append((path.lstat().st_mtime_ns, SetAside(name, version, path, _folder_bytes(path))))
        return [version for _, version in sorted(found, key=lambda item: item[0])]

    def delete_set_aside(self, version: SetAside) -> bool:
        """Delete one; False, and nothing done, while a reader holds its lock."""
        return self._remove_unless_read(version.path)

    def free_bytes(self) -> int:
        """Bytes that can still be written here."""
        return self._places.free_bytes(self.folder)

    def stage(self) -> StagedVersion:
        """Begin a new version."""
        path = self.folder / (LOADING + secrets.token_hex(8))
        path.mkdir(FOLDER_MODE)
        return StagedVersion(path, self._places, self._put_in_place)

    def adopt(self, *, checksums: bool) -> Adopted:
        """Sweep leftovers, map what is whole, set aside what is damaged; `checksums`: compare every one.

        A version that cannot be read, which says nothing about its bytes, is left as it is: the next start tries again.
        """
        self._sweep()
        make_folders(self.folder, self._places, LOADING)
        versions, corrupt, current, before = [], [], {}, {}
        for path in self._version_folders():
            try:
                versions.append(self._adopt_one(path, checksums=checksums))
            except DataLoss as error:
                log.error("corrupt version set aside", extra={"path": str(path), "reason": str(error)})
                corrupt.append(f"{path.parent.name} {path.name}")
                self._move_aside_or_leave(path)
            except (TreadleError, OSError) as error:
                log.error("version cannot be read; left as it is and not served", extra={"path": str(path), "reason": str(error)})
                self._left.add(path)
        for model in {stored.model.name for stored in versions}:
            if (known := self._read_current(model)) is not None:
                current[model], before[model] = known
        left = tuple(sorted((path.parent.name, path.name) for path in self._left))
        return Adopted(versions, corrupt, current, left, before)

    def set_current(self, model: str, version: str | None, before: Sequence[str]) -> None:
        """Remember the current version of a model and those before it, in one file that is replaced at once."""
        path = self.folder / model / CURRENT_NAME
        if version is None:
            path.unlink(missing_ok=True)
        else:
            write_small(path, json.dumps({"version": version, "before": list(before)}).encode())

    def set_standing(self, stored: StoredVersion, standing: Standing) -> None:
        """Remember the standing: a version that was replaced or removed stays so after a restart."""
        path = stored.lock_path.parent / RETIRED_NAME
        if standing is Standing.SERVED:
            path.unlink(missing_ok=True)
        else:
            write_small(path, standing.value.encode())

    def readers(self, versions: Sequence[StoredVersion]) -> list[int]:
        """Processes that hold each version, this one not counted."""
        return count_readers([stored.lock_path for stored in versions])

    def delete(self, stored: StoredVersion, let_go: Callable[[], bool]) -> bool:
        """Unmap and delete a version; False, and nothing done, while a reader holds its lock or `let_go` says no."""
        try:
            with locked_alone(stored.lock_path) as alone:
                if not alone or not let_go():
                    return False
                # Out of sight before it is taken apart: a reader that comes now finds nothing rather than half of it.
                trash = self._moved(stored.lock_path.parent, REMOVING)
                self.release(stored)
                self._places.free(trash)
                shutil.rmtree(trash, ignore_errors=True)  # what is left is swept at the next start
        except FileNotFoundError:  # somebody deleted the files; the mapping is all that is left
            if not let_go():
                return False
            self.release(stored)
        self._tidy(stored.model.name)
        return True

    def supersede(self, stored: StoredVersion) -> None:
        """Take a version out of sight before it is put in place anew; its readers keep it until they let go."""
        self._superseded.append(self._moved(stored.lock_path.parent, REMOVING))

    def sweep_superseded(self) -> None:
        """Delete what was superseded and nobody reads any more."""
        self._superseded = [path for path in self._superseded if not self._remove_unless_read(path)]

    @property
    def read_only(self) -> bool:
        """See VersionStore."""
        return self._places.read_only

    def restore_chunk(self, stored: StoredVersion, layer: int, chunk: int, data: NDArray[np.uint8]) -> None:
        """Write a chunk's own bytes again where they lie; every process that maps them sees them.

        Raises DataLoss if the file is another one than is mapped, or shorter.
        """
        self._places.restore_chunk(stored.segments[layer], chunk, data)

    def set_aside(self, stored: StoredVersion) -> None:
        """Take a corrupt version out of sight; it stays mapped until `release`."""
        self._move_aside(stored.lock_path.parent)
        self._tidy(stored.model.name)

    def release(self, stored: StoredVersion) -> None:
        """Unmap a version."""
        for segment in stored.segments.values():
            segment.close()

    def close(self, *, remove_if_empty: bool) -> None:
        """Let go of the folder; remove it if that is wanted and nothing but our lock is left."""
        if remove_if_empty:
            for path in self.folder.glob(CORRUPT + "*"):
                self._remove_unless_read(path)
            if {path.name for path in self.folder.iterdir()} == {POOL_LOCK_NAME}:
                (self.folder / POOL_LOCK_NAME).unlink()
                with suppress(OSError):  # another pool has just begun here
                    self.folder.rmdir()
        self._places.close()
        os.close(self._pool_lock)

    def _put_in_place(self, staged: Path, model: EngramModel) -> StoredVersion:
        """The one rename that makes a version visible."""
        family = self.folder / check_name(model.name)
        if not family.exists():
            family.mkdir(FOLDER_MODE)
        path = family / model.version
        if path.exists():  # not adopted, so not whole
            self._move_aside(path)
            self._left.discard(path)
        staged.rename(path)
        sync_folder(family)
        return map_version(path, self._places)

    def _adopt_one(self, path: Path, *, checksums: bool) -> StoredVersion:
        stored = map_version(path, self._places)
        log.info("version found", extra={"path": str(path), "bytes": stored.segment_bytes, "checksums": checksums})
        try:
            if checksums and stored.standing is not Standing.REMOVED:
                for segment in stored.segments.values():
                    segment.verify()
                if stored.fusion is not None:
                    stored.fusion.verify()
        except BaseException:
            self.release(stored)
            raise
        return stored

    def _version_folders(self) -> list[Path]:
        found = []
        for family in sorted(self.folder.iterdir()):
            if not _is_name(family.name) or not is_real_folder(family) or (family / POOL_LOCK_NAME).exists():
                continue  # our own files, links, and the folder of another pool below ours
            try:
                found += [path for path in sorted(family.iterdir()) if _is_version(path.name) and is_real_folder(path)]
            except OSError as error:
                log.error("models cannot be read; left as they are", extra={"path": str(family), "reason": str(error)})
        return found

    def _sweep(self) -> None:
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith((LOADING, REMOVING)) and is_real_folder(path):
                log.info("leftover swept", extra={"path": str(path)})
                try:
                    self._remove_unless_read(path)
                except OSError as error:
                    log.error("leftover stays", extra={"path": str(path), "reason": str(error)})

    def _remove_unless_read(self, path: Path) -> bool:
        try:
            with locked_alone(path / LOCK_NAME) as alone:
                if alone:
                    self._places.free(path)
                    shutil.rmtree(path, ignore_errors=True)
                return alone
        except FileNotFoundError:  # never published, so never read
            self._places.free(path)
            shutil.rmtree(path, ignore_errors=True)
            return True

    def _move_aside_or_leave(self, path: Path) -> None:
        try:
            self._move_aside(path)
        except OSError as error:
            log.error("corrupt version cannot be moved; it is not served", extra={"path": str(path), "reason": str(error)})
            self._left.add(path)

    def _move_aside(self, path: Path) -> None:
        os.utime(self._moved(path, f"{CORRUPT}{path.parent.name}-{path.name}-"))  # its age is the time it lies aside
        kept = sorted(self.folder.glob(CORRUPT + "*"), key=lambda old: old.lstat().st_mtime_ns)
        for old in kept[:-CORRUPT_KEPT_MAX]:
            self._remove_unless_read(old)

    def _moved(self, path: Path, prefix: str) -> Path:
        target = self.folder / (prefix + secrets.token_hex(8))
        path.rename(target)
        return target

    def _read_current(self, model: str) -> tuple[str, list[str]] | None:
        """The current version and those before it."""
        try:
            with (self.folder / model / CURRENT_NAME).open("rb") as file:
                current = json.loads(file.read(CURRENT_BYTES_MAX))
            before = current.get("before")
            return check_version(current["version"]), [text for text in before if _is_version(text)] if isinstance(
                before, list
            ) else []
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, TreadleError) as error:
            log.warning(
                "current.json is unreadable; the newest version becomes current", extra={"model": model, "reason": str(error)}
            )
            return None

    def _tidy(self, model: str) -> None:
        """Remove the folder of a model that has no version left."""
        family = self.folder / model
        with suppress(FileNotFoundError):
            if {path.name for path in family.iterdir()} <= {CURRENT_NAME}:
                (family / CURRENT_NAME).unlink(missing_ok=True)
                family.rmdir()


def make_segment_dir(folder: Path) -> None:
    """Make the folder, or check that it is ours and can hold what belongs there. Raises InvalidArgument."""
    make_ours(folder, "segment_dir")
    if file_system_type(folder) == "hugetlbfs":
        raise InvalidArgument(
            f"segment_dir: {folder} is on hugetlbfs, which holds no small files; mount tmpfs with huge=always instead"
        )


def _origin(path: Path) -> tuple[str, str]:
    """Model and version that a folder set aside was: `.corrupt-<model>-<version>-<random>`, and a model may have hyphens."""
    name, _, rest = path.name.removeprefix(CORRUPT).rpartition("-")[0].rpartition("-")
    return name, rest


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, as far as they can be seen."""
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                total += path.lstat().st_size
    return total


def _is_name(text: str) -> bool:
    try:
        return bool(check_name(text))
    except InvalidArgument:
        return False


def _is_version(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(check_version(text))
    except InvalidArgument:
        return False
