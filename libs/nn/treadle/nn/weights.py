"""Reads the weights of a Hugging Face folder into the form that the forward multiplies with.

Owns names, shapes and fusing (q, k and v in one product; gate and up in one). Reads safetensors only, single file or with
an index; never pickles. Does not know how a layer computes (`model`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle.nn.config import ModelConfig
from treadle.nn.linear import Linear

CPU = torch.device("cpu")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. Norm weights are [hidden], or [head_dim] for q_norm and k_norm."""

    input_norm: Tensor
    qkv: Linear  # hidden -> (heads + 2 kv_heads) head_dim: queries, keys, values
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear  # heads head_dim -> hidden
    mlp_norm: Tensor
    gate_up: Linear  # hidden -> 2 intermediate: gate, up
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a model. embedding: [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear


class Checkpoint:
    """The tensors of a folder by name, read one at a time, converted to `dtype` on `device`."""

    def __init__(self, files: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._dtype, self._device = dtype, device

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._files

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`. Raises InvalidArgument if it is absent or has another shape."""
        if name not in self._files:
            raise InvalidArgument(f"weights: no tensor {name!r}; there are {len(self._files)}, such as {sorted(self._files)[:4]}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise InvalidArgument(f"weights: {name} is {tensor.dtype} {list(tensor.shape)}, {list(shape)} expected")
        return tensor.to(self._device, self._dtype)

    def fused(self, names: Sequence[str], inputs: int, outputs: Sequence[int], bias: bool) -> tuple[Tensor, Tensor | None]:
        """Weight [sum of outputs, inputs] and bias or None of the layers `names` (with `outputs` each), joined along the outputs."""
        weight = torch.cat([self.tensor(f"{name}.weight", out, inputs) for name, out in zip(names, outputs, strict=True)])
        biases = [self.tensor(f"{name}.bias", out) for name, out in zip(names, outputs, strict=True)] if bias else []
        return weight, torch.cat(biases) if bias else None

    def linear(self, names: Sequence[str], inputs: int, outputs: Sequence[int], bias: bool) -> Linear:
        """The same as one product."""
        return Linear(*self.fused(names, inputs, outputs, bias))


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read the weights of `folder` for `config`, in `dtype`.

    Raises NotFound (no safetensors there), InvalidArgument (a tensor is absent or has another shape), DataLoss (a torn file).
    """
    with opened(folder, dtype) as checkpoint:
        embedding = checkpoint.tensor("model.embed_tokens.weight", config.vocab, config.hidden)
        head = embedding if config.tied else checkpoint.tensor("lm_head.weight", config.vocab, config.hidden)
        return Weights(
            embedding=embedding,
            layers=tuple(_layer(checkpoint, config, f"model.layers.{layer}.") for layer in range(config.layers)),
            norm=checkpoint.tensor("model.norm.weight", config.hidden),
            head=Linear(head),
        )


def _layer(checkpoint: Checkpoint, config: ModelConfig, at: str) -> LayerWeights:
    hidden, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = [f"{at}self_attn.{name}_proj" for name in "qkv"]
    halves = [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]
    return LayerWeights(
        input_norm=checkpoint.tensor(f"{at}input_layernorm.weight", hidden),
        qkv=checkpoint.linear(projections, hidden, (query, key, key), config.attention_bias),
        q_norm=checkpoint.tensor(f"{at}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=checkpoint.tensor(f"{at}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=checkpoint.linear([f"{at}self_attn.o_proj"], query, (hidden,), config.output_bias),
        mlp_norm=checkpoint.tensor(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=checkpoint.linear(halves, hidden, (config.intermediate,) * 2, config.mlp_bias),
        down=checkpoint.linear([f"{at}mlp.down_proj"], config.intermediate, (hidden,), config.mlp_bias),
    )


@contextmanager
def opened(folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> Iterator[Checkpoint]:
    """The tensors of a folder, its files open until the end. Raises NotFound, DataLoss."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataLoss(f"{path}: not a whole safetensors file: {error}") from error
            files.update(dict.fromkeys(file.keys(), file))
        yield Checkpoint(files, dtype, device)


def weights_digest(folder: Path) -> str:
    """sha256 over the names and bytes of the weight files of a folder: which model it is. Raises NotFound, DataLoss."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder, in one order. Raises NotFound where there are none, DataLoss for a torn index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise NotFound(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors weights are read")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataLoss(f"{folder / INDEX}: not an index of safetensors files: {error!r}") from error
    # An index names files of its own folder; anything else is not read.
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    missing = [name for name in names if name not in strange and not (folder / name).is_file()]
    if strange or missing:
        raise NotFound(f"{folder / INDEX}: names files that are not in its folder: {(strange + missing)[:4]}")
    return [folder / name for name in names]
