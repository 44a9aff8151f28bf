"""What every row must be, computed here from (seed, layer, row) alone: nothing of the fabric is believed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowLayout, Table, Windows
from treadle.contract.families import demo_model
from treadle.contract.table_manifest import version_of_rows
from treadle.kernels import HashPlan, reference

MODEL = "loadtest"
VOCABULARY = 4_000
ROW = RowLayout(64, 64, "u8")  # opaque bytes: random rows of this layout are the generator's own words
BLOCK_ROWS = 4096  # rows of one stream of the generator
LAYERS = (1, 4)


def token_map() -> NDArray[np.int32]:
    """int32 [VOCABULARY]: raw to compressed ids."""
    return (np.arange(VOCABULARY) * 7 % 3_000).astype(np.int32)


def template(prime_base: int = 3_000) -> EngramModel:
    """The model of the load tests: two layers of 16 heads of about `prime_base` rows of 64 bytes."""
    digest = hashlib.sha256(token_map().astype("<i4").tobytes()).hexdigest()
    return demo_model(MODEL, layers=LAYERS, token_map=digest, compressed_vocab_size=3_000, pad_id=2, prime_base=prime_base, row=ROW)


def table(seed: int, layer: int, row_count: int) -> NDArray[np.uint8]:
    """uint8 [row_count, 64]: PCG64 seeded with (seed, layer, block of 4,096 rows), little-endian words."""
    words = [
        np.random.PCG64(np.random.SeedSequence([seed, layer, block])).random_raw(BLOCK_ROWS * ROW.bytes // 8)
        for block in range(-(-row_count // BLOCK_ROWS))
    ]
    return np.concatenate(words).astype("<u8", copy=False).view(np.uint8).reshape(-1, ROW.bytes)[:row_count]


class Truth:
    """All rows of one version, and its digest, from its seed.

    tables: by layer, uint8 [rows, 64]
    """

    def __init__(self, seed: int, prime_base: int) -> None:
        made = template(prime_base)
        self.seed = seed
        self.tables = {layer: table(seed, layer, made.rows_hashed(layer)) for layer in made.layers}
        self.model = made.with_tables({layer: Table(len(rows), version_of_rows(rows)) for layer, rows in self.tables.items()})

    @property
    def version(self) -> str:
        """The digest of the version's manifest."""
        return self.model.version

    def wrong(self, layer: int, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> int:
        """How many of `rows` [..., 64] are not those of `ids` [...]."""
        return int((self.tables[layer][ids] != rows).any(axis=-1).sum())


class Steps:
    """Lookups to ask, with the row ids that they must come to, hashed by the numpy reference.

    windows[i]: tokens of a step; ids[i]: by layer, int64 [T, 16]
    """

    def __init__(self, count: int, tokens: int, prime_base: int, seed: int) -> None:
        made, ids = template(prime_base), token_map()
        plans = {layer: HashPlan.from_model(made, layer, ids) for layer in made.layers}
        chance = np.random.default_rng(seed)
        self.windows = [_windows(chance, tokens, made.order_max - 1) for _ in range(count)]
        self.ids = [{layer: reference.row_ids(plan, windows) for layer, plan in plans.items()} for windows in self.windows]


def seeds_of(versions: int) -> Sequence[int]:
    """Seeds of the versions that a scenario swaps between."""
    return range(1, versions + 1)


def _windows(chance: np.random.Generator, tokens: int, depth: int) -> Windows:
    return Windows(
        tokens=chance.integers(0, VOCABULARY, tokens), starts=np.array([0, tokens], dtype=np.int32),
        lookback=chance.integers(0, VOCABULARY, (1, depth)),
    )  # fmt: skip
