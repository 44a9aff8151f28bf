"""A few keys that stand for a whole prefix, and what entries add to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from asm_store.building.build import Build, Order
from asm_store.building.matching import (
    PRODUCT_ROWS,
    RIDGE,
    WEIGHT_MAX,
    WEIGHT_MIN,
    bounded_least_squares,
    largest_eigenvalue,
    least_squares,
    match_keys,
)
from asm_store.commands import app
from treadle.contract.dictionary import ChunkMerge, RowDtype, tensor_name
from treadle.contract.dictionary_file import TENSORS_FILE, map_tensors, read_manifest
from treadle.contract.errors import InvalidArgument
from treadle.nn.attention import attention_state
from treadle.nn.matched_keys import MATCHED_PARTS, MatchedKeys
from treadle.nn.model import CausalLM

Orders = Callable[..., Order]


def test_as_many_matched_keys_as_the_prefix_has_give_its_states() -> None:
    torch.manual_seed(0)
    keys, values, queries = torch.randn(20, 2, 8), torch.randn(20, 2, 8), torch.randn(300, 6, 8)
    a, log_z = attention_state(queries, keys, values)
    found = match_keys(queries, a, log_z, keys, 20)
    assert torch.equal(found.keys, keys.transpose(0, 1))
    torch.testing.assert_close(found.biases, torch.zeros(2, 20), rtol=0, atol=1e-3)
    asked = torch.randn(50, 6, 8)
    for mine, whole in zip(found.state(asked), attention_state(asked, keys, values), strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=0.02)


@pytest.mark.parametrize("unseen", [False, True])
def test_the_largest_eigenvalue_of_positive_products_is_never_set_too_low(unseen: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    for spread in (0.1, 1.0, 4.0):
        shares = (spread * torch.randn(400, 60, generator=draw, dtype=torch.float64)).exp()
        if unseen:
            shares[:, 7] = 0.0
        product = shares.T @ shares
        exact = float(torch.linalg.eigvalsh(product)[-1])
        assert exact * (1 - 1e-12) <= largest_eigenvalue(product) <= exact * (1 + 1e-6)


def test_few_matched_keys_come_nearer_than_the_same_keys_as_they_are() -> None:
    torch.manual_seed(1)
    keys, values, queries = torch.randn(60, 1, 8), torch.randn(60, 1, 8), torch.randn(500, 2, 8)
    found = match_keys(queries, *attention_state(queries, keys, values), keys, 12)
    asked = torch.randn(200, 2, 8)
    a, log_z = attention_state(asked, keys, values)
    kept = (keys[:, 0].unsqueeze(0) == found.keys[0].unsqueeze(1)).all(-1).nonzero()[:, 1]
    plain_a, plain_log_z = attention_state(asked, keys[kept], values[kept])
    mine_a, mine_log_z = found.state(asked)
    assert (mine_a - a).square().mean() < 0.5 * (plain_a - a).square().mean()
    assert (mine_log_z - log_z).square().mean() < 0.1 * (plain_log_z - log_z).square().mean()


def test_weights_stay_within_their_bounds() -> None:
    torch.manual_seed(0)
    matrix = torch.rand(200, 5)
    found = bounded_least_squares(matrix, matrix @ torch.tensor([0.5, 1.0, 2.0, 100.0, 0.0]))
    assert float(found.min()) >= WEIGHT_MIN * 0.999
    assert float(found.max()) <= WEIGHT_MAX * 1.001
    free = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(bounded_least_squares(matrix, matrix @ free), free, rtol=0, atol=1e-2)


def test_values_fit_as_well_as_those_of_products_in_fp64() -> None:
    draw = torch.Generator().manual_seed(5)
    shares = (6 * torch.randn(3 * PRODUCT_ROWS + 7, 40, generator=draw)).softmax(1)
    outputs = shares @ torch.randn(40, 8, generator=draw) + 0.1 * torch.randn(len(shares), 8, generator=draw)
    wide, wanted = shares.to(torch.float64), outputs.to(torch.float64)
    product = wide.T @ wide
    product += RIDGE * product.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    lost, least = (
        float((wide @ values.to(torch.float64) - wanted).square().sum())
        for values in (least_squares(shares, outputs), torch.linalg.solve(product, wide.T @ wanted))
    )
    assert lost == pytest.approx(least, rel=1e-5)


def test_entries_hold_what_matched_keys_lack(build: Orders, tmp_path: Path) -> None:
    """Far less than whole states, where the matched keys are most of the prefix."""
    fields = {"dtype": RowDtype.F32, "entries": 32}
    whole, rest = (build(out=tmp_path / str(count), matched_keys=count, **fields) for count in (0, 40))
    for layer in range(3):
        sizes = [
            np.abs(map_tensors(each.out / TENSORS_FILE, read_manifest(each.out))[tensor_name(layer, "states")]).mean()
            for each in (whole, rest)
        ]
        assert sizes[1] < 0.3 * sizes[0]


def test_a_mean_over_chunks_is_seen_by_matched_keys_too(build: Orders, tmp_path: Path) -> None:
    fields = {"chunk_tokens": 20, "dtype": RowDtype.F32, "matched_keys": 40}
    folders = {merge: build(out=tmp_path / merge, chunk_merge=merge, **fields).out for merge in ChunkMerge}
    tensors = {merge: map_tensors(out / TENSORS_FILE, read_manifest(out)) for merge, out in folders.items()}
    asked = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        summed, averaged = (
            MatchedKeys.at_rest(*(tensors[merge][tensor_name(layer, part)] for part in MATCHED_PARTS)).state(asked)
            for merge in (ChunkMerge.SUM, ChunkMerge.MEAN)
        )
        torch.testing.assert_close(summed[1] - math.log(2), averaged[1], rtol=0, atol=0.02)
        torch.testing.assert_close(summed[0], averaged[0], rtol=0, atol=0.02)


def test_more_matched_keys_than_tokens_and_a_chunk_for_them_are_refused(
    order: Orders, build: Orders, tiny: CausalLM, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="41 of a prefix of 40 tokens"):
        Build(order(out=tmp_path / "many", matched_keys=41), model=tiny)
    base = build(matched_keys=4)
    chunk = replace(order(out=tmp_path / "chunk", base=base.out), recipe=base.recipe)
    with pytest.raises(InvalidArgument, match="--matched-keys 0"):
        Build(chunk, model=tiny)


def test_the_command_takes_a_quarter_of_the_prefix_unless_told_otherwise(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prefix.txt").write_text("rules " * 12)
    (tmp_path / "traces.txt").write_text("\n".join(f"what about {number}?" for number in range(30)))
    said = ["--name", "r", "--entries", "16", "--model", str(tiny_folder)]
    said += ["--prefix", str(tmp_path / "prefix.txt"), "--traces", str(tmp_path / "traces.txt")]
    cases: tuple[tuple[list[str], int], ...] = (
        ([], 72 // 4),
        (["--matched-keys", "3"], 3),
        (["--matched-keys", "0"], 0),
        (["--positions", "from-zero"], 0),
    )
    for number, (options, count) in enumerate(cases):
        out = tmp_path / str(number)
        ran = CliRunner().invoke(app, ["build", *said, "--out", str(out), *options])
        assert ran.exit_code == 0, ran.output
        assert read_manifest(out).settings.matched_keys == count
