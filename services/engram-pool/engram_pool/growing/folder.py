"""A grown memory as a folder: what `treadle engram grow` writes and a pool loads.

    manifest.json        the EngramModel, its tables and weights named by digest
    rows.safetensors     `<layer>.rows` U8 [N, row_bytes] of every layer, `token_map` I32 [V]
    fusion.safetensors   the projections, bf16
    card.json            what it was grown from, and what it does (see `card`)

Owns writing and reading back. A folder appears whole or not at all, and is never written over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from engram_pool.growing.card import CARD, read_card
from engram_pool.growing.memory import FORM, Layer, Memory
from treadle.contract import EngramModel, Fusion, Table
from treadle.contract.engram_model import CARD_BYTES_MAX
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound
from treadle.contract.row_layout import row_layout
from treadle.contract.table_manifest import version_of_rows
from treadle.kernels import dequantise, quantise
from treadle.nn.fusion import FusionShape

MANIFEST, ROWS, FUSION = "manifest.json", "rows.safetensors", "fusion.safetensors"
FILE_MODE = 0o644
PROJECTIONS = ("wkv", "query_weight", "key_weight")


@dataclass(frozen=True, slots=True)
class Grown:
    """A folder read back: the manifest with its tables, the memory in fp32, the card."""

    model: EngramModel
    memory: Memory
    card: dict[str, Any]


def write(folder: Path, memory: Memory, precision: str, card: Mapping[str, Any]) -> EngramModel:
    """Write `memory` with rows in `precision` (bf16, fp8, int4); returns the manifest. The card gets the sizes of the files.

    Raises InvalidArgument if `folder` is there already, or rows are not finite.
    """
    if folder.exists():
        raise InvalidArgument(f"{folder}: is there already; choose another place with --out, or remove it")
    layout = row_layout(precision, memory.template.row.dim)
    rows = {layer: quantise(part.rows.numpy(), layout) for layer, part in memory.layers.items()}
    fusion = _fusion_bytes(memory)
    tables = {layer: Table(len(table), version_of_rows(table)) for layer, table in rows.items()}
    form = Fusion(FORM, hashlib.sha256(fusion).hexdigest())
    model = replace(memory.template, row=layout, fusion=form).with_tables(tables)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file({f"{layer}.rows": table for layer, table in rows.items()} | {"token_map": memory.token_map}, partial / ROWS)
        (partial / FUSION).write_bytes(fusion)
        sizes = {"rows_bytes": (partial / ROWS).stat().st_size, "fusion_bytes": len(fusion)}
        data = json.dumps({**card, "version": model.version, "sizes": sizes}, indent=2, sort_keys=True).encode() + b"\n"
        if len(data) > CARD_BYTES_MAX:
            raise InvalidArgument(f"card: {len(data)} bytes, at most {CARD_BYTES_MAX}")
        (partial / CARD).write_bytes(data)
        (partial / MANIFEST).write_bytes(model.to_json())
        (partial / ROWS).chmod(FILE_MODE)  # safetensors makes files for their owner alone; a pool may be another user
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return model


def read(folder: Path) -> Grown:
    """Read a folder, rows dequantised to fp32, and compare every digest.

    Raises NotFound (no such folder or file), DataLoss (a digest or shape that does not fit the manifest).
    """
    model = EngramModel.from_json(_bytes(folder / MANIFEST))
    if model.fusion is None or model.fusion.weights is None or model.fusion.form != FORM or not model.tables:
        raise DataLoss(f"{folder / MANIFEST}: not the manifest of a grown memory: no tables, or no {FORM} fusion weights")
    fusion = _bytes(folder / FUSION)
    if hashlib.sha256(fusion).hexdigest() != model.fusion.weights:
        raise DataLoss(f"{folder / FUSION}: not the weights that the manifest names")
    try:
        stored = load_file(folder / ROWS) if (folder / ROWS).is_file() else {}
        weights = load_tensors(fusion)
        layers = {layer: _layer(folder, model, layer, stored[f"{layer}.rows"], weights) for layer in model.layers}
        memory = Memory(model.template, stored["token_map"], layers)
        card = read_card(folder)
    except FingerprintMismatch as error:
        raise DataLoss(f"{folder / ROWS}: {error}") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataLoss(f"{folder}: not a whole grown memory: {error!r}") from error
    return Grown(model, memory, card)


def _layer(folder: Path, model: EngramModel, layer: int, rows: NDArray[np.uint8], weights: Mapping[str, torch.Tensor]) -> Layer:
    table = model.table(layer)
    if rows.shape != (table.rows, model.row.bytes) or version_of_rows(rows) != table.version:
        raise DataLoss(f"{folder / ROWS}: the rows of layer {layer} are not those that the manifest names")
    read_back = torch.from_numpy(dequantise(rows, model.row))
    return Layer(read_back, *(weights[f"{layer}.{name}"].to(torch.float32) for name in PROJECTIONS))


def _fusion_bytes(memory: Memory) -> bytes:
    """The projections as `treadle.nn.fusion.EngramFusion.load` reads them: rounded to bf16, half the bytes of fp32."""
    shape = FusionShape(FORM, memory.template.layers, memory.hidden, memory.template.columns * memory.template.row.dim, 0)
    tensors = {
        f"{layer}.{name}": tensor.detach().to(torch.bfloat16).contiguous()
        for layer, part in memory.layers.items()
        for name, tensor in zip(PROJECTIONS, part.projections, strict=True)
    }
    data: bytes = save_tensors(tensors, {"treadle": shape.to_json()})
    return data


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise NotFound(f"{path}: no such file; a grown memory has {MANIFEST}, {ROWS}, {FUSION} and {CARD}")
    return path.read_bytes()
