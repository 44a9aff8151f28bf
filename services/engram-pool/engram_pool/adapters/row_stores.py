"""Where requests at the native doors find the rows of a segment: its mapping, or its file by position, behind the host's hot rows.

Owns the choice of a tier, the threads that wait for a disk, and the caches of hot rows. Does not know who asks (native_doors).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.storing import Rows, TableSegment
from treadle.dataplane.disk import DiskReaders, disk_rows
from treadle.dataplane.hot_rows import HotCaches


class RowStores:
    """Tables as doors read them.

    on_disk:      read rows by position, and leave the pages of the files to the kernel; else gather from the mapping
    disk_threads: that wait for the disk at once
    hot_bytes:    most memory of hot rows, for each size of rows; 0: none. Rows in memory are as fast as any cache and need none
    """

    def __init__(self, *, on_disk: bool = False, disk_threads: int = 8, hot_bytes: int = 0) -> None:
        self._readers = DiskReaders(disk_threads) if on_disk else None
        self.hot = HotCaches(hot_bytes) if on_disk and hot_bytes else None

    @classmethod
    def remote(cls, hot_bytes: int) -> RowStores:
        """Of a pool whose tables lie at others: hot rows alone."""
        stores = cls()
        stores.hot = HotCaches(hot_bytes) if hot_bytes else None
        return stores

    def behind_hot_rows(self, version: str, layer: int, store: Any) -> Any:
        """A native store with the hot rows before it, if there are any."""
        return store if self.hot is None else self.hot.of(store.row_bytes).behind(version, layer, store)

    def store(self, version: str, layer: int, segment: TableSegment, held: NDArray[np.int64] | None) -> Rows | Any:
        """The rows of a segment: its array, or a native store that needs no mapping. Raises ResourceExhausted, NotFound."""
        if self._readers is None:
            return segment.rows
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            first = segment.offset + segment.rows_offset_bytes
            rows = disk_rows(descriptor, first, segment.row_count, segment.row_bytes, self._readers, held)
        finally:
            os.close(descriptor)
        return self.behind_hot_rows(version, layer, rows)

    def retire(self, version: str, layers: Iterable[int]) -> None:
        """No hot row of this version is found from now on."""
        if self.hot is not None:
            for layer in layers:
                self.hot.retire(version, layer)

    @property
    def hot_descriptors(self) -> Sequence[int]:
        """Of the caches that there are."""
        return () if self.hot is None else self.hot.descriptors
