"""Learning: rows and projections move as the recipe says, the same for the same seed, killed or not."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_pool.growing import checkpoint
from engram_pool.growing.corpus import Corpus
from engram_pool.growing.evaluation import in_precision, randomised, score, shuffled
from engram_pool.growing.grower import Grower
from engram_pool.growing.memory import Memory
from engram_pool.growing.optimiser import Adam, RowAdagrad
from engram_pool.growing.recipe import Recipe, schedule
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument
from treadle.nn.frozen import FrozenLM

Fresh = Callable[[Recipe], Memory]


def test_a_memory_that_has_learnt_nothing_changes_no_bit(model: FrozenLM, corpus: Corpus, fresh: Fresh, recipe: Recipe) -> None:
    memory = fresh(recipe)
    np.testing.assert_array_equal(score(model, corpus.held_out[:4], memory).nats, score(model, corpus.held_out[:4]).nats)


def test_held_out_text_gets_likelier_and_wrong_rows_lose_it(model: FrozenLM, corpus: Corpus, grown: Grower) -> None:
    off = score(model, corpus.held_out).perplexity
    on = score(model, corpus.held_out, grown.memory).perplexity
    assert on < 0.8 * off
    for wrong in (shuffled(grown.memory), randomised(grown.memory)):
        assert score(model, corpus.held_out, wrong).perplexity > 1.1 * on


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4"])
def test_rows_of_few_bits_keep_the_gain(model: FrozenLM, corpus: Corpus, grown: Grower, precision: str) -> None:
    full = score(model, corpus.held_out, grown.memory).perplexity
    assert score(model, corpus.held_out, in_precision(grown.memory, precision)).perplexity == pytest.approx(full, rel=0.02)


def test_every_token_of_the_budget_is_learnt_from_once(grown: Grower, corpus: Corpus) -> None:
    blocks = np.concatenate([chosen for mix, chosen in grown.plan if not mix])
    assert sorted(blocks.tolist()) == list(range(len(corpus.train)))
    assert grown.tokens_done == corpus.train.size
    mixed = [mix for mix, _ in grown.plan]
    assert mixed[2]
    assert not mixed[0]
    assert sum(mixed) == pytest.approx(len(mixed) / 3, abs=1)


def test_the_same_seed_gives_the_same_bits_and_another_one_others(
    model: FrozenLM, corpus: Corpus, fresh: Fresh, recipe: Recipe
) -> None:
    def after(chosen: Recipe, steps: int) -> dict[str, torch.Tensor]:
        grower = Grower(model, fresh(chosen), corpus, chosen)
        for report in grower.run():
            if report.step == steps:
                break
        return grower.state()

    first, again, other = after(recipe, 6), after(recipe, 6), after(replace(recipe, seed=1), 6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.rows"], other["1.rows"])


def test_a_killed_run_goes_on_to_the_same_bits(
    model: FrozenLM, corpus: Corpus, fresh: Fresh, recipe: Recipe, tmp_path: Path
) -> None:
    whole = Grower(model, fresh(recipe), corpus, recipe)
    reports = whole.run()
    for _ in range(5):
        next(reports)
    checkpoint.save(tmp_path / "at.safetensors", whole.state(), {"text": "a"})
    for _ in range(4):
        next(reports)
    second = Grower(model, fresh(recipe), corpus, recipe)
    second.restore(checkpoint.load(tmp_path / "at.safetensors", {"text": "a"}))
    further = second.run()
    for _ in range(4):
        next(further)
    state = whole.state()
    assert all(torch.equal(state[name], value) for name, value in second.state().items())


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.safetensors", {"steps": torch.tensor(1)}, {"text": "a", "recipe": "r"})
    with pytest.raises(FingerprintMismatch, match="text"):
        checkpoint.load(tmp_path / "a.safetensors", {"text": "b", "recipe": "r"})
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:-3])
    with pytest.raises(DataLoss, match=r"a\.safetensors.*delete it"):
        checkpoint.load(tmp_path / "a.safetensors")


def test_with_projections_frozen_only_rows_move(model: FrozenLM, corpus: Corpus, fresh: Fresh, recipe: Recipe) -> None:
    rows_only = replace(recipe, projection_rate=0.0, mix_every=0)
    memory = fresh(rows_only)
    before = [tensor.clone() for part in memory.layers.values() for tensor in part.projections]
    grower = Grower(model, memory, corpus, rows_only)
    next(grower.run())
    after = [tensor for part in memory.layers.values() for tensor in part.projections]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert bool(memory.layers[1].rows.any())


def test_a_step_on_other_text_moves_no_row(model: FrozenLM, corpus: Corpus, fresh: Fresh, recipe: Recipe) -> None:
    grower = Grower(model, fresh(recipe), corpus, recipe)
    for report in grower.run():
        if report.mix:
            break
        rows = grower.memory.layers[1].rows.clone()
        weights = grower.memory.layers[1].wkv.clone()
    assert torch.equal(rows, grower.memory.layers[1].rows)
    assert not torch.equal(weights, grower.memory.layers[1].wkv)


def test_row_adagrad_sums_the_gradients_of_a_row_and_divides_by_its_history() -> None:
    rows = torch.zeros(4, 2)
    adagrad = RowAdagrad(rows, rate=0.1, floor=4.0)
    ids, grad = torch.tensor([[1, 3], [1, 2]]), torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 3.0, 3.0]])
    adagrad.step(ids, grad, 1.0)
    mean = (4.0 + 9.0) / 2  # of rows 1 (gradient 2, 2) and 2; row 3 had none and stays out
    assert rows[1].tolist() == pytest.approx([-0.1 * 2 / math.sqrt(4 + 4 * mean)] * 2)
    assert rows[2].tolist() == pytest.approx([-0.1 * 3 / math.sqrt(9 + 4 * mean)] * 2)
    assert not rows[3].any()
    assert not rows[0].any()


def test_adam_is_torchs_adam() -> None:
    ours, theirs = torch.ones(5), torch.ones(5, requires_grad=True)
    mine, reference = Adam([ours], 1e-3), torch.optim.Adam([theirs], lr=1e-3, betas=(0.9, 0.98))
    for step in range(4):
        grad = torch.linspace(-1, 1, 5) * (step + 1)
        mine.step([grad], 1.0)
        theirs.grad = grad.clone()
        reference.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_rates_are_constant_for_half_of_the_way_and_end_at_a_tenth() -> None:
    assert [schedule(0.0), schedule(0.49), schedule(0.75), schedule(1.0)] == pytest.approx([1.0, 1.0, 0.55, 0.1])


@pytest.mark.parametrize(
    ("field", "value"), [("layers", (3, 1)), ("orders", (2, 4)), ("dim", 1), ("row_rate", 0.0), ("mix_every", 1), ("passes", 0)]
)
def test_a_recipe_that_makes_no_sense_is_refused_by_its_field(field: str, value: object, recipe: Recipe) -> None:
    with pytest.raises(InvalidArgument, match=field):
        replace(recipe, **{field: value})  # type: ignore[arg-type]
