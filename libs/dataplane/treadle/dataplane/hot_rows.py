"""The hot rows of a host: a cache in shared memory that one process writes and others read, and tables behind it.

Owns sizes, checks and which table has which tag; sets, sequence locks and CLOCK are native. A row that is written while it is read
counts as a miss. Entries belong to a version and a layer, so a row is never of another version.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, ResourceExhausted
from treadle.contract.row_layout import ROW_BYTES_MAX
from treadle.dataplane.extension import native_module

HOT_BYTES_MIN = 1 << 16
HOT_BYTES_MAX = 1 << 44
SIZES_MAX = 8  # row sizes of one host: as many caches, each of its own memory
Rows = NDArray[np.uint8]
_Table = tuple[int, int]  # slot and tag; tag 0: none


class HotRows:
    """The writer: one cache for rows of `row_bytes`, at most `bytes_max` of shared memory, taken as it is touched.

    Raises InvalidArgument for sizes, ResourceExhausted where the system grants no memory, Unavailable without the native extension.
    """

    def __init__(self, row_bytes: int, bytes_max: int) -> None:
        if not 1 <= row_bytes <= ROW_BYTES_MAX or not HOT_BYTES_MIN <= bytes_max <= HOT_BYTES_MAX:
            raise InvalidArgument(
                f"hot rows: {HOT_BYTES_MIN} to {HOT_BYTES_MAX} bytes for rows up to {ROW_BYTES_MAX}, got {bytes_max}, {row_bytes}"
            )
        try:
            self.native: Any = native_module().HotCache(row_bytes, bytes_max)
        except OSError as error:
            raise ResourceExhausted(f"hot rows: no {bytes_max} bytes: {error}") from error
        self.row_bytes = row_bytes

    @property
    def descriptor(self) -> int:
        """Of the memory: others may map it for reading only. The cache's own; open as long as it."""
        return int(self.native.fd)

    def behind(self, version: str, layer: int, store: Any) -> Any:
        """`store` (native RowStore) with this cache before it. Raises InvalidArgument for rows of another size."""
        if store.row_bytes != self.row_bytes:
            raise InvalidArgument(f"hot rows: of {self.row_bytes} bytes, the table's have {store.row_bytes}")
        return native_module().cached_rows(store, self.native, self.enter(version, layer))

    def enter(self, version: str, layer: int) -> _Table:
        """The tag of a table's rows, given at the first call. Raises ResourceExhausted beyond 256 tables."""
        table: _Table = self.native.enter(bytes.fromhex(version), layer)
        if not table[1]:
            raise ResourceExhausted("hot rows: 256 tables have rows here already; remove a version")
        return table

    def retire(self, version: str, layer: int) -> None:
        """No row of this table is found from now on; their places are free."""
        self.native.retire(self.native.find(bytes.fromhex(version), layer))

    def insert(self, version: str, layer: int, rows: NDArray[np.int64], data: Rows) -> None:
        """Put rows [n] int64 of `data` [n, row_bytes] in; one that another thread's set is busy with is left out."""
        if rows.dtype != np.int64 or data.shape != (rows.size, self.row_bytes) or (rows.size and rows.min() < 0):
            raise InvalidArgument(f"rows, data: int64 [n] and u8 [n, {self.row_bytes}] expected, got {rows.shape}, {data.shape}")
        self.native.insert(self.enter(version, layer), rows, data)

    def stats(self) -> dict[str, int]:
        """bytes, rows_max, and totals since the start: hits_total, misses_total, inserted_total, evicted_total."""
        stats: dict[str, int] = self.native.stats()
        return stats


class HotRowsReader:
    """Another process's cache, mapped read-only. Raises DataLoss for a descriptor that is no cache."""

    def __init__(self, descriptor: int) -> None:
        try:
            self._native: Any = native_module().HotReader(descriptor)
        except OSError as error:
            raise DataLoss(f"hot rows: the descriptor holds no cache of this release: {error}") from error
        self.row_bytes = int(self._native.row_bytes)

    def table(self, version: str, layer: int) -> _Table | None:
        """Where rows of this table are looked for; None: it has none here."""
        table: _Table = self._native.find(bytes.fromhex(version), layer)
        return table if table[1] else None

    def serves(self, table: _Table) -> bool:
        """False once its version was retired: look it up again."""
        return bool(self._native.serves(table))

    def probe(self, table: _Table, rows: NDArray[np.int64], out: Rows) -> NDArray[np.int64]:
        """Copy what is here. rows: [n] int64, checked by the caller; out: u8 [n, row_bytes].

        Returns int64 [m], rising: the places that are not here; `out` holds anything there.
        """
        misses: NDArray[np.int64] = self._native.probe(table, rows, out)
        return misses


class HotCaches:
    """The caches of a process, one for each size of rows, each at most `bytes_max`. May be used from any thread."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._caches: dict[int, HotRows] = {}

    def of(self, row_bytes: int) -> HotRows:
        """The cache for rows of that size, made at first need. Raises ResourceExhausted beyond SIZES_MAX sizes."""
        with self._lock:
            if row_bytes not in self._caches:
                if len(self._caches) >= SIZES_MAX:
                    raise ResourceExhausted(f"hot rows: {SIZES_MAX} sizes of rows are here already; remove the models of one")
                self._caches[row_bytes] = HotRows(row_bytes, self.bytes_max)
            return self._caches[row_bytes]

    @property
    def descriptors(self) -> list[int]:
        """Of the caches that there are."""
        return [cache.descriptor for cache in list(self._caches.values())]

    def retire(self, version: str, layer: int) -> None:
        """`HotRows.retire` wherever the table is."""
        for cache in list(self._caches.values()):
            cache.retire(version, layer)

    def stats(self) -> dict[str, int]:
        """Of all together, as `HotRows.stats`."""
        total: dict[str, int] = {}
        for cache in list(self._caches.values()):
            for name, value in cache.stats().items():
                total[name] = total.get(name, 0) + value
        return total
