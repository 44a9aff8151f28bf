"""A tiny model with a tokenizer of bytes, made in a moment, and orders on it; the real small model where it must be."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: fork-join on a busy machine is slower than one thread

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asm_store.building.build import Build, Order
from asm_store.building.recipe import Recipe
from asm_store.building.traces import Trace
from treadle.contract.dictionary import DictionarySettings
from treadle.nn.model import CausalLM
from treadle.nn.model_fetch import fetch

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 32, 3, 4, 2, 8, 48, 264
END = 256
PREFIX_TOKENS = 40
ENTRIES = 32

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers, four query heads in two groups, whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    draw = torch.Generator().manual_seed(7)

    def weight(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * scale

    weights = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN, scale=1.0), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("input", "post_attention")}
        shapes = {
            "self_attn.q": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate": (INTERMEDIATE, HIDDEN), "mlp.up": (INTERMEDIATE, HIDDEN), "mlp.down": (HIDDEN, INTERMEDIATE),
        }  # fmt: skip
        weights |= {f"{at}{name}_proj.weight": weight(*shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> CausalLM:
    return CausalLM.load(tiny_folder)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> CausalLM:
    return CausalLM.load(smollm2_folder)


def some_tokens(count: int, seed: int) -> Trace:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 200, count))


def some_traces(count: int = 40, seed: int = 1) -> tuple[Trace, ...]:
    lengths = np.random.default_rng(seed).integers(5, 20, count)
    return tuple(some_tokens(int(length), 1000 * seed + number) for number, length in enumerate(lengths))


def tiny_recipe(**changes: Any) -> Recipe:
    """Recipe fields, and settings' by their own names."""
    ours = {name: changes.pop(name) for name in tuple(changes) if name in Recipe.__dataclass_fields__}
    return Recipe(**({"name": "tiny"} | ours), settings=DictionarySettings(**({"entries": ENTRIES} | changes)))


@pytest.fixture
def order(tiny_folder: Path, tmp_path: Path) -> Callable[..., Order]:
    """Makes orders on the tiny model: fields of the order, the recipe or its settings by name."""

    def make(**changes: Any) -> Order:
        ours = {name: changes.pop(name) for name in tuple(changes) if name in Order.__dataclass_fields__}
        if changes.get("self_traces"):
            ours.setdefault("traces", ())
        fields: dict[str, Any] = {
            "recipe": tiny_recipe(**changes), "model_folder": tiny_folder, "model_name": "tiny", "prefix": some_tokens(PREFIX_TOKENS, 0),
            "traces": some_traces(), "out": tmp_path / "out",
        }  # fmt: skip
        return Order(**(fields | ours))

    return make


@pytest.fixture
def build(order: Callable[..., Order], tiny: CausalLM) -> Callable[..., Order]:
    """Builds such an order; the order."""

    def make(**changes: Any) -> Order:
        wanted = order(**changes)
        Build(wanted, model=tiny).run()
        return wanted

    return make


def build_of(folder: str, out: str) -> Order:
    """The order that the fixture makes, for another process."""
    return Order(tiny_recipe(), Path(folder), "tiny", some_tokens(PREFIX_TOKENS, 0), some_traces(), Path(out))
