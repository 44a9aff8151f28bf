"""Whether a tier's repeated rows are fetched once follows the measurement, taken once for each tier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engram_pool.adapters import row_stores
from engram_pool.adapters.row_stores import RowStores
from treadle.dataplane import IMPLEMENTATION
from treadle.dataplane.dedup import DedupDecision, gather_of, memory_rows

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")


@pytest.mark.parametrize("pays", [True, False])
def test_a_store_is_read_as_the_first_one_was_measured(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    measured: list[Any] = []

    def measure(store: Any, stretch: tuple[int, int] | None = None) -> DedupDecision:
        measured.append(store)
        return DedupDecision(pays, 100.0, 50.0 if pays else 120.0, 0.25)

    monkeypatch.setattr(row_stores, "measure_store", measure)
    table = np.random.default_rng(0).integers(0, 256, (100, 16), dtype=np.uint8)
    stores, bare = RowStores.remote(0), memory_rows(table, None)
    ids = np.array([3, 3, 7, 3, 99])
    for layer in (1, 2):
        store = stores.of_others("ab" * 32, layer, bare)
        assert (store is not bare) is pays
        out = np.zeros((5, 16), np.uint8)
        gather_of(store)(ids, out)
        np.testing.assert_array_equal(out, table[ids])
    assert measured == [bare]
    assert stores.decisions["remote"].pays is pays
