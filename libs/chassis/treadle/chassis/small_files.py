"""Small files that are replaced at once and read back with a limit; folders made to last; a folder that is ours alone."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treadle.contract.errors import DataLoss, InvalidArgument, ResourceExhausted
from treadle.contract.lasting_files import sync_folder

FILE_MODE, FOLDER_MODE = 0o640, 0o750
PARTIAL = ".partial"  # what a killed process leaves of a file that it was replacing


def write_small(path: Path, data: bytes) -> None:
    """Write or replace a file at once: others see the old or the new content, also after a crash.

    Raises ResourceExhausted if there is no room; what was there stays.
    """
    partial = path.with_name(f".{path.name.lstrip('.')}{PARTIAL}")
    with no_room_is_refused(path):
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(descriptor, FILE_MODE)  # whatever the umask
                os.fsync(descriptor)
            partial.replace(path)
        except OSError:
            with suppress(OSError):  # a folder that can no longer be written to: it is swept at the next start
                partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def read_small(path: Path, bytes_max: int) -> bytes:
    """Read a file, not through a link. Raises DataLoss if it is missing, a link or larger than `bytes_max`, OSError as it comes."""
    with os.fdopen(open_plain(path), "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise DataLoss(f"{path} is larger than {bytes_max} bytes")
    return data


def open_plain(path: Path) -> int:
    """A descriptor to read a file by, not through a link. Raises DataLoss if it is missing or a link, OSError as it comes."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):  # too many open files, say: no word about this one
            raise
        raise DataLoss(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def no_room_is_refused(path: Path) -> Iterator[None]:
    """A full file system is ResourceExhausted."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceExhausted(f"{path.name}: no room for it on its file system: {error.strerror}") from error


def make_ours(folder: Path, setting: str) -> None:
    """Make the folder, or check that nobody else can have prepared it: /dev/shm is open to all. Raises InvalidArgument, naming `setting`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(FOLDER_MODE)
    status, owner = folder.lstat(), folder.parent.lstat().st_uid
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidArgument(
            f"{setting}: {folder} is {'a link' if stat.S_ISLNK(status.st_mode) else 'no folder'}; give a real folder"
        )
    if status.st_uid != os.geteuid():
        raise InvalidArgument(
            f"{setting}: {folder} belongs to user {status.st_uid}, not to {os.geteuid()}; remove it or give another"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgument(f"{setting}: {folder} is writable by others (mode {stat.S_IMODE(status.st_mode):o}); chmod 750 it")
    if owner not in (0, os.geteuid()):  # who could put another folder in our place
        raise InvalidArgument(f"{setting}: {folder.parent} belongs to user {owner}; give a folder below our own")


def is_real_folder(path: Path) -> bool:
    """True for a folder that is no link."""
    return stat.S_ISDIR(path.lstat().st_mode)
