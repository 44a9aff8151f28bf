"""What kind of file system a folder is on, and how much can still be written there."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_NO_LIMIT = 1 << 63
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("memory.max", "memory.current")


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
    """Bytes that can still be written under `path`; in memory, no more than the host and our cgroup have available."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if file_system_type(path) not in _IN_MEMORY:
        return free
    available = available_memory_bytes()
    return min(free, available) if status.f_blocks else available  # no blocks: a tmpfs without a size


def is_memory(path: Path) -> bool:
    """True if what lies under `path` takes memory."""
    return file_system_type(path) in _IN_MEMORY | {"hugetlbfs"}


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What can still be taken: MemAvailable of the host, or what our cgroup and those above it leave, whichever is least.

    Filling a tmpfs beyond it ends in the OOM killer, not in an error. `root`: where /proc and /sys are.
    """
    return min(_host_available_bytes(root), *_cgroup_left_bytes(root))


def _host_available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _cgroup_left_bytes(root: Path) -> list[int]:
    """Limit minus use of every cgroup that bounds this process: v2 (`0::/path`) and the memory controller of v1."""
    own = root / "proc/self/cgroup"
    mounts = root / "sys/fs/cgroup"
    left = [_NO_LIMIT]
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, place = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit, use = (mounts / "memory", *_V1) if controllers else (mounts, *_V2)
        path = PurePosixPath(place)
        for step in (path, *path.parents):
            folder = mount / str(step).strip("/.")
            left.append(_left_in(folder / limit, folder / use))
    return left


def _left_in(limit: Path, use: Path) -> int:
    try:
        most, used = limit.read_text().strip(), int(use.read_text())
    except (OSError, ValueError):  # a root has no files, and a container does not see what is above it
        return _NO_LIMIT
    return max(0, int(most) - used) if most.isdecimal() else _NO_LIMIT
