"""Entries: sums that join in any order, and what they come to."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from asm_store.building.entries import Entries, new_entries
from treadle.contract.dictionary import Aggregation

ENTRIES, HEADS, HEAD_DIM = 8, 3, 4
Samples = tuple[Tensor, Tensor, Tensor, Tensor]


def samples(count: int, seed: int, spread: float = 8.0) -> Samples:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.nn.functional.normalize(torch.randn(count, HEADS * HEAD_DIM, generator=draw), dim=-1)
    return (
        torch.randint(0, ENTRIES, (count,), generator=draw), keys, torch.randn(count, HEADS, HEAD_DIM, generator=draw),
        torch.randn(count, HEADS, generator=draw) * spread,
    )  # fmt: skip


def added(aggregation: Aggregation, of: Samples, rows: slice = slice(None)) -> Entries:
    entries = new_entries(aggregation, ENTRIES, HEADS, HEAD_DIM)
    entries.add(*(part[rows] for part in of))
    return entries


def assert_same(one: Entries, other: Entries) -> None:
    mine, theirs = one.aggregated(), other.aggregated()
    assert torch.equal(mine.counts, theirs.counts)
    for name in ("keys", "a", "log_z"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("shards", [1, 2, 7, 64])
def test_shards_merged_in_any_order_give_the_same_entries(aggregation: Aggregation, shards: int) -> None:
    for seed in range(5):
        of = samples(200, seed, spread=10.0 ** (seed - 1))
        cuts = np.linspace(0, 200, shards + 1).astype(int)
        parts = [slice(int(a), int(b)) for a, b in pairwise(cuts)]
        np.random.default_rng(seed).shuffle(parts)
        merged = new_entries(aggregation, ENTRIES, HEADS, HEAD_DIM)
        for part in parts:
            merged.merge(added(aggregation, of, part))
        assert_same(merged, added(aggregation, of))


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_merging_is_associative_and_commutative(aggregation: Aggregation) -> None:
    parts = [samples(50, seed, spread=30.0) for seed in (1, 2, 3)]

    def merged(order: tuple[int, ...], *, right: bool) -> Entries:
        a, b, c = (added(aggregation, parts[place]) for place in order)
        if right:
            b.merge(c)
            a.merge(b)
        else:
            a.merge(b)
            a.merge(c)
        return a

    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        assert_same(merged(order, right=True), merged((0, 1, 2), right=False))


def test_eq5_weighs_outputs_by_z_and_takes_the_mean_of_z() -> None:
    index, keys, a, log_z = samples(60, 4, spread=1.0)
    found = added(Aggregation.EQ5, (index, keys, a, log_z)).aggregated()
    for entry in range(ENTRIES):
        mine = index == entry
        z = log_z[mine].double().exp()
        torch.testing.assert_close(found.log_z[entry].double(), z.mean(0).log(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found.a[entry].double(), (z.unsqueeze(-1) * a[mine]).sum(0) / z.sum(0).unsqueeze(-1), rtol=1e-5, atol=1e-5
        )
        mean = keys[mine].mean(0)
        torch.testing.assert_close(found.keys[entry], mean / mean.norm(), rtol=1e-5, atol=1e-6)


def test_geo_takes_plain_means() -> None:
    index, keys, a, log_z = samples(60, 5)
    found = added(Aggregation.GEO, (index, keys, a, log_z)).aggregated()
    for entry in range(ENTRIES):
        torch.testing.assert_close(found.log_z[entry], log_z[index == entry].mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.a[entry], a[index == entry].mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_extreme_logarithms_leave_no_nan(aggregation: Aggregation, level: float) -> None:
    index, keys, a, log_z = samples(40, 6)
    index = index % (ENTRIES - 1)  # the last one stays empty
    entries = added(aggregation, (index, keys, a, log_z + level))
    entries.merge(added(aggregation, (index, keys, a, log_z - level)))
    entries.merge(new_entries(aggregation, ENTRIES, HEADS, HEAD_DIM))
    found = entries.aggregated()
    assert not any(bool(part.isnan().any()) for part in (found.keys, found.a, found.log_z))
    assert bool(found.log_z[-1].isneginf().all())
    assert found.counts[-1] == 0
    assert bool(found.log_z[:-1].isfinite().all())
