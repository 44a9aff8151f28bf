"""The folder in shared memory where the pool of one fabric keeps its segments: named, claimed, swept.

A supervisor holds `<folder>.lock` as long as its fabric lives (the pool may die and come back in between); a pool holds
`pool.lock` inside. A folder of which both are free was left by a crash. Does not look into segments.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.contract.errors import ResourceExhausted, Unavailable

SHARED_MEMORY = Path("/dev/shm")
POOL_LOCK = "pool.lock"


def segment_dir(home: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """The segment folder of the fabric whose home is `home`: always the same for one home, so that a crash is found again."""
    digest = hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]
    return shared_memory / f"treadle-{os.getuid()}" / f"up-{digest}"


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """Hold `folder` for one fabric, swept at both ends; gives the bytes that a crashed run had left.

    Unavailable if another fabric or a pool holds it; ResourceExhausted if the place belongs to somebody else.
    """
    folder.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    _check_ours(folder.parent)
    lock = folder.with_name(f"{folder.name}.lock")
    fd = _lock(lock)
    if fd is None:
        raise Unavailable(f"another fabric holds {folder}; `treadle down` with its TREADLE_HOME stops it")
    try:
        freed = _remove(folder)
        try:
            yield freed
        finally:
            _remove(folder)
    finally:
        lock.unlink(missing_ok=True)  # still locked: whoever waits for this file finds that it has moved
        os.close(fd)
        _remove_if_empty(folder.parent)


def sweep_abandoned(home: Path, shared_memory: Path = SHARED_MEMORY) -> int:
    """Remove the segment folders that crashed runs of this user left, whatever their home was; bytes freed."""
    own, freed = segment_dir(home, shared_memory), 0
    if own.parent.is_dir():
        _check_ours(own.parent)
    for folder in sorted({path.with_suffix("") for path in own.parent.glob("up-*")}):
        try:
            with claimed(folder) as bytes_left:
                freed += bytes_left
        except Unavailable:  # somebody lives there
            continue
    return freed


def _remove(folder: Path) -> int:
    """Remove a folder that no live pool holds; bytes freed."""
    if not folder.exists():
        return 0
    _check_ours(folder)
    fd = _lock(folder / POOL_LOCK)
    if fd is None:
        raise Unavailable(f"a running engram-pool holds {folder}; stop it first (`fuser {folder / POOL_LOCK}` names it)")
    try:
        freed = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
        shutil.rmtree(folder)
    finally:
        os.close(fd)
    return freed


def _lock(path: Path) -> int | None:
    """A locked descriptor of `path`, or None if somebody else holds it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        os.close(fd)  # it was removed between open and flock: try the one that is there now


def _check_ours(folder: Path) -> None:
    """A folder in /dev/shm can be made by anybody, under any name, before we make it."""
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise ResourceExhausted(f"{folder} belongs to user {status.st_uid} or is a link; it is not safe to use, remove it")


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # another fabric of this user lives beside ours
        return
