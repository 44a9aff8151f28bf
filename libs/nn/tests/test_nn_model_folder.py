"""What is read from a model folder, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle.nn.config import ModelConfig
from treadle.nn.linear import Linear
from treadle.nn.model import CausalLM

PLAIN = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip


def test_the_small_models_configuration(smollm2_folder: Path) -> None:
    config = ModelConfig.from_folder(smollm2_folder)
    assert (config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim) == (576, 30, 9, 3, 64)
    assert (config.intermediate, config.vocab, config.positions_max, config.rope_theta) == (1536, 49152, 8192, 100_000.0)
    assert config.tied
    assert config.eos_token_ids == (2,)
    assert config.kv_values_per_token == 11_520


def test_absent_keys_take_the_values_that_old_folders_mean() -> None:
    config = ModelConfig.from_json(PLAIN)
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.rope_scaling) == (4, 16, 10_000.0, None)
    assert not config.tied
    assert config.eos_token_ids == ()


def test_rope_is_read_in_its_old_and_in_its_new_form() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = ModelConfig.from_json(PLAIN | {"rope_theta": 5e5, "rope_scaling": llama3 | {"type": "llama3"}})
    new = ModelConfig.from_json(PLAIN | {"rope_parameters": llama3 | {"rope_type": "llama3", "rope_theta": 5e5}})
    assert old == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling is not None


def test_generation_config_names_the_end_tokens_first(make_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"eos_token_id": 5}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7, 8)
    assert ModelConfig.from_folder(make_tiny("qwen3")).eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "num_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "use_sliding_window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_the_forward_does_not_compute_is_refused_by_its_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{key}:"):
        ModelConfig.from_json(PLAIN | change)


def test_a_sliding_window_that_is_switched_off_does_not_matter() -> None:
    ModelConfig.from_json(
        PLAIN | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    )


def test_sharded_and_single_files_give_the_same_model(make_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    sharded = make_tiny("qwen3")
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(names) > 1
    save_file(
        {name: tensor for shard in names for name, tensor in load_file(sharded / shard).items()}, tmp_path / "model.safetensors"
    )
    shutil.copy(sharded / "config.json", tmp_path)
    one, many = CausalLM.load(tmp_path), CausalLM.load(sharded)
    hidden = [model.forward(torch.arange(9), torch.arange(9), [0, 9], [model.new_kv()]) for model in (one, many)]
    assert torch.equal(*hidden)


def test_broken_folders_are_refused_with_what_is_wrong(make_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    source = make_tiny("qwen2")
    with pytest.raises(NotFound, match=r"config\.json"):
        CausalLM.load(tmp_path)
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(NotFound, match="neither"):
        CausalLM.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      torn")
    with pytest.raises(DataLoss, match="not a whole safetensors file"):
        CausalLM.load(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"no tensor 'model\.embed_tokens\.weight'"):
        CausalLM.load(tmp_path)
    save_file({"model.embed_tokens.weight": torch.ones(3, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"embed_tokens.weight is torch.float32 \[3, 64\]"):
        CausalLM.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataLoss, match="not JSON"):
        CausalLM.load(tmp_path)


def test_an_index_may_only_name_files_beside_it(make_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(make_tiny("qwen2") / "config.json", tmp_path)
    for name in ("../elsewhere.safetensors", "absent.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(NotFound, match="not in its folder"):
            CausalLM.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DataLoss, match="index"):
        CausalLM.load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 40])
def test_a_packed_product_equals_the_plain_one_for_any_number_of_rows(rows: int, stored: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(*shape, generator=random) for shape in ((70, 33), (70,), (rows, 33)))
    weight = weight.to(stored).to(torch.float32)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.T + bias, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(Linear(weight)(x), x @ weight.T, atol=1e-4, rtol=1e-5)


def test_a_row_of_a_batch_gets_what_it_gets_in_any_other() -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(70, 33, generator=random).to(torch.bfloat16).to(torch.float32), torch.randn(200, 33, generator=random)
    product = Linear(weight)
    whole, exact = product(x), torch.backends.cpu.get_cpu_capability() == "AVX2"
    for rows in range(1, len(x)):
        torch.testing.assert_close(product(x[:rows]), whole[:rows], atol=0.0 if exact else 1e-5, rtol=0.0)
