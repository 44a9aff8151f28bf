"""`treadle bench memories` on a model of a few thousand weights: the whole path, but none of the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle_bench.memories import MANY, MEMORIES, ONE, VARIANTS, measure

HIDDEN, LAYERS, VOCABULARY = 32, 15, 40_000  # made-up prompts reach to token 40,000; memories sit at layers 1 and 14


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A random Llama with as many layers and tokens as the benchmark needs, and nothing more."""
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": weight(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
        weights |= {f"{at}self_attn.{name}_proj.weight": weight(HIDDEN, HIDDEN) for name in "qkvo"}
        weights |= {f"{at}mlp.{name}_proj.weight": weight(HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": HIDDEN, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={f"w{number}": number for number in range(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.slow
def test_every_variant_is_measured_beside_one_memory_and_what_adding_one_costs(model_folder: Path) -> None:
    rows, goals = measure(quick=True, transport="mapped", model_dir=model_folder)
    for phase in ("prefill", "decode"):
        measured = {row.name: row for row in rows if row.params.get("phase") == phase}
        assert set(measured) == set(VARIANTS)
        assert measured[MANY].baseline == ONE
        assert measured[MANY].ratio is not None
        assert all(row.params["batch"] == MEMORIES for row in measured.values())
    pool, _ = (row for row in rows if row.unit == "MB")
    assert pool.n == MEMORIES
    assert pool.median > pool.params["rows_MB"]
    assert [goal.at_least for goal in goals] == [True, True, False, False]  # both phases, and bytes of pool and worker
