"""The manifest of a checkpoint that came without one: from its config.json, and for a Qwen PLE from its tensors too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engram_pool.domain.config_keys import KEYS_LISTED_MAX, model_name, whole
from engram_pool.domain.ple_config import LAYERS_KEY, padded_rows, ple_dim, ple_keys, ple_layers, ple_template
from engram_pool.domain.single_scale import is_single, read_single
from engram_pool.domain.sources import Checkpoint
from engram_pool.domain.storing import TokenMap
from engram_pool.domain.tensor_match import BYTE_DTYPES, SCALE_DTYPES, TENSOR_DTYPES
from engram_pool.domain.tensor_names import Found, find_tensors, height, refuse_open
from engram_pool.domain.v41_config import V41_LAYERS_KEY, v41_template
from treadle.contract import EngramModel, Family, InvalidArgument, RowLayout, Scale
from treadle.contract.row_layout import SCALE_BYTES, VALUE_BITS

_FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8_e4m3"}
_PACKED_SCALES = {"nf4": "fp32", "int4": "fp16"}  # behind the values of a row, where no tensor holds them


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Whose config.json it is; None for one without tables that we know."""
    if ple_keys(config) is not None:
        return Family.QWEN_PLE
    text = config.get("text_config")
    known = V41_LAYERS_KEY in config or (isinstance(text, Mapping) and V41_LAYERS_KEY in text)
    return Family.DEEPSEEK_V41 if known else None


def derived_template(
    checkpoint: Checkpoint, token_map: TokenMap | None, names: Mapping[str, str], *, name: str = "", row_dtype: str = ""
) -> EngramModel:
    """A template for `checkpoint`.

    names:     role -> tensor name, as for `find_tensors`
    name:      of the model; empty: the checkpoint's
    row_dtype: what U8 rows of a Qwen PLE hold, nf4 or int4; empty: as config.json says
    Raises InvalidArgument naming the key or listing the tensors, FingerprintMismatch for a token map of another tokenizer.
    """
    config = checkpoint.config or {}
    name, family = name or model_name(checkpoint.name), family_of(config)
    if family is Family.QWEN_PLE:
        keys = ple_keys(config)
        assert keys is not None
        return _ple(checkpoint, keys, names, name, row_dtype)
    if family is None:
        kind = config.get("model_type")
        keys_there = sorted(config)[:KEYS_LISTED_MAX]
        there = f"config.json of model_type {kind!r} with {keys_there}" if config else "no config.json"
        raise InvalidArgument(
            f"there is {there}: neither {V41_LAYERS_KEY} is there (DeepSeek-V4.1) nor {LAYERS_KEY} (Qwen PLE); give a manifest instead"
        )
    if row_dtype:
        raise InvalidArgument("row_dtype: rows of a DeepSeek-V4.1 checkpoint are FP8; give a manifest for others")
    return replace(v41_template(config, checkpoint.name, token_map), name=name)


def _ple(checkpoint: Checkpoint, keys: Mapping[str, Any], names: Mapping[str, str], name: str, row_dtype: str) -> EngramModel:
    found = find_tensors(checkpoint, ple_layers(keys), names)
    _check_shards(keys, found, names)
    rows = {layer: _row(checkpoint, keys, layer, tensors, row_dtype) for layer, tensors in found.items()}
    if len(set(rows.values())) > 1:
        raise InvalidArgument(f"row: one layout for all layers expected, got {rows}; a manifest has one")
    model = ple_template(keys, name, next(iter(rows.values())))
    for layer, tensors in found.items():
        if height(tensors.rows) != padded_rows(keys, model, layer):
            raise InvalidArgument(
                f"{layer}.rows: {height(tensors.rows)} rows, but config.json makes primes that add up to {model.rows_hashed(layer)}, "
                f"padded {padded_rows(keys, model, layer)}: the tensors and config.json belong to two checkpoints"
            )
    return model


def _check_shards(keys: Mapping[str, Any], found: Mapping[int, Found], names: Mapping[str, str]) -> None:
    """config.json says how many shards there are: the last one may be missing without a gap."""
    for layer, tensors in found.items():
        stated = whole(keys, "split_ngram_parts", default=len(tensors.rows))
        by_suffix = not any(role.startswith(f"{layer}.rows") for role in names)
        if by_suffix and len(tensors.rows) not in (1, stated):
            raise InvalidArgument(
                f"{layer}.rows: {len(tensors.rows)} shards, from {tensors.rows[0].name} to {tensors.rows[-1].name}; by config.json "
                f"there are {stated} (split_ngram_parts)"
            )


def _row(checkpoint: Checkpoint, keys: Mapping[str, Any], layer: int, found: Found, row_dtype: str) -> RowLayout:
    """How rows of one layer are laid out, from their tensors."""
    dim, first = ple_dim(keys), found.rows[0]
    dtype = _FLOATS.get(first.dtype) or _bytes_dtype(keys, layer, found, row_dtype)
    if row_dtype and row_dtype != dtype:
        raise InvalidArgument(f"row_dtype: {row_dtype}, but {first} is there")
    value_bytes = dim * VALUE_BITS[dtype] // 8
    if found.scale:
        scale: Scale | None = _scale(checkpoint, layer, found, dim)
    elif dtype in _PACKED_SCALES and first.shape[1:] == (value_bytes + SCALE_BYTES[_PACKED_SCALES[dtype]],):
        scale = Scale(_PACKED_SCALES[dtype], dim)
    elif dtype in ("bf16", "fp16", "fp32"):
        scale = None
    else:
        refuse_open(checkpoint, [f"{layer}.scale"])
        raise AssertionError("an open role was refused")
    in_row = dim // scale.block * SCALE_BYTES[scale.dtype] if scale is not None and scale.block else 0
    return RowLayout(value_bytes + in_row, dim, dtype, scale)


def _bytes_dtype(keys: Mapping[str, Any], layer: int, found: Found, row_dtype: str) -> str:
    said, first = row_dtype or str(keys.get("ple_embedding_dtype", "")), found.rows[0]
    if said not in BYTE_DTYPES:
        raise InvalidArgument(
            f"{layer}.rows: {first} does not say what its bytes hold{f' ({said!r} is not known)' if said else ''}: say "
            f"row_dtype {' or '.join(BYTE_DTYPES)}, or give a manifest"
        )
    if first.dtype not in TENSOR_DTYPES[said]:
        raise InvalidArgument(f"{layer}.rows: {said} rows are {' or '.join(TENSOR_DTYPES[said])}, got {first}")
    return said


def _scale(checkpoint: Checkpoint, layer: int, found: Found, dim: int) -> Scale:
    if is_single(found.scale):
        return read_single(checkpoint, found.scale)
    first = found.scale[0]
    width = first.shape[1] if len(first.shape) == 2 else 1
    dtype = next((name for name, dtypes in SCALE_DTYPES.items() if first.dtype in dtypes), None)
    if dtype is None or len(first.shape) not in (1, 2) or not width or dim % width:
        raise InvalidArgument(
            f"{layer}.scale: one number, or {'/'.join(SCALE_DTYPES)} scales that divide {dim} values, got {first}"
        )
    return Scale(dtype, dim // width)
