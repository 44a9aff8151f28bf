"""Clustering: seeded, of unit keys, and without lost clusters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize(("different", "entries"), [(200, 20), (200, 150), (30, 50)])
def test_clustering_begins_at_the_first_different_keys_of_a_drawn_order(different: int, entries: int) -> None:
    keys = unit(torch.randn(different, 8, generator=torch.Generator().manual_seed(4))).repeat(4, 1)
    order = np.random.default_rng((7, 1)).permutation(len(keys))
    _, first = np.unique(keys.numpy()[order], axis=0, return_index=True)
    chosen = np.sort(first)[:entries]
    again = np.setdiff1d(np.arange(len(order)), chosen)[: entries - len(chosen)]
    assert torch.equal(fit_centroids(keys, entries, 0, (7, 1)), keys[order[np.concatenate((chosen, again))]])


def test_many_entries_are_compared_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, centroids = blobs(50, 9)[0], blobs(40, 40)[0]
    index, cosine = assign(keys, centroids)
    monkeypatch.setattr("asm_store.building.clustering.PRODUCT_NUMBERS", 90)
    in_pieces, of_pieces = assign(keys, centroids)
    assert torch.equal(in_pieces, index)
    torch.testing.assert_close(of_pieces, cosine)


def test_a_product_with_many_entries_takes_no_more_memory_than_one_with_few() -> None:
    keys, centroids = blobs(4096, 10)[0], blobs(16384, 10)[0]
    assert extra_bytes(lambda: assign(keys, centroids)) < 96 << 20  # all at once: 256 MiB


def test_drawing_the_first_entries_copies_a_few_keys_and_not_all() -> None:
    keys = unit(torch.randn(48 << 12, 64, generator=torch.Generator().manual_seed(6)))  # 48 MiB
    assert extra_bytes(lambda: fit_centroids(keys, 256, 0, (1,))) < 32 << 20


def extra_bytes(work: Callable[[], object]) -> int:
    """What `work` takes at its peak beside what is there."""
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    return memory_bytes("VmHWM") - before


def memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


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
