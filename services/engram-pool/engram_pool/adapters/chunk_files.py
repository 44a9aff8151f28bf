"""Writes the bytes of a damaged chunk again where they lie.

Owns how: what is mapped and what is written must be one file. That the bytes are the chunk's own is for the caller to know.
"""

from __future__ import annotations

import os
import stat

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.storing import TableSegment
from treadle.contract import DataLoss
from treadle.contract.table_manifest import CHUNK_BYTES

PAGE_BYTES = 4096  # only pages that differ are written: the others are being read


def restore_chunk(segment: TableSegment, chunk: int, data: NDArray[np.uint8]) -> None:
    """Write `data`, uint8 [n], the chunk's own bytes, over what differs from them in the segment's file.

    Raises DataLoss if the file at that path is shorter than the segment, or does not change what is mapped; OSError as it comes.
    """
    descriptor = os.open(segment.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < segment.offset + segment.file_bytes:
            raise DataLoss(f"{segment.path}: no file of {segment.offset + segment.file_bytes} bytes any more")
        begin = segment.offset + segment.rows_offset_bytes + chunk * CHUNK_BYTES
        here = segment.chunk(chunk)
        for at in range(0, data.size, PAGE_BYTES):
            page = data[at : at + PAGE_BYTES]
            if not np.array_equal(here[at : at + PAGE_BYTES], page):
                _write(descriptor, page, begin + at)
        os.fsync(descriptor)
        if not np.array_equal(here, data):
            raise DataLoss(f"{segment.path}: chunk {chunk} was written again and still reads otherwise; suspect the memory")
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: NDArray[np.uint8], at: int) -> None:
    view = memoryview(data.data)
    while view:
        written = os.pwrite(descriptor, view, at)
        at, view = at + written, view[written:]
