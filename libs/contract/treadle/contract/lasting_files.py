"""Files and names that last: forced to the disk, so that a power cut leaves what was there or what was written."""

from __future__ import annotations

import os
from pathlib import Path


def write_through(path: Path, data: bytes) -> None:
    """Write a file, and force it to the disk; its name lasts once its folder is synced. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder, and renames there, last. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
