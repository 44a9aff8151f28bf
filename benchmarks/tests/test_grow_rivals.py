import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.contract.errors import InvalidArgument
from treadle.nn.config import ModelConfig
from treadle_bench.grow import lora_run
from treadle_bench.grow.lora_run import rank_for
from treadle_bench.grow.lora_script import asked, data_digest, steps_of
from treadle_bench.grow.mixture import fit_weights, mixed_nll
from treadle_bench.grow.ngram import CONTEXT_BYTES, ENTRY_BYTES, FIRST_BYTES, NgramModel


def some_text(blocks: int = 40, length: int = 64, vocabulary: int = 30) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Tokens that follow from the one before four times out of five."""
    draw = np.random.default_rng(5)
    text = draw.integers(0, vocabulary, size=(blocks, length))
    for place in range(1, length):
        follows = draw.random(blocks) < 0.8
        text[:, place] = np.where(follows, (text[:, place - 1] * 7 + 3) % vocabulary, text[:, place])
    return text


def test_a_bigram_model_of_four_tokens_is_what_the_formula_says() -> None:
    # Text 0 1 0 2. Left contexts: token 0 has a block's start and 1, tokens 1 and 2 have 0; too little text to estimate
    # discounts, so those of counts 1, 2, 3+ are 0.5, 1, 1.5.
    model = NgramModel.count(np.array([[0, 1, 0, 2]]), 3, 2)
    single = [(2 - 1) / 4 + 0.5 / 3, 0.5 / 4 + 0.5 / 3, 0.5 / 4 + 0.5 / 3]
    after_0 = [0.5 * single[0], 0.5 / 2 + 0.5 * single[1], 0.5 / 2 + 0.5 * single[2]]
    np.testing.assert_allclose(model.distribution(np.array([], dtype=np.int64)), single)
    np.testing.assert_allclose(model.distribution(np.array([0])), after_0)
    np.testing.assert_allclose(model.distribution(np.array([2])), single)  # nothing was seen behind 2
    probabilities, matched = model.probabilities(np.array([[0, 1, 1], [2, 0, 0]]))
    np.testing.assert_allclose(probabilities, [[after_0[1], 0.5 * single[1]], [single[0], after_0[0]]])
    assert matched.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_every_context_s_probabilities_sum_to_one_whole_and_pruned(order: int, share: float) -> None:
    text = some_text()
    model = NgramModel.count(text, 30, order)
    fitted = model.pruned(max(int(model.bytes * share), 30 * (ENTRY_BYTES + FIRST_BYTES + CONTEXT_BYTES)))
    histories = [text[number, :length] for number, length in enumerate((0, 1, 2, 3, 4, 7))] + [np.array([29, 29, 29, 29])]
    for history in histories:
        distribution = fitted.distribution(history)
        assert distribution.sum() == pytest.approx(1.0, abs=1e-9)
        assert (distribution > 0).all()


def test_a_token_s_probability_is_that_of_the_distribution_behind_its_history() -> None:
    text = some_text()
    model = NgramModel.count(text, 30, 4)
    probabilities, _ = model.probabilities(text[:3, :12])
    for block in range(3):
        for place in range(1, 12):
            alone = model.distribution(text[block, :place])[text[block, place]]
            assert probabilities[block, place - 1] == pytest.approx(alone, rel=1e-12)


def test_pruning_fits_its_bytes_and_loses_little_first() -> None:
    text = some_text(blocks=200)
    train, held = text[:180], text[180:]
    whole = NgramModel.count(train, 30, 4)
    losses = [float(-np.log(whole.probabilities(held)[0]).mean())]
    for share in (0.7, 0.3):
        smaller = whole.pruned(int(whole.bytes * share))
        assert smaller.bytes <= whole.bytes * share
        losses.append(float(-np.log(smaller.probabilities(held)[0]).mean()))
    uniform = np.log(30)
    assert losses[0] < 0.75 * uniform
    assert losses[1] < losses[0] + 0.05
    assert losses[2] < 0.85 * uniform


def test_a_budget_that_holds_no_single_tokens_and_ids_out_of_range_are_refused() -> None:
    model = NgramModel.count(some_text(), 30, 2)
    with pytest.raises(InvalidArgument, match="single tokens"):
        model.pruned(50)
    with pytest.raises(InvalidArgument, match="0 to 9"):
        NgramModel.count(some_text(), 10, 2)
    with pytest.raises(InvalidArgument, match="order"):
        NgramModel.count(some_text(), 30, 0)


def test_mixture_weights_go_to_whoever_is_right_group_by_group() -> None:
    model, ngram = np.array([0.9, 0.8, 0.1, 0.1]), np.array([0.1, 0.1, 0.9, 0.8])
    group = np.array([0, 0, 2, 2])
    weights = fit_weights(model, ngram, group)
    assert weights[0] < 0.01
    assert weights[2] > 0.99
    np.testing.assert_allclose(mixed_nll(model, ngram, group, weights), -np.log([0.9, 0.8, 0.9, 0.8]), atol=0.01)
    np.testing.assert_allclose(mixed_nll(model, ngram, np.full(4, 7), weights), -np.log(model))  # never fitted: the model alone


def test_a_single_weight_is_the_one_of_greatest_likelihood() -> None:
    draw = np.random.default_rng(1)
    model, ngram, group = draw.random(500), draw.random(500), np.zeros(500, dtype=np.int64)
    best = float(mixed_nll(model, ngram, group, fit_weights(model, ngram, group)).mean())
    tried = [float(mixed_nll(model, ngram, group, np.array([weight])).mean()) for weight in np.linspace(0, 1, 101)]
    assert best <= min(tried) + 1e-6


def test_lora_s_rank_is_the_largest_that_fits() -> None:
    config = ModelConfig.from_json({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "rms_norm_eps": 1e-5, "vocab_size": 49152,
        "tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    })  # fmt: skip
    bytes_a_rank = 2 * 30 * ((576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 3)
    assert rank_for(config, 13 * bytes_a_rank) == 13
    assert rank_for(config, 14 * bytes_a_rank - 1) == 13
    assert rank_for(config, 5) == 1


def test_lora_sees_blocks_in_order_and_other_text_each_fifth_step() -> None:
    blocks, mix = torch.arange(20).view(10, 2), torch.full((3, 2), -1)
    steps = [text.flatten().tolist() for (text, _), _ in zip(steps_of(blocks, mix), range(6), strict=False)]
    assert steps[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert steps[3] == list(range(8))  # the second pass
    assert steps[4] == [-1, -1]
    assert all(not mixed for (_, mixed), _ in zip(steps_of(blocks, mix[:0]), range(12), strict=False))


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """An interpreter that trains nothing and writes a result, so that a result which was kept can be told from a new one."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen(sys.argv[sys.argv.index('--out') + 1], 'w').write(json.dumps({{'new': True}}))\n"
    )
    path.chmod(0o755)
    return path


def lora_options(folder: Path) -> dict[str, Any]:
    np.savez(folder / "data.npz", train=np.arange(12).reshape(3, 4), mix=np.zeros((1, 4), dtype=np.int64))
    return {
        "data": folder / "data.npz", "model": folder, "out": folder / "out.json", "rank": 13, "rate": 1e-3, "cpu-seconds": 90.24,
        "seed": 0,
    }  # fmt: skip


def kept_result(options: dict[str, Any]) -> dict[str, Any]:
    about = asked(options["rank"], options["rate"], options["cpu-seconds"], options["seed"], options["data"])
    return {"sets": {"validation": [1.0]}, **about}


def test_lora_is_not_trained_again_where_its_result_is_of_the_same_training(trainer: Path, tmp_path: Path) -> None:
    options = lora_options(tmp_path)
    options["out"].write_text(json.dumps(kept_result(options)))
    assert lora_run._train(trainer, options, ("validation",)) == kept_result(options)
    assert lora_run._train(trainer, options, ("held-parts",)) == {"new": True}


@pytest.mark.parametrize(("name", "other"), [("rank", 12), ("rate", 3e-3), ("cpu-seconds", 91.0), ("seed", 1)])
def test_lora_s_result_of_another_training_is_not_taken(trainer: Path, tmp_path: Path, name: str, other: float) -> None:
    options = lora_options(tmp_path)
    options["out"].write_text(json.dumps(kept_result(options | {name: other})))
    assert lora_run._train(trainer, options, ("validation",)) == {"new": True}


def test_lora_s_result_of_other_data_or_that_does_not_say_of_which_is_not_taken(trainer: Path, tmp_path: Path) -> None:
    options = lora_options(tmp_path)
    before = kept_result(options)
    np.savez(options["data"], train=np.arange(12).reshape(3, 4) + 1, mix=np.zeros((1, 4), dtype=np.int64))
    silent = {name: value for name, value in kept_result(options).items() if name != "data_digest"}
    for result in (before, silent):
        options["out"].write_text(json.dumps(result))
        assert lora_run._train(trainer, options, ("validation",)) == {"new": True}


def test_the_digest_of_lora_s_data_is_of_its_values_and_names(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    for name, arrays in {
        "one": {"train": values, "mix": values[:1]}, "same": {"mix": values[:1], "train": values},
        "renamed": {"train": values, "mixed": values[:1]}, "reshaped": {"train": values.reshape(3, 2), "mix": values[:1]},
    }.items():  # fmt: skip
        np.savez(tmp_path / f"{name}.npz", **arrays)  # type: ignore[arg-type,unused-ignore]
    one, same, renamed, reshaped = (data_digest(tmp_path / f"{name}.npz") for name in ("one", "same", "renamed", "reshaped"))
    assert one == same
    assert len({one, renamed, reshaped}) == 3
