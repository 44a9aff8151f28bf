"""Gets the bytes of a damaged chunk from somewhere else and has them written again: from other pools, or from where they came.

Owns who is asked, and that nothing is written which does not fit the version's own digests. That a version is out of service
meanwhile, and what becomes of it where nobody has the bytes, is the pool's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.loading import LoadOrder
from engram_pool.domain.origins import GrownOrder, PeerOrder, Source, StoreOrder, read_origin
from engram_pool.domain.ports import Meters
from engram_pool.domain.row_sources import RowSource
from engram_pool.domain.sources import OpenPeers
from engram_pool.domain.storing import StoredVersion, TableSegment, VersionStore
from engram_pool.domain.verification import Damaged
from treadle.contract import DataLoss, TreadleError
from treadle.contract.table_manifest import CHUNK_BYTES

log = logging.getLogger("engram_pool")


class Repairs:
    """Mends versions of `store`. peers: pools that are asked first, host:port each."""

    def __init__(
        self, store: VersionStore, meters: Meters, open_source: Callable[[LoadOrder], RowSource], open_peers: OpenPeers,
        *, peers: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._store, self._meters, self._open_source, self._open_peers = store, meters, open_source, open_peers
        self._peers = tuple(peers)

    def mend(self, stored: StoredVersion, damage: Damaged) -> str:
        """Put the chunk's own bytes back; where they were from. The caller keeps the version mapped; takes as long as sources do.

        Raises DataLoss, naming each source and its reason, if none has them; OSError or DataLoss if they cannot be written.
        """
        segment, layer, chunk = stored.segments[damage.layer], damage.layer, damage.chunk
        reasons = []
        for name, read in self._sources(stored, layer, chunk):
            try:
                data = next((data for data in read() if segment.fits(chunk, data)), None)
            except (TreadleError, OSError) as error:
                reasons.append(f"{name}: {error}")
                continue
            if data is None:
                reasons.append(f"{name}: its bytes do not fit the version's digests")
                continue
            self._store.restore_chunk(stored, layer, chunk, data)
            segment.check_chunk(chunk)
            self._meters.scrubbed("repaired", 1)
            fields = {"model": stored.model.name, "version": stored.version, "layer": layer, "chunk": chunk, "source": name}
            log.warning("chunk repaired", extra=fields)
            return name
        why = "; ".join(reasons) or "no peers are set, and where it came from is not known"
        raise DataLoss(f"layer {layer}, chunk {chunk}: nobody has its bytes: {why}")

    def _sources(
        self, stored: StoredVersion, layer: int, chunk: int
    ) -> Iterator[tuple[str, Callable[[], Iterator[NDArray[np.uint8]]]]]:
        """Name of a source, and how to read the chunk there."""
        origin = read_origin(stored.origin) if stored.origin else None
        endpoints = self._peers + (origin.endpoints if isinstance(origin, PeerOrder) else ())
        for endpoint in dict.fromkeys(endpoints):
            yield f"peer {endpoint}", lambda endpoint=endpoint: self._from_peer(endpoint, stored, layer, chunk)  # type: ignore[misc]
        if origin is not None and not isinstance(origin, PeerOrder):
            yield "its source", lambda: self._from_source(origin, stored, layer, chunk)

    def _from_peer(self, endpoint: str, stored: StoredVersion, layer: int, chunk: int) -> Iterator[NDArray[np.uint8]]:
        with closing(self._open_peers([endpoint], stored.model.name, stored.version)) as peers:
            for data in peers.read(layer, chunk * CHUNK_BYTES, stored.segments[layer].chunk(chunk).size):
                yield np.frombuffer(data, dtype=np.uint8)

    def _from_source(self, origin: Source, stored: StoredVersion, layer: int, chunk: int) -> Iterator[NDArray[np.uint8]]:
        segment = stored.segments[layer]
        words = b"" if segment.token_map is None else segment.token_map.astype("<i4").tobytes()
        own = isinstance(origin, GrownOrder | StoreOrder)  # it brings its manifest and token map
        order = LoadOrder(origin, b"" if own else stored.model.template.to_json(), b"" if own else words, keep_previous=True)
        with closing(self._open_source(order)) as source:
            if source.row_count(layer) != segment.row_count or source.model.row.bytes != segment.row_bytes:
                raise DataLoss(f"it has {source.row_count(layer)} rows of {source.model.row.bytes} bytes now")
            yield chunk_of_rows(source, segment, layer, chunk)


def chunk_of_rows(source: RowSource, segment: TableSegment, layer: int, chunk: int) -> NDArray[np.uint8]:
    """The bytes of one chunk, uint8 [n], out of the whole rows that it touches."""
    begin, size = chunk * CHUNK_BYTES, segment.chunk(chunk).size
    first, last = begin // segment.row_bytes, -(-(begin + size) // segment.row_bytes)
    rows = np.empty((last - first, segment.row_bytes), dtype=np.uint8)
    source.read(layer, first, rows)
    skipped = begin - first * segment.row_bytes
    return rows.reshape(-1)[skipped : skipped + size]
