"""Rows, weights and card of a grown memory: taken as they are, if they are what its manifest says.

Owns what a grown folder must hold. Does not open its files (adapters), or know how it was grown.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from engram_pool.domain.sources import GrownFolder, Tensor
from engram_pool.domain.storing import Rows, Staging, TokenMap
from engram_pool.domain.token_maps import TOKEN_MAP_IDS_MAX, check_token_map, read_token_map
from treadle.contract import DataLoss, EngramModel, InvalidArgument, Table

TOKEN_MAP_TENSOR = "token_map"


class GrownRows:
    """Rows of a grown folder, which it closes. `model` has its tables, under the name it is to be loaded as."""

    def __init__(self, folder: GrownFolder, name: str = "") -> None:
        """Raises InvalidArgument, FingerprintMismatch or DataLoss, naming what does not fit; the folder is then still open."""
        self._folder = folder
        self.model = _model(folder, name)
        _check_card(folder)
        self._tensors = _tensors(folder, self.model)
        self.token_map = _token_map(folder, self._tensors)
        check_token_map(self.model, self.token_map)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept beside the tables."""
        return self._folder.fusion_bytes + len(self._folder.card_json)

    def row_count(self, layer: int) -> int:
        """Rows of the table, as the manifest says."""
        return self.model.table(layer).rows

    def read(self, layer: int, first: int, out: Rows) -> None:
        """Fill `out` [n, row_bytes] uint8 with the rows from `first` on. Raises DataLoss for a short file."""
        self._folder.rows.read(self._tensors[f"{layer}.rows"], first, out)

    def keep_files(self, staging: Staging) -> None:
        """Write weights and card beside the tables. Raises DataLoss unless the weights are those of the manifest."""
        found, named = staging.keep_fusion(self._folder.fusion_pieces()), self.model.fusion and self.model.fusion.weights
        if found != named:
            raise DataLoss(
                f"{self._folder.path}: fusion.safetensors hashes to {found}, the manifest says {named}: "
                "the folder is damaged or mixed from two"
            )
        staging.keep_card(self._folder.card_json)

    def close(self) -> None:
        """Close the folder."""
        self._folder.close()


def check_table(model: EngramModel, layer: int, found: Table) -> None:
    """Raise DataLoss unless `found` is what the manifest says of `layer`; nothing for a manifest without tables."""
    if model.tables and model.table(layer) != found:
        raise DataLoss(
            f"layer {layer}: the rows hash to {found.version}, the manifest says {model.table(layer).version}: "
            "the source is damaged or mixed from two"
        )


def _model(folder: GrownFolder, name: str) -> EngramModel:
    try:
        model = EngramModel.from_json(folder.manifest_json)
    except InvalidArgument as error:
        raise InvalidArgument(f"{folder.path / 'manifest.json'}: {error}") from error
    if not model.tables or model.fusion is None or model.fusion.weights is None:
        missing = "tables" if not model.tables else "the digest of its fusion weights"
        raise InvalidArgument(f"{folder.path / 'manifest.json'}: the manifest of a grown memory names {missing}")
    return replace(model, name=name) if name else model


def _check_card(folder: GrownFolder) -> None:
    try:
        card = json.loads(folder.card_json.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{folder.path / 'card.json'}: not JSON: {error}") from error
    if not isinstance(card, dict):
        raise InvalidArgument(f"{folder.path / 'card.json'}: an object expected, got {type(card).__name__}")


def _tensors(folder: GrownFolder, model: EngramModel) -> dict[str, Tensor]:
    """By name, exactly those that the manifest asks for."""
    found, place = folder.rows.tensors, folder.path / "rows.safetensors"
    wanted = {f"{layer}.rows": ("U8", (table.rows, model.row.bytes)) for layer, table in model.tables}
    names = {*wanted, TOKEN_MAP_TENSOR} if model.token_map is not None else set(wanted)
    if set(found) != names:
        missing, unknown = sorted(names - set(found))[:8], sorted(set(found) - names)[:8]
        raise InvalidArgument(f"{place}: tensors {sorted(names)[:8]} expected; missing {missing}, unknown {unknown}")
    for name, (dtype, shape) in wanted.items():
        if (found[name].dtype, found[name].shape) != (dtype, shape):
            raise InvalidArgument(f"{place}: {name}: {dtype}{list(shape)} expected, got {found[name]}")
    ids = found.get(TOKEN_MAP_TENSOR)
    if ids is not None and (ids.dtype != "I32" or len(ids.shape) != 1 or not 1 <= ids.shape[0] <= TOKEN_MAP_IDS_MAX):
        raise InvalidArgument(f"{place}: {TOKEN_MAP_TENSOR}: I32 [1 to {TOKEN_MAP_IDS_MAX}] expected, got {ids}")
    return dict(found)


def _token_map(folder: GrownFolder, tensors: dict[str, Tensor]) -> TokenMap | None:
    tensor = tensors.get(TOKEN_MAP_TENSOR)
    if tensor is None:
        return None
    ids = np.empty((tensor.shape[0], 4), dtype=np.uint8)
    folder.rows.read(tensor, 0, ids)
    return read_token_map(ids.tobytes())
