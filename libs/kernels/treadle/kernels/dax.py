"""DAX devices: memory that is reached by mapping a character device, or a file that stands for one (fsdax, famfs, a test's file).

Owns what kind of thing a path is, how large it is, and how it is opened. What lies where on it is `dax_directory`'s.

A character device knows open, close and mmap: no truncate, fallocate, read, write, msync or seek. Its size and alignment stand in
sysfs. Only MAP_SHARED works, at offsets and lengths that are multiples of its alignment.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from treadle.contract import InvalidArgument, NotFound
from treadle.kernels.pages import HUGE_PAGE_BYTES

REGION_ALIGN_BYTES = HUGE_PAGE_BYTES  # regions begin and end at such multiples
SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class DaxFacts:
    """What a path is.

    size_bytes:  usable, a multiple of REGION_ALIGN_BYTES
    is_device:   a character device; False: a file
    numa_node, target_node: of a device, as sysfs tells; -1: not told
    """

    path: Path
    size_bytes: int
    is_device: bool
    numa_node: int = -1
    target_node: int = -1


def dax_facts(path: Path, *, sysfs: Path = SYSFS, size_bytes: int = 0) -> DaxFacts:
    """Look at a path without opening it for writing.

    size_bytes: of a device whose size sysfs does not tell; 0: sysfs must
    Raises NotFound, or InvalidArgument for what is neither a DAX device nor a file, is too small, or is aligned to more than 2 MiB.
    """
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise NotFound(
            f"dax_device: {path} is not there; `daxctl list` shows the devices, `ndctl`/`cxl list` the regions"
        ) from error
    if stat.S_ISREG(status.st_mode):
        if size_bytes:
            raise InvalidArgument(f"dax_bytes: {path} is a file of {status.st_size} bytes; leave the setting out")
        return DaxFacts(path, _usable(path, status.st_size), is_device=False)
    if not stat.S_ISCHR(status.st_mode):
        raise InvalidArgument(f"dax_device: {path} is neither a character device nor a file")
    node = sysfs / "dev/char" / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    subsystem = node / "subsystem"
    if not subsystem.exists() or subsystem.resolve().name != "dax":
        raise InvalidArgument(f"dax_device: {path} is a character device, but {subsystem} does not say that it is a DAX one")
    place = sysfs / "bus/dax/devices" / node.resolve().name
    align = _number(place / "align") or REGION_ALIGN_BYTES
    if REGION_ALIGN_BYTES % align:
        raise InvalidArgument(
            f"dax_device: {path} is aligned to {align} bytes, we map at multiples of {REGION_ALIGN_BYTES}: "
            "make it anew with `daxctl create-device --align 2M`"
        )
    size = _number(place / "size") or size_bytes
    if not size:
        raise InvalidArgument(f"dax_bytes: {place / 'size'} does not tell the size of {path}; give it")
    numa_node, target_node = _number(place / "numa_node"), _number(place / "target_node")
    return DaxFacts(
        path, _usable(path, size), True, -1 if numa_node is None else numa_node, -1 if target_node is None else target_node
    )


def map_writable(facts: DaxFacts) -> tuple[int, mmap.mmap]:
    """(descriptor, mapping of all of it) for the one process that writes. Never creates or truncates. Raises OSError."""
    descriptor = os.open(facts.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags, prot = mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        return descriptor, mmap.mmap(descriptor, facts.size_bytes, flags=flags, prot=prot)
    except BaseException:
        os.close(descriptor)
        raise


def map_directory(facts: DaxFacts) -> mmap.mmap:
    """The first REGION_ALIGN_BYTES, read-only. Raises OSError."""
    descriptor = os.open(facts.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, REGION_ALIGN_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _usable(path: Path, size: int) -> int:
    usable = size // REGION_ALIGN_BYTES * REGION_ALIGN_BYTES
    if usable < 2 * REGION_ALIGN_BYTES:
        raise InvalidArgument(f"dax_device: {path} has {size} bytes; the directory alone takes {REGION_ALIGN_BYTES}")
    return usable


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
