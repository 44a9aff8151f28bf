"""The models that the tests of this room run on: the real small one, and tiny random ones made by transformers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: fork-join on a busy machine is slower than one thread

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.nn.model import CausalLM
from treadle.nn.model_fetch import fetch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says at import is not ours to mend
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),  # heads x head_dim is not hidden
}


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> CausalLM:
    return CausalLM.load(smollm2_folder)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function: name in TINY -> a model folder with random weights, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            family, settings = TINY[name]
            save_random(family, SIZES | settings, made[name])
        return made[name]

    return make


def save_random(family: str, settings: dict[str, Any], folder: Path) -> None:
    """Save a model with every weight random, norms and biases too, so that a forgotten one shows; in several shards."""
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        spread = torch.randn(weight.shape, generator=draw) * (0.15 if weight.ndim == 2 else 0.3)
        weight.data = 1.0 + spread if "norm" in name else spread
    model.save_pretrained(folder, max_shard_size="150KB")


@pytest.fixture(scope="session")
def tiny(make_tiny: Callable[[str], Path]) -> CausalLM:
    return CausalLM.load(make_tiny("llama"))


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, list[int]], torch.Tensor]:
    """Returns a function: (folder, ids) -> log-probabilities [T, vocab] by transformers in fp32."""
    models: dict[Path, Any] = {}

    def log_probs(folder: Path, ids: list[int]) -> torch.Tensor:
        if folder not in models:
            models[folder] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits: torch.Tensor = models[folder](torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)

    return log_probs
