"""Tables that stay on a disk: a store of rows for queues and doors, read by position, each row once.

Owns checks and the choice of threads; reading is native. The file is never mapped, its pages stay the kernel's to drop.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, ResourceExhausted, Unavailable
from treadle.dataplane.extension import native_module

READERS_MAX = 256
READERS = 8  # cold rows come 8 times as fast as with one, and hardly faster with more: what one NVMe device takes at once


class DiskReaders:
    """Threads that wait for the disk, shared by all tables of a process. Ends with the last table that has it.

    threads: 1 to READERS_MAX, beside those that gather and help
    Raises ResourceExhausted when the system grants no more threads, Unavailable where the native extension was not built.
    """

    def __init__(self, threads: int = READERS) -> None:
        if not 1 <= threads <= READERS_MAX:
            raise InvalidArgument(f"threads: 1 to {READERS_MAX}, got {threads}")
        try:
            self.native: Any = native_module().DiskReaders(threads)
        except OSError as error:
            raise ResourceExhausted(f"threads: the system grants no {threads}: {error}") from error


def disk_rows(
    descriptor: int, offset_bytes: int, row_count: int, row_bytes: int, readers: DiskReaders, held: NDArray[np.int64] | None = None
) -> Any:
    """A native store of the rows that begin at `offset_bytes` of an open file; it keeps a descriptor of its own.

    held: int64 [n, 2], rising ranges [first, last) of the rows that are here; None: all
    A gather of it ends as DataLoss where the file is shorter or cannot be read.
    Raises InvalidArgument for a file that does not hold them all now, Unavailable without the native extension.
    """
    needed = offset_bytes + row_count * row_bytes
    if min(offset_bytes, row_count, row_bytes) < 0 or os.fstat(descriptor).st_size < needed:
        raise InvalidArgument(f"disk rows: {needed} bytes expected, the file has {os.fstat(descriptor).st_size}")
    try:
        return native_module().DiskRows(descriptor, offset_bytes, row_count, row_bytes, held, readers.native)
    except OSError as error:
        raise Unavailable(f"disk rows: {error}") from error
