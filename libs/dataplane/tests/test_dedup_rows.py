"""Batches without repeats: the same rows either way, each fetched once; whether it is used is measured."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import RowOutOfRange
from treadle.dataplane import IMPLEMENTATION
from treadle.dataplane.dedup import PROBE_ROWS, gather_of, measure_dedup, measure_store, memory_rows, without_repeats
from treadle.dataplane.disk import DiskReaders, disk_rows

native = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")
TABLE = np.random.default_rng(0).integers(0, 256, (20_000, 48), dtype=np.uint8)


class SlowTier:
    """A table of which each row takes so long on a clock of its own. interrupted: the number of a fetch that lost its core for a second."""

    def __init__(self, row_nanoseconds: int, interrupted: int = -1) -> None:
        self._row_nanoseconds, self._interrupted = row_nanoseconds, interrupted
        self.now_ns = self.fetches = self.fetched = 0

    def clock(self) -> int:
        return self.now_ns

    def plain(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        self.now_ns += self._row_nanoseconds * len(ids) + (10**9 if self.fetches == self._interrupted else 0)
        self.fetches += 1
        self.fetched += len(ids)
        out[:] = TABLE[ids]

    def once(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        unique, inverse = np.unique(ids, return_inverse=True)
        fetched = np.empty((len(unique), 48), dtype=np.uint8)
        self.plain(unique, fetched)
        out[:] = fetched[inverse]


@native
@pytest.mark.parametrize("count", [0, 1, 300, 9_000])
@pytest.mark.parametrize("different", [50, 20_000])
def test_rows_are_the_same_with_and_without_repeats(tmp_path: Path, count: int, different: int) -> None:
    (tmp_path / "table").write_bytes(TABLE.tobytes())
    descriptor = os.open(tmp_path / "table", os.O_RDONLY)
    disk = disk_rows(descriptor, 0, TABLE.shape[0], TABLE.shape[1], DiskReaders(2))
    os.close(descriptor)
    ids = np.random.default_rng(count).integers(0, different, count)
    for store in (disk, memory_rows(TABLE, None)):
        for way in (store, without_repeats(store)):
            out = np.zeros((count, 48), dtype=np.uint8)
            gather_of(way)(ids, out)
            np.testing.assert_array_equal(out, TABLE[ids])
            with pytest.raises(RowOutOfRange):
                gather_of(way)(np.array([20_000]), np.zeros((1, 48), dtype=np.uint8))


@native
def test_memory_is_measured_as_too_fast_for_it() -> None:
    decision = measure_store(memory_rows(TABLE, None))
    assert not decision.pays
    assert 0 < decision.plain_nanoseconds < decision.dedup_nanoseconds * 1.2


@pytest.mark.parametrize(("repeats", "pays"), [(0.5, True), (0.0, False)])
def test_a_slow_tier_pays_where_a_batch_repeats(repeats: float, pays: bool) -> None:
    tier = SlowTier(20_000)
    decision = measure_dedup(tier.plain, tier.once, first=0, last=20_000, row_bytes=48, repeats=repeats, clock=tier.clock)
    assert decision.pays is pays
    assert decision.plain_nanoseconds == pytest.approx(20_000)


@pytest.mark.parametrize("interrupted", range(4))
def test_a_moment_without_a_core_decides_nothing(interrupted: int) -> None:
    for repeats, pays in ((0.5, True), (0.0, False)):
        tier = SlowTier(20_000, interrupted)
        assert (
            measure_dedup(tier.plain, tier.once, first=0, last=20_000, row_bytes=48, repeats=repeats, clock=tier.clock).pays is pays
        )


def test_a_measurement_is_bounded_however_slow_the_tier() -> None:
    tier = SlowTier(200_000)
    assert measure_dedup(tier.plain, tier.once, first=0, last=20_000, row_bytes=48, repeats=0.5, clock=tier.clock).pays
    assert tier.fetched <= 4 * PROBE_ROWS
