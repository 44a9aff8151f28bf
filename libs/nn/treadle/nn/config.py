"""What a model folder's config.json says, as one frozen value; refuses what the forward does not compute.

Owns the list of supported architectures and settings. Does not read weights (`weights`) or compute (`model`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretching of the slow RoPE frequencies (rope_type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense Llama, Qwen2 or Qwen3 model.

    hidden, intermediate, head_dim: widths; head_dim need not be hidden / heads
    heads, kv_heads: query heads and key/value heads; heads is a multiple of kv_heads
    attention_bias, output_bias, mlp_bias: biases on q/k/v, on the attention's output, in the MLP
    qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3)
    tied: the output layer is the embedding
    positions_max: positions that RoPE was made for; nothing runs beyond
    eos_token_ids: ids that end an answer (generation_config.json before config.json)
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    norm_eps: float
    tied: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    positions_max: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json and, for the end tokens, generation_config.json where there is one.

        Raises NotFound (no config.json), DataLoss (not JSON), InvalidArgument naming the key that is missing or unsupported.
        """
        config, generation = _read(folder / "config.json"), folder / "generation_config.json"
        ends = _read(generation).get("eos_token_id") if generation.is_file() else None
        return cls.from_json(config if ends is None else config | {"eos_token_id": ends})

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the values of a config.json. Raises InvalidArgument naming the key that is missing or unsupported."""
        architecture = _architecture(config)
        _refuse_unsupported(config)
        heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        _expect(heads % kv_heads == 0, f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, {heads}")
        head_dim = _integer(config, "head_dim", hidden // heads)
        _expect(head_dim % 2 == 0, f"head_dim: {head_dim} is odd, RoPE turns pairs")
        rope = _rope(config)
        biased = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            hidden=hidden,
            layers=_integer(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_integer(config, "intermediate_size"),
            vocab=_integer(config, "vocab_size"),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            rope_scaling=_scaling(rope),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=biased or architecture == "Qwen2ForCausalLM",
            output_bias=biased and architecture != "Qwen2ForCausalLM",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            positions_max=_integer(config, "max_position_embeddings"),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
        )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the KV: layers x (key + value) x kv_heads x head_dim."""
        return self.layers * 2 * self.kv_heads * self.head_dim


def _architecture(config: Mapping[str, Any]) -> str:
    for key in _EXPERT_KEYS:
        _expect(not config.get(key), f"{key}: mixtures of experts are not supported, got {config.get(key)!r}")
    named = config.get("architectures") or [f"{str(config.get('model_type', '')).capitalize()}ForCausalLM"]
    _expect(len(named) == 1 and named[0] in ARCHITECTURES, f"architectures: one of {list(ARCHITECTURES)}, got {named!r}")
    return str(named[0])


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    layers = int(config.get("num_hidden_layers") or 0)
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    _expect(not kinds, f"layer_types: only full_attention is supported, got {sorted(kinds)}")
    slides = (
        config.get("use_sliding_window") and config.get("sliding_window") and int(config.get("max_window_layers") or 0) < layers
    )
    _expect(
        not slides, f"use_sliding_window: sliding windows are not supported (sliding_window = {config.get('sliding_window')!r})"
    )
    _expect(config.get("hidden_act", "silu") == "silu", f"hidden_act: silu expected, got {config.get('hidden_act')!r}")
    _expect(
        not config.get("quantization_config"), "quantization_config: quantised weights are not supported; convert to bf16 first"
    )
    rotary = config.get("partial_rotary_factor")
    _expect(rotary in (None, 1, 1.0), f"partial_rotary_factor: only whole heads are rotated, got {rotary!r}")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's settings in one dictionary: `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` before that."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    rope = dict(config.get("rope_scaling") or {})
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


def _scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    _expect(kind == "llama3", f"rope_scaling: rope_type default or llama3 is supported, got {kind!r}")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    _expect(not missing, f"rope_scaling: missing {missing}")
    factor, low, high, original = (rope[key] for key in keys)
    return Llama3Scaling(float(factor), float(low), float(high), int(original))


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(str(value)),)


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    _expect(value is not None, f"{key}: missing in config.json")
    _expect(
        isinstance(value, int) and not isinstance(value, bool) and value > 0, f"{key}: a positive integer expected, got {value!r}"
    )
    assert isinstance(value, int)
    return value


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise NotFound(f"{path}: no such file; a model folder holds config.json, safetensors weights and tokenizer.json")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataLoss(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataLoss(f"{path}: a JSON object expected")
    return value


def _expect(condition: object, message: str) -> None:
    if not condition:
        raise InvalidArgument(message)
