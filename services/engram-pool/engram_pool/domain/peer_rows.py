"""Rows of a version that other pools hold: believed by the digests of its chunks, which make its version.

Owns the order of belief: manifest, digests, bytes. Does not know how pools are called (adapters).
"""

from __future__ import annotations

import hashlib
import logging

import numpy as np

from engram_pool.domain.sources import PeerVersion
from engram_pool.domain.storing import Rows, Staging, TokenMap
from engram_pool.domain.token_maps import check_token_map, read_token_map
from treadle.contract import DataLoss, EngramModel
from treadle.contract.table_manifest import CHUNK_BYTES, table_version

log = logging.getLogger("engram_pool")


class PeerRows:
    """Rows of `peers`, which it closes. `model` has its tables."""

    def __init__(self, peers: PeerVersion) -> None:
        """Raises DataLoss if what the peers tell does not make the version; `peers` is then still open."""
        self._peers = peers
        self.model: EngramModel = peers.model
        self.digests: dict[int, list[bytes]] = {}
        words = b""
        for layer in self.model.layers:
            self.digests[layer], words = peers.describe(layer)
            table, found = self.model.table(layer), "none"
            if len(self.digests[layer]) == -(-table.rows * self.model.row.bytes // CHUNK_BYTES):
                found = table_version(table.rows, self.model.row.bytes, self.digests[layer])
            if found != table.version:
                raise DataLoss(f"layer {layer}: its peers' digests make the version {found}, their manifest says {table.version}")
        self.token_map: TokenMap | None = read_token_map(words)
        check_token_map(self.model, self.token_map)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the card; weights are asked for room when they come."""
        return len(self._peers.card_json)

    def row_count(self, layer: int) -> int:
        """Rows of the table."""
        return self.model.table(layer).rows

    def read_chunk(self, layer: int, chunk: int) -> Rows:
        """The bytes of one chunk, uint8 [n], its digest compared; the next peer is asked where they do not fit.

        Raises Unavailable or DataLoss if no peer has them.
        """
        size = self.model.table(layer).rows * self.model.row.bytes
        first = chunk * CHUNK_BYTES
        count = min(CHUNK_BYTES, size - first)
        expected = self.digests[layer][chunk]
        for data in self._peers.read(layer, first, count):
            if len(data) == count and hashlib.sha256(data).digest() == expected:
                return np.frombuffer(data, dtype=np.uint8)
            log.warning("a peer's chunk does not fit its digest", extra={"layer": layer, "chunk": chunk})
        raise DataLoss(f"layer {layer}, chunk {chunk}: what the peers sent does not fit the version's digest")

    def keep_files(self, staging: Staging) -> None:
        """Write fusion weights and card of a grown memory beside the tables. Raises DataLoss unless the weights are those named."""
        named = self.model.fusion and self.model.fusion.weights
        if named:
            found = staging.keep_fusion([self._peers.fusion()])
            if found != named:
                raise DataLoss(f"the peer's fusion weights hash to {found}, the manifest says {named}")
        staging.keep_card(self._peers.card_json)

    def close(self) -> None:
        """Let the peers go."""
        self._peers.close()
