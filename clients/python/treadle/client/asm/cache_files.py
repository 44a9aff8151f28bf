"""The folder of a DictionaryCache: what lies in it, and the locks that say who uses it.

`FOLDER/VERSION/`       a version's files, put there whole by one rename
`FOLDER/.VERSION.*`     the same on their way in or out: of nobody where nobody holds the lock
`FOLDER/VERSION.lock`   shared by who maps the version, held alone by who brings or removes it: the kernel drops a lock with its process. Says
                        how many bytes the version may take and which store it is of; its time is that of the last use
`FOLDER/.lock`          held for moments, by who makes room
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from treadle.contract.deadline import Deadline
from treadle.contract.errors import InvalidArgument, Unavailable

TRY_SECONDS = 0.05  # between two tries of a lock that another process holds
FOLDER_MODE, FILE_MODE = 0o700, 0o600
NOTE_BYTES_MAX = 4096
_OF_VERSION = re.compile(r"\.?([0-9a-f]{64})(?:\..*)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """What there is of a version. whole: it can be mapped; nbytes: what it takes, or may take once it is whole.

    store: which it came from, "": not known; used_at: seconds since the epoch
    """

    version: str
    whole: bool
    nbytes: int
    store: str
    used_at: float


class CacheFiles:
    """Any thread. Raises OSError as it comes, where nothing else is said. closed: once set, nobody waits here any more."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.closed = folder.absolute(), threading.Event()

    def prepare(self) -> None:
        """Make the folder, ours alone. Raises InvalidArgument for one that is not, or that cannot be made."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.folder.mkdir(FOLDER_MODE)
            found = self.folder.lstat()
        except OSError as error:
            raise InvalidArgument(f"asm_cache: {self.folder}: {error.strerror}; give another folder") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidArgument(
                f"asm_cache: {self.folder} is no real folder, is not ours, or others may write into it; chmod 700 it, or give another"
            )

    def path(self, version: str) -> Path:
        """Where its files lie once it is whole."""
        return self.folder / version

    def entries(self) -> list[Entry]:
        """All that is here, in no order. Nothing where the folder is not there, or cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self.folder)]
        except OSError:
            return []
        folders: dict[str, list[Path]] = {}
        for name in names:
            if (match := _OF_VERSION.fullmatch(name)) is not None:
                folders.setdefault(match[1], []).append(self.folder / name)
        return [self._entry(version, of_it) for version, of_it in folders.items()]

    def locked(self, version: str, how: int, deadline: Deadline) -> int:
        """Hold its lock, shared or alone: a descriptor, which the caller closes. Raises Unavailable at the deadline, or once `closed`."""
        return self._locked(self._lock_path(version), how, deadline)

    def locked_room(self, deadline: Deadline) -> int:
        """The same for who makes room."""
        return self._locked(self.folder / ".lock", fcntl.LOCK_EX, deadline)

    def note(self, lock: int, nbytes: int, store: str) -> None:
        """Say in a lock that is held alone what its version may take, and which store it is of."""
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps({"bytes": nbytes, "store": store}).encode()[:NOTE_BYTES_MAX], 0)

    def sweep(self, version: str) -> None:
        """Remove what a killed process left of it. Its lock is held alone."""
        for path in self.folder.glob(f".{version}.*"):
            shutil.rmtree(path, ignore_errors=True)

    def forget(self, version: str) -> None:
        """Remove its lock, which is held alone, where there are no files."""
        self._lock_path(version).unlink(missing_ok=True)

    def remove(self, version: str) -> bool:
        """Remove what is here of it, unless somebody uses it: False."""
        lock = _try_lock(self._lock_path(version), fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            self.sweep(version)
            with suppress(FileNotFoundError):
                self.path(version).rename(self.folder / f".{version}.going")  # nobody sees it in part
            self.sweep(version)
            self.forget(version)
            return True
        finally:
            os.close(lock)

    def _entry(self, version: str, paths: Iterable[Path]) -> Entry:
        told, store, used_at = 0, "", 0.0
        with suppress(OSError, ValueError, TypeError, KeyError):
            with self._lock_path(version).open("rb") as file:
                used_at = os.fstat(file.fileno()).st_mtime
                note = json.loads(file.read(NOTE_BYTES_MAX) or b"{}")
            told, store = int(note["bytes"]), str(note["store"])
        return Entry(version, self.path(version).is_dir(), max(told, sum(map(_bytes_in, paths))), store, used_at)

    def _locked(self, path: Path, how: int, deadline: Deadline) -> int:
        while (descriptor := _try_lock(path, how)) is None:
            if deadline.remaining_seconds() <= 0:
                raise Unavailable(f"{path}: another process holds it for longer than it may; `fuser -v` says which")
            if self.closed.wait(TRY_SECONDS):
                raise Unavailable(f"{self.folder} is not used any more: its cache was closed")
        return descriptor

    def _lock_path(self, version: str) -> Path:
        return self.folder / f"{version}.lock"


def _try_lock(path: Path, how: int) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # held by somebody, or removed by who held it before
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _bytes_in(folder: Path) -> int:
    nbytes = 0
    with suppress(OSError):  # a lock, or it goes while it is looked at
        for entry in os.scandir(folder):
            nbytes += entry.stat(follow_symlinks=False).st_size
    return nbytes
