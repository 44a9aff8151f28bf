"""What the kernel does with a file's pages: which file system it is on, how to write it, how to advise, what page size it got.

Owns the differences between disk, tmpfs and hugetlbfs. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.kernels.numa import place

HUGE_PAGE_BYTES = 2 << 20  # x86-64 and arm64 with 4 KiB base pages
MEMORY_FILE_SYSTEMS = ("tmpfs", "hugetlbfs")
DEVICE = "device"  # what `file_system` says of a character device: memory that no file system manages
_MADV_POPULATE_READ = 22  # linux/mman.h; Python's mmap has no name for it
_LIBC = ctypes.CDLL(None, use_errno=True)  # Python's own madvise keeps the GIL
_COVERED = 0.9  # of the resident bytes must be mapped by huge pages before we say so: a few small ones at the ends do not matter


def file_system(descriptor: int) -> str:
    """Type of the file system that holds an open file ("tmpfs", "ext4", ...), or "unknown" where the mount table does not tell.

    DEVICE for a character device, whatever its node lies on.
    """
    status = os.fstat(descriptor)
    if stat.S_ISCHR(status.st_mode):
        return DEVICE
    device = status.st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if fields[2] == wanted:
            found = fields[fields.index("-") + 1]
    return found


class FileBytes:
    """Bytes of an allocated file, written in place: by pwrite, or through a mapping on hugetlbfs, which knows no write.

    pwrite is the faster of the two elsewhere (tmpfs: no page faults), and leaves no mapping to account for.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        if file_system(descriptor) == "hugetlbfs":
            page_bytes = os.fstatvfs(descriptor).f_bsize
            if size % page_bytes:
                raise InvalidArgument(f"hugetlbfs with pages of {page_bytes} bytes: mount it with pagesize=2M")
            self._mapping = mmap.mmap(descriptor, size)

    def write(self, at: int, data: NDArray[np.uint8] | bytes) -> None:
        """Write `data` (contiguous) at offset `at`. Raises OSError."""
        view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        if self._mapping is not None:
            self._mapping[at : at + len(view)] = view
            return
        while view:
            written = os.pwrite(self._descriptor, view, at)
            at, view = at + written, view[written:]

    def close(self) -> None:
        """Unmap. The file itself stays open: it is the caller's."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


def place_file(descriptor: int, size: int, policy: str) -> None:
    """Say on which memory nodes a file's pages shall lie (`numa.place`), before any of them is allocated.

    tmpfs keeps the policy of a shared mapping with the file, so the mapping need not last. Raises as `numa.place`.
    """
    with mmap.mmap(descriptor, size) as mapping:
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data  # the array goes at once: it would keep the mapping open
        place(address, size, policy)


def map_for_gather(descriptor: int, size: int, offset: int = 0) -> mmap.mmap:
    """Map `size` bytes of a file or device from `offset` on, read-only and shared, advised for scattered small reads.

    On disk, fault readahead would fetch about a thousand times the bytes asked for: MADV_RANDOM. Memory file systems have
    no readahead; there huge pages matter, and MADV_HUGEPAGE lets tmpfs use them where it is mounted with huge=advise.
    """
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    match file_system(descriptor):
        case "hugetlbfs" | "device":
            pass
        case "tmpfs":
            _advise(mapping, mmap.MADV_HUGEPAGE)
        case _:
            _advise(mapping, mmap.MADV_RANDOM)
    return mapping


def will_need(mapping: mmap.mmap, start: int, length: int) -> None:
    """Start reading a span from disk, whatever was advised for the mapping; `start` lies on a page boundary."""
    mapping.madvise(mmap.MADV_WILLNEED, start, length)


def enter_pages(span: NDArray[np.uint8]) -> bool:
    """Enter the pages that hold `span` (uint8 [n], over a mapping) into this process's page table, so that no gather meets a fault.

    A first touch costs a fault (about a microsecond) for each page otherwise; entering them costs 8 bytes of page table for each.
    Drops the GIL, and takes the kernel's lock for reading: gathers go on. Returns False where the kernel (before 5.14) cannot.
    The span keeps its mapping alive: nothing is unmapped meanwhile. Raises OSError where a page cannot be had.
    """
    first = span.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(span.ctypes.data + span.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE - first
    if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_POPULATE_READ) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):  # an older kernel, or memory that it maps page by page: the first touches pay
        return False
    raise OSError(code, os.strerror(code))


def mapped_page_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Page size in use for the mapping that holds `address`, from this process's smaps; the base page size if it is not listed.

    Huge pages of tmpfs, of a disk file or of private memory count if they cover what is resident. The kernel walks all pages of
    the process for this: for a metric, not for a hot path.
    """
    for first, last, bytes_of in _mappings(smaps):
        if first <= address < last:
            huge = sum(bytes_of.get(kind, 0) for kind in ("ShmemPmdMapped", "FilePmdMapped", "AnonHugePages"))
            if huge and huge >= _COVERED * bytes_of.get("Rss", 0):
                return HUGE_PAGE_BYTES
            return bytes_of.get("KernelPageSize", mmap.PAGESIZE)
    return mmap.PAGESIZE


def _mappings(smaps: Path) -> Iterator[tuple[int, int, dict[str, int]]]:
    """(first address, end address, byte counts by smaps field) of each mapping of this process."""
    first, last, bytes_of = 0, 0, dict[str, int]()
    with smaps.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if name.endswith(":"):
                value = rest.split()
                if len(value) == 2 and value[1] == "kB":
                    bytes_of[name[:-1]] = int(value[0]) << 10
                continue
            yield first, last, bytes_of
            low, _, high = name.partition("-")
            first, last, bytes_of = int(low, 16), int(high, 16), {}
    yield first, last, bytes_of


def _advise(mapping: mmap.mmap, advice: int) -> None:
    try:
        mapping.madvise(advice)
    except OSError:  # a kernel built without this advice: the mapping works all the same, only slower
        return
