"""Clustering: seeded, of unit keys, and without lost clusters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asm_store.building.clustering import assign, fit_centroids, unit
from asm_store.building.codebooks import filled
from asm_store.building.entries import Aggregated
from treadle.contract.errors import InvalidArgument


def blobs(count: int, around: int, width: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(keys [n, width], the directions that they lie around)"""
    draw = torch.Generator().manual_seed(seed)
    directions = unit(torch.randn(around, width, generator=draw))
    return unit(directions[torch.arange(count) % around] + 0.02 * torch.randn(count, width, generator=draw)), directions


def test_separate_groups_of_keys_each_get_a_centroid() -> None:
    keys, directions = blobs(400, 10)
    centroids = fit_centroids(keys, 40, 8, (1,))
    _, cosine = assign(directions, centroids)
    assert float(cosine.min()) > 0.99
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(40))


def test_more_iterations_fit_better() -> None:
    keys = unit(torch.randn(2000, 24, generator=torch.Generator().manual_seed(3)))
    fit = [float(assign(keys, fit_centroids(keys, 50, iterations, (5,)))[1].mean()) for iterations in (0, 1, 6)]
    assert fit[0] < fit[1] < fit[2]


def test_mini_batches_fit_nearly_as_well_as_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, _ = blobs(4000, 30, seed=2)
    whole = float(assign(keys, fit_centroids(keys, 60, 6, (5,)))[1].mean())
    monkeypatch.setattr("asm_store.building.clustering.BATCH_KEYS", 500)
    batched = fit_centroids(keys, 60, 6, (5,))
    assert float(assign(keys, batched)[1].mean()) > whole - 0.02
    assert torch.equal(batched, fit_centroids(keys, 60, 6, (5,)))


def test_the_same_seed_gives_the_same_centroids_and_another_seed_others() -> None:
    keys, _ = blobs(300, 12)
    assert torch.equal(fit_centroids(keys, 20, 3, (1, 2)), fit_centroids(keys, 20, 3, (1, 2)))
    assert not torch.equal(fit_centroids(keys, 20, 3, (1, 2)), fit_centroids(keys, 20, 3, (1, 3)))


def test_keys_that_occur_often_do_not_take_the_places_of_rare_ones() -> None:
    rare = unit(torch.randn(15, 8, generator=torch.Generator().manual_seed(1)))
    keys = torch.cat((rare[:1].repeat(500, 1), rare))
    _, cosine = assign(rare, fit_centroids(keys, 15, 0, (1,)))
    assert float(cosine.min()) > 0.9999


def test_fewer_different_keys_than_entries_still_make_all_entries() -> None:
    keys = blobs(6, 6)[0].repeat(10, 1)
    centroids = fit_centroids(keys, 20, 3, (1,))
    assert bool(centroids.isfinite().all())
    assert float(assign(keys, centroids)[1].min()) > 0.999


def test_fewer_keys_than_entries_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="10 entries need as many calibration samples, there are 4"):
        fit_centroids(blobs(4, 2)[0], 10, 2, (1,))


def test_an_entry_that_no_sample_chose_takes_its_nearest_neighbours_state() -> None:
    keys = unit(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 0.2]]))
    a, log_z = torch.arange(4.0).view(4, 1, 1), torch.tensor([[3.0], [-torch.inf], [5.0], [-torch.inf]])
    found = filled(Aggregated(keys, a, log_z, torch.tensor([2, 0, 7, 0])), keys)
    assert found.log_z.flatten().tolist() == [3.0, 5.0, 5.0, 3.0]
    assert found.a.flatten().tolist() == [0.0, 2.0, 2.0, 0.0]
    assert found.counts.tolist() == [2, 7, 7, 2]
    assert torch.equal(found.keys, keys)
