"""A small Engram model with tables in arrays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowLayout, Table
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
