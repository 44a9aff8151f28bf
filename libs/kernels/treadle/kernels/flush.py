"""Makes written bytes visible to whoever reads the memory itself: other hosts of a CXL pool, and this one after a power cut.

Owns the choice between cache-line instructions and msync. Files get both: an instruction does not reach a page cache.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Unavailable

try:
    from treadle.kernels import _native
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]

_NAMES = ("", "clflush", "clflushopt", "clwb")


def flush(data: NDArray[np.uint8]) -> str:
    """Write the cache lines of `data`, uint8 [n], contiguous, back to memory and fence; the instruction used.

    Raises Unavailable where there is none: without the native extension, and on processors other than x86-64.
    """
    name = _NAMES[_native.flush(data)] if _native is not None else ""
    if not name:
        raise Unavailable("no instruction to write cache lines back: it takes the native extension and an x86-64 processor")
    return name


def flush_mapping(mapping: mmap.mmap, begin: int, end: int, *, device: bool) -> None:
    """Flush the bytes [begin, end) of a shared, writable mapping. device: a character device, which knows no msync.

    Raises Unavailable for a device where there is no instruction.
    """
    if begin >= end:
        return
    try:
        flush(np.frombuffer(mapping, dtype=np.uint8, count=end - begin, offset=begin))
    except Unavailable:
        if device:
            raise
    if not device:
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.flush(first, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE - first)
