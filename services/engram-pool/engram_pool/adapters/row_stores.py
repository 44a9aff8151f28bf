"""Where requests at the native doors find the rows of a segment: its mapping, or its file by position, behind the host's hot rows.

Owns the choice of a tier, the threads that wait for a disk, and the caches of hot rows. Does not know who asks (native_doors).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.storing import Rows, TableSegment
from treadle.contract import TreadleError
from treadle.dataplane.dedup import DedupDecision, measure_store, memory_rows, without_repeats
from treadle.dataplane.disk import DiskReaders, disk_rows
from treadle.dataplane.hot_rows import HotCaches

log = logging.getLogger("engram_pool.store")


class RowStores:
    """Tables as doors read them.

    on_disk:      read rows by position, and leave the pages of the files to the kernel; else gather from the mapping
    disk_threads: that wait for the disk at once
    hot_bytes:    most memory of hot rows, for each size of rows; 0: none. Rows in memory are as fast as any cache and need none
    """

    def __init__(self, *, on_disk: bool = False, disk_threads: int = 8, hot_bytes: int = 0) -> None:
        self._readers = DiskReaders(disk_threads) if on_disk else None
        self.hot = HotCaches(hot_bytes) if on_disk and hot_bytes else None
        self.decisions: dict[str, DedupDecision] = {}  # by tier: whether each row of a batch is fetched once
        self._deciding = threading.Lock()

    @classmethod
    def remote(cls, hot_bytes: int) -> RowStores:
        """Of a pool whose tables lie at others: hot rows alone."""
        stores = cls()
        stores.hot = HotCaches(hot_bytes) if hot_bytes else None
        return stores

    def of_others(self, version: str, layer: int, store: Any) -> Any:
        """A native store of rows that lie at others, with what was measured to pay and the hot rows before it."""
        return self._behind_hot_rows(version, layer, self._fetched("remote", store, None))

    @property
    def on_disk(self) -> bool:
        """Whether rows are read by position, from files whose pages the kernel may drop."""
        return self._readers is not None

    def store(self, version: str, layer: int, segment: TableSegment, held: NDArray[np.int64] | None) -> Rows | Any:
        """The rows of a segment: its array, or a native store that needs no mapping. Raises ResourceExhausted, NotFound."""
        if self._readers is None:
            decision = self.decisions.get("memory")
            return without_repeats(memory_rows(segment.rows, held)) if decision is not None and decision.pays else segment.rows
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            first = segment.offset + segment.rows_offset_bytes
            rows = disk_rows(descriptor, first, segment.row_count, segment.row_bytes, self._readers, held)
        finally:
            os.close(descriptor)
        stretch = None if held is None else longest(held)
        return self._behind_hot_rows(version, layer, self._fetched("disk", rows, stretch))

    def measure_memory(self, rows: Rows) -> None:
        """Decide for rows in memory, on those of a warm table; tables that are served from then on are read so."""
        if self._readers is None:
            self._decide("memory", memory_rows(rows, None), None)

    def retire(self, version: str, layers: Iterable[int]) -> None:
        """No hot row of this version is found from now on."""
        if self.hot is not None:
            for layer in layers:
                self.hot.retire(version, layer)

    @property
    def hot_descriptors(self) -> Sequence[int]:
        """Of the caches that there are."""
        return () if self.hot is None else self.hot.descriptors

    def _behind_hot_rows(self, version: str, layer: int, store: Any) -> Any:
        return store if self.hot is None else self.hot.of(store.row_bytes).behind(version, layer, store)

    def _fetched(self, tier: str, store: Any, stretch: tuple[int, int] | None) -> Any:
        decision = self._decide(tier, store, stretch)
        return without_repeats(store) if decision is not None and decision.pays else store

    def _decide(self, tier: str, store: Any, stretch: tuple[int, int] | None) -> DedupDecision | None:
        """By measurement, at the first table of the tier; None: not decided yet, the next table is asked."""
        with self._deciding:
            decision = self.decisions.get(tier)
            if decision is not None or store.row_count == 0 or (stretch is not None and stretch[0] >= stretch[1]):
                return decision
            try:
                decision = self.decisions[tier] = measure_store(store, stretch)
            except TreadleError as error:
                log.warning("whether repeated rows are fetched once is not decided", extra={"tier": tier, "reason": str(error)})
                return None
        fields = {
            "tier": tier, "once": decision.pays, "repeats": decision.repeats,
            "plain_nanoseconds": round(decision.plain_nanoseconds, 1), "dedup_nanoseconds": round(decision.dedup_nanoseconds, 1),
        }  # fmt: skip
        log.info("whether repeated rows are fetched once was measured", extra=fields)
        return decision


def longest(held: NDArray[np.int64]) -> tuple[int, int]:
    """The longest of the ranges [n, 2] that are held."""
    first, last = held[int(np.argmax(held[:, 1] - held[:, 0]))] if len(held) else (0, 0)
    return int(first), int(last)
