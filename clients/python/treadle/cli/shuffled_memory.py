"""A copy of a grown folder with its rows in each other's places: what a fabric that delivers wrong rows would serve.

Owns making it: same rows, same weights, same shapes, digests that are true of the copy, so that a pool takes it in like any other
and nothing but the rows' places differs. Does not load it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.cli.memories import CARD, MANIFEST, GrownMemory
from treadle.contract import DataLoss, EngramModel, InvalidArgument, NotFound, Table
from treadle.contract.table_manifest import version_of_rows

ROWS, FUSION = "rows.safetensors", "fusion.safetensors"
ROWS_BYTES_MAX = 1 << 30  # all of it is held in memory once
LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header


def write_shuffled(source: Path, out: Path, *, name: str, seed: int = 0) -> EngramModel:
    """Write the copy of the folder `source` to `out`, named `name`; the manifest. The same seed makes the same copy.

    Raises NotFound, InvalidArgument (rows beyond ROWS_BYTES_MAX, `out` is there already), DataLoss (rows that are no such file).
    """
    memory = GrownMemory.read(source)
    data = _read_rows(source / ROWS)
    tables, chance = {}, np.random.default_rng(seed)
    for layer, table in memory.model.tables:
        rows = _layer_rows(data, source / ROWS, layer, (table.rows, memory.model.row.bytes))
        rows[:] = rows[chance.permutation(table.rows)]
        tables[layer] = Table(table.rows, version_of_rows(rows))
    model = replace(memory.model.template, name=name).with_tables(tables)
    try:
        out.mkdir(parents=True)
    except FileExistsError as error:
        raise InvalidArgument(f"{out} is there already") from error
    (out / ROWS).write_bytes(data)
    shutil.copyfile(source / FUSION, out / FUSION)
    card = memory.card | {"name": name, "version": model.version, "shuffled_from": memory.model.version, "shuffle_seed": seed}
    (out / CARD).write_text(json.dumps(card, indent=2, sort_keys=True), encoding="utf-8")
    (out / MANIFEST).write_bytes(model.to_json())
    return model


def _read_rows(path: Path) -> bytearray:
    try:
        size = path.stat().st_size
        if size > ROWS_BYTES_MAX:
            raise InvalidArgument(f"{path}: {size} bytes, at most {ROWS_BYTES_MAX} are shuffled here")
        return bytearray(path.read_bytes())
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error


def _layer_rows(data: bytearray, path: Path, layer: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The rows uint8 [N, row_bytes] of a layer, as a view into `data`, a whole safetensors file."""
    try:
        begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        tensor = json.loads(bytes(data[LENGTH_BYTES:begin]))[f"{layer}.rows"]
        first, last = tensor["data_offsets"]
        if tensor["dtype"] != "U8" or tuple(tensor["shape"]) != shape:
            raise ValueError(f"U8{list(shape)} expected, got {tensor['dtype']}{tensor['shape']}")
        return np.frombuffer(data, dtype=np.uint8)[begin + first : begin + last].reshape(shape)
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{path}: the rows of layer {layer} cannot be found: {error!r}") from error
