"""Rows, weights and card of a version that a Mooncake Store keeps, for a load."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engram_pool.domain.origins import StoreOrder
from engram_pool.domain.storing import Rows, Staging, TokenMap
from engram_pool.domain.token_maps import TOKEN_MAP_IDS_MAX, check_token_map, read_token_map
from treadle.client.engram.mooncake_store import SegmentStore, StoredVersion
from treadle.contract import DataLoss, EngramModel, InvalidArgument
from treadle.contract.engram_model import CARD_BYTES_MAX, FUSION_BYTES_MAX
from treadle.contract.version import check_name, check_version

PIECE_BYTES = 1 << 20


def open_store(order: StoreOrder) -> StoreRows:
    """Open what an order names. Raises Unavailable if Mooncake is not installed or the store does not answer, NotFound, DataLoss."""
    check_name(order.model)
    if order.version:
        check_version(order.version)
    store = SegmentStore(order.master, order.protocol)
    try:
        return StoreRows(store, StoredVersion(store, order.model, order.version))
    except BaseException:
        store.close()
        raise


class StoreRows:
    """Rows of a stored version, which it closes. `model` has its tables: a load compares what it wrote with them."""

    def __init__(self, store: SegmentStore, stored: StoredVersion) -> None:
        """Raises DataLoss for a manifest that is not of this version, or does not fit what is stored."""
        self._store, self._stored = store, stored
        self.model = _model(stored)
        self.token_map = self._read_token_map()
        check_token_map(self.model, self.token_map)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept beside the tables."""
        return self._bytes_of("fusion", FUSION_BYTES_MAX) + self._bytes_of("card", CARD_BYTES_MAX)

    def row_count(self, layer: int) -> int:
        """Rows of the table, as the manifest says."""
        return self.model.table(layer).rows

    def read(self, layer: int, first: int, out: Rows) -> None:
        """Fill `out` [n, row_bytes] uint8 with the rows from `first` on. Raises DataLoss, NotFound, Unavailable."""
        self._stored.read(str(layer), first * self.model.row.bytes, out.reshape(-1))

    def keep_files(self, staging: Staging) -> None:
        """Write weights and card beside the tables, where it has any. Raises DataLoss unless they are those of the manifest."""
        named = self.model.fusion and self.model.fusion.weights
        if self._bytes_of("fusion", FUSION_BYTES_MAX) and staging.keep_fusion(self._pieces("fusion")) != named:
            raise DataLoss(f"{self.model.name} {self._stored.version}: the store's fusion weights are not those of the manifest")
        if self._bytes_of("card", CARD_BYTES_MAX):
            staging.keep_card(b"".join(self._pieces("card")))

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _read_token_map(self) -> TokenMap | None:
        size = self._bytes_of("token_map", 4 * TOKEN_MAP_IDS_MAX)
        return read_token_map(b"".join(self._pieces("token_map"))) if size else None

    def _pieces(self, blob: str) -> Iterator[bytes]:
        size = self._stored.manifest.blobs[blob].byte_count
        for first in range(0, size, PIECE_BYTES):
            piece = np.empty(min(PIECE_BYTES, size - first), dtype=np.uint8)
            self._stored.read(blob, first, piece)
            yield piece.tobytes()

    def _bytes_of(self, blob: str, most: int) -> int:
        kept = self._stored.manifest.blobs.get(blob)
        size = 0 if kept is None else kept.byte_count
        if size > most:
            raise DataLoss(f"{self._stored.model} {self._stored.version}: {blob} of {size} bytes, at most {most} expected")
        return size


def _model(stored: StoredVersion) -> EngramModel:
    try:
        model = EngramModel.from_json(stored.manifest.manifest_json)
    except InvalidArgument as error:
        raise DataLoss(f"{stored.model} {stored.version}: the store's manifest cannot be read: {error}") from error
    if (model.name, model.version) != (stored.model, stored.version):
        raise DataLoss(f"{stored.model} {stored.version}: the store holds the manifest of {model.name} {model.version} there")
    for layer, table in model.tables:
        blob, needed = stored.manifest.blobs.get(str(layer)), table.rows * model.row.bytes
        if blob is None or blob.byte_count != needed:
            raise DataLoss(f"{stored.model} {stored.version}: layer {layer} has {needed} bytes, the store keeps {blob}")
    return model
