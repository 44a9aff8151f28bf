"""Qwen2 and Qwen3: tiny random models, the same mechanism, against the explicit forward with the same memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle.contract import Fusion, RowLayout
from treadle.contract.families import demo_model
from treadle.nn.token_map import compressed_token_map, token_map_digest
from treadle.vllm import MemoryConfig

HIDDEN, LAYERS, VOCAB = 64, 4, 256


def made(folder: Path, kind: str) -> Path:
    """A random model as transformers writes it, whose tokens are bytes."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=96,
        vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 or name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.BPE(vocab={one: place for place, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_answers_are_those_of_the_explicit_forward(
    kind: str, engines: Callable[..., Any], explicit_of: Callable[..., Any], pool: Any, tmp_path: Path
) -> None:
    folder, name = made(tmp_path / kind, kind), f"tiny-{kind.lower()}"
    token_map, size = compressed_token_map(folder / "tokenizer.json")
    template = demo_model(
        name, layers=(0, 2), token_map=token_map_digest(token_map), compressed_vocab_size=size, pad_id=0, prime_base=101, heads=2,
        row=RowLayout(32, 16, "bf16"), fusion=Fusion("demo"),
    )  # fmt: skip
    with pool.client() as client:
        client.load_random(template, token_map)
    config = MemoryConfig(engram_pool=pool.address, fusion="on", wait_seconds_max=10.0)
    engine = engines(
        folder, config, skip_tokenizer_init=True, max_model_len=200, max_num_batched_tokens=32, kv_cache_memory_bytes=8 << 20
    )
    choice = f"{name}@{pool.current[name]}"
    prompts = [np.random.default_rng(seed).integers(1, VOCAB, 75).tolist() for seed in (1, 2)]
    for cached in (0, 64):
        fused, plain = engine.say((prompts[0], choice), (prompts[1], "none"))
        assert fused.cached == plain.cached == cached
        fused.same_as(explicit_of(folder, name, prompts[0], np.ones(75, dtype=bool), fused.tokens))
        plain.same_as(explicit_of(folder, None, prompts[1], np.ones(75, dtype=bool), plain.tokens))
    shadowless = explicit_of(folder, None, prompts[0], np.ones(75, dtype=bool), fused.tokens)
    assert max(abs(a - b) for a, b in zip(fused.logprobs, shadowless.logprobs, strict=True)) > 1e-3
