"""The models that the tests of this room run on: the real small one, and tiny random ones made by transformers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: fork-join on a busy machine is slower than one thread

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    Prefix,
    RowDtype,
    tensor_name,
)  # fmt: skip
from treadle.contract.dictionary_file import tensor_info
from treadle.kernels import entry_lists
from treadle.nn.lookup_keys import join_heads, lookup_keys, lookup_queries, whitening_of
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


@dataclass
class Collected:
    """A PrefixCollector that keeps everything: layer -> queries, rotated, a, log_z of all rows of all steps."""

    layers: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def take(self, layer: int, queries: Tensor, rotated: Tensor, a: Tensor, log_z: Tensor) -> None:
        new = (queries.clone(), rotated.clone(), a.clone(), log_z.clone())
        old = self.layers.get(layer)
        self.layers[layer] = new if old is None else tuple(map(torch.cat, zip(old, new, strict=True)))  # type: ignore[assignment]  # four again


Tensors = dict[str, NDArray[Any]]


@pytest.fixture(scope="session")
def collected() -> type[Collected]:
    return Collected


@pytest.fixture(scope="session")
def make_dictionary() -> Callable[..., tuple[Dictionary, Tensors]]:
    """Returns a function: (model, states of layers, tokens of the prefix, settings) -> a dictionary with an entry for every query."""

    def make(
        model: CausalLM, states: Collected, prefix_tokens: int, quantiles: tuple[float, float] = (0.5, 1.0), **settings: Any
    ) -> tuple[Dictionary, Tensors]:
        lookups = model.config.heads // model.config.kv_heads // settings.get("heads_joined", 1)
        rows = len(next(iter(states.layers.values()))[0])
        chosen = DictionarySettings(entries=rows * lookups, **settings)
        tensors: Tensors = {}
        for layer, taken in states.layers.items():
            for name, values in layer_tensors(model, taken, chosen).items():
                tensors[tensor_name(layer, name)] = values
            spread = np.linspace(*quantiles, QUANTILES, dtype=np.float32)
            books = tensors[tensor_name(layer, "keys")].shape[0]
            tensors[tensor_name(layer, "cosine_quantiles")] = np.tile(spread, (books, 1))
        digest, config = "0" * 64, model.config
        dtypes = {"f": "F32", "e": "F16", "H": "BF16", "b": "I8", "i": "I32"}
        return Dictionary(
            name="rules", model=DictionaryModel(digest, digest, digest, config.layers, config.heads, config.kv_heads, config.head_dim),
            layers=tuple(sorted(states.layers)), prefix=Prefix(digest, prefix_tokens, (prefix_tokens,)),
            calibration=Calibration(digest, 1, rows), settings=chosen,
            tensors=tuple((name, tensor_info(tensors[name], dtypes[tensors[name].dtype.char])) for name in sorted(tensors)),
        ), tensors  # fmt: skip

    return make


def layer_tensors(model: CausalLM, taken: tuple[Tensor, ...], settings: DictionarySettings) -> Tensors:
    queries, rotated, a, log_z = taken
    whitening = (
        whitening_of(lookup_queries(queries, rotated, model.rope, settings), settings.ridge_ppm) if settings.whitened else None
    )
    keys = lookup_keys(queries, rotated, model.rope, settings, model.config, whitening).transpose(0, 1).flatten(1, 2)
    states, log_zs = (join_heads(values, settings, model.config).transpose(0, 1).flatten(1, 2) for values in (a, log_z))
    made: Tensors = {"counts": np.ones(keys.shape[:2], np.int32)} | ({} if whitening is None else {"whitening": whitening.numpy()})
    if settings.lists:
        lists = [entry_lists(book.contiguous().numpy(), settings.lists, 0, 4) for book in keys]
        made |= {"list_keys": np.stack([each[1] for each in lists]), "list_starts": np.stack([each[2] for each in lists])}
        orders = [torch.from_numpy(each[0].astype(np.int64)) for each in lists]
        keys, states, log_zs = (
            torch.stack([book[order] for book, order in zip(part, orders, strict=True)]) for part in (keys, states, log_zs)
        )
    for name, rows in (("key", keys), ("state", states)):
        if settings.dtype is RowDtype.I8:
            scales = (rows.abs().amax(-1) / 127).clamp_min(1e-7).half()
            made[f"{name}_scales"] = scales.numpy()
            made[f"{name}s"] = (rows / scales.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8).numpy()
        elif settings.dtype is RowDtype.BF16:
            made[f"{name}s"] = rows.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        else:
            made[f"{name}s"] = rows.contiguous().numpy()
    return made | {"log_z": log_zs.contiguous().numpy()}
