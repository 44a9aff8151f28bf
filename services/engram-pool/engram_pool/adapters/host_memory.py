"""What kind of file system a folder is on, and how much can still be written there."""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def file_system_type(path: Path) -> str | None:
    """E.g. tmpfs, ext4, hugetlbfs; None where the mount cannot be told from the device (btrfs subvolumes)."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0]
    return None


def free_bytes(path: Path) -> int:
    """Bytes that can still be written under `path`; in memory, no more than the host has available."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if file_system_type(path) not in _IN_MEMORY:
        return free
    available = available_memory_bytes()
    return min(free, available) if status.f_blocks else available  # no blocks: a tmpfs without a size


def available_memory_bytes() -> int:
    """MemAvailable of the host: filling a tmpfs beyond it ends in the OOM killer, not in an error."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
