"""A small Engram model with tables in arrays, and small dictionaries in folders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowLayout, Table
from treadle.contract.dictionary import Calibration, Dictionary, DictionaryModel, DictionarySettings, Prefix, RowDtype
from treadle.contract.dictionary_file import DTYPES, PREFIX_KV_FILE, tensor_info, write_folder
from treadle.contract.families import demo_model

VOCABULARY = 500


@dataclass(frozen=True)
class SmallEngram:
    model: EngramModel
    token_map: NDArray[np.int32]
    tables: dict[int, NDArray[np.uint8]]


@pytest.fixture(scope="session")
def small() -> SmallEngram:
    token_map = (np.arange(VOCABULARY) % 400).astype(np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    template = demo_model(
        "small", layers=(1, 4), token_map=digest, compressed_vocab_size=400, pad_id=2, prime_base=300, row=RowLayout(64, 32, "bf16")
    )
    chance = np.random.default_rng(7)
    tables = {layer: chance.integers(1, 256, size=(template.rows_hashed(layer), 64), dtype=np.uint8) for layer in template.layers}
    versions = {layer: Table(len(table), hashlib.sha256(table.tobytes()).hexdigest()) for layer, table in tables.items()}
    return SmallEngram(template.with_tables(versions), token_map, tables)


WriteDictionary = Callable[..., Dictionary]
DIGEST = hashlib.sha256(b"any").hexdigest()


class Shapes(Dictionary):
    """A manifest without tensors, to be asked which it is to have."""

    def __post_init__(self) -> None:
        pass


@pytest.fixture(scope="session")
def write_dictionary() -> WriteDictionary:
    """Writes folders as `treadle asm build` does: two layers, two query heads of 8 numbers that share a key head; seeded."""

    def write(
        folder: Path,
        seed: int = 0,
        *,
        name: str = "rules",
        entries: int = 6,
        prefix_kv: bytes = b"",
        card: bytes = b"",
        matched_keys: int = 0,
    ) -> Dictionary:
        parts: dict[str, Any] = {
            "name": name, "model": DictionaryModel(DIGEST, DIGEST, DIGEST, layers=2, heads=2, kv_heads=1, head_dim=8), "layers": (0, 1),
            "prefix": Prefix(DIGEST, 5, (5,)), "calibration": Calibration(DIGEST, 3, 40),
            "settings": DictionarySettings(dtype=RowDtype.F32, entries=entries, matched_keys=matched_keys),
            "prefix_kv": hashlib.sha256(prefix_kv).hexdigest() if prefix_kv else None,
        }  # fmt: skip
        shapes, chance = dict(Shapes(**parts, tensors=()).tensor_shapes()), np.random.default_rng(seed)
        tensors = {tensor: _values(tensor, shape, chance).astype(DTYPES[dtype]) for tensor, (dtype, shape) in shapes.items()}
        infos = tuple((tensor, tensor_info(array, shapes[tensor][0])) for tensor, array in sorted(tensors.items()))
        dictionary = Dictionary(**parts, tensors=infos)
        folder.mkdir(parents=True)
        if prefix_kv:
            (folder / PREFIX_KV_FILE).write_bytes(prefix_kv)
        write_folder(folder, dictionary, tensors, card)
        return dictionary

    return write


def _values(tensor: str, shape: tuple[int, ...], chance: np.random.Generator) -> NDArray[Any]:
    if tensor.endswith("cosine_quantiles"):
        return np.broadcast_to(np.linspace(-1.0, 1.0, shape[-1]), shape)
    if tensor.endswith("counts"):
        return np.ones(shape)
    values = chance.standard_normal(shape)
    return values / np.linalg.norm(values, axis=-1, keepdims=True) if tensor.endswith("keys") else values
