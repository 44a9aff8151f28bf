"""flock on lock files: readers of what one stands for share it, whoever deletes that needs it alone.

The kernel drops a lock with its process, so `kill -9` on either side leaves the truth visible.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from treadle.chassis.small_files import FILE_MODE

PROC_LOCKS = Path("/proc/locks")
_ATTEMPTS_MAX = 16  # of taking a lock whose file is replaced meanwhile


@contextmanager
def locked_alone(path: Path) -> Iterator[bool]:
    """Hold LOCK_EX on the file for the duration: True; False at once while anybody else holds it.

    Raises FileNotFoundError if there is no such file, OSError if it is a link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _try(descriptor)
    finally:
        os.close(descriptor)


def hold_for_life(path: Path) -> int | None:
    """Take LOCK_EX on the file, made if needed, until the returned descriptor is closed; None if a live process holds it.

    A file that its last holder unlinked between our open and our lock is not the one others will lock: taken again.
    """
    for _ in range(_ATTEMPTS_MAX):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        if not _try(descriptor):
            os.close(descriptor)
            return None
        if _is_at(descriptor, path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)
    return None


def count_readers(paths: Sequence[Path]) -> list[int]:
    """How many processes, this one not counted, hold LOCK_SH on each file; 0 for a file that is gone.

    From /proc/locks, which shows the processes of this pid namespace and those below it; deleting does not rely on it.
    """
    wanted = {place: index for index, path in enumerate(paths) if (place := _place(path)) is not None}
    holders: list[set[int]] = [set() for _ in paths]
    for line in PROC_LOCKS.read_text().splitlines() if wanted else ():
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "READ":  # a waiter's line has "->" before FLOCK
            continue
        index = wanted.get(_read_place(fields[5]))
        if index is not None and int(fields[4]) != os.getpid():
            holders[index].add(int(fields[4]))
    return [len(pids) for pids in holders]


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    mine = os.fstat(descriptor)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _place(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _read_place(field: str) -> tuple[int, int]:
    """`major:minor:inode`, the first two hexadecimal."""
    major, minor, inode = field.split(":")
    return os.makedev(int(major, 16), int(minor, 16)), int(inode)
