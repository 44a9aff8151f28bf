"""Small files that are replaced at once and read back with a limit; folders made to last."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from engram_pool.adapters.version_locks import FILE_MODE
from treadle.contract import DataLoss, ResourceExhausted


def write_small(path: Path, data: bytes) -> None:
    """Write or replace a file at once: others see the old or the new content, also after a crash.

    Raises ResourceExhausted if there is no room; what was there stays.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, FILE_MODE)  # whatever the umask
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        partial.unlink(missing_ok=True)
        raise ResourceExhausted(f"{path}: no room for {len(data)} bytes: {error.strerror}") from error
    partial.replace(path)
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


def sync_folder(path: Path) -> None:
    """Make renames in a folder last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
