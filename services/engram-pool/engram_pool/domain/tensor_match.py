"""Which tensors of a checkpoint hold the rows and scales of each layer.

By suffix for DeepSeek-V4.1 (`…layers.<n>.….engram.embed.weight` and its scale, as in vLLM's loader), by the caller's map for
others. A role's name may hold one `*` that stands for a number: the pieces are joined in the order of their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engram_pool.domain.ports import Checkpoint, Tensor
from treadle.contract import EngramModel, InvalidArgument

TENSORS_LISTED_MAX = 20  # a refusal shows the largest ones
ROLES_MAX = 128  # two for each of at most 64 layers
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SUFFIXES = {
    "rows": ("engram.embed.weight",),
    "scale": ("engram.embed.weight_scale_inv", "engram.embed.weight_scale", "engram.embed.scale_inv", "engram.embed.scale"),
}
_DTYPES = {"bf16": ("BF16",), "fp16": ("F16",), "fp32": ("F32",), "fp8_e4m3": ("F8_E4M3",), "u8": ("U8",), "int4": ("U8",)}
_SCALE_DTYPES = {"ue8m0": ("F8_E8M0", "U8"), "fp16": ("F16",)}  # the raw bytes are kept in any case


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Tensors of one layer, each in pieces along the rows; `scale` is empty where the row has none, or is packed already."""

    rows: tuple[Tensor, ...]
    scale: tuple[Tensor, ...]

    @property
    def row_count(self) -> int:
        """Rows of all pieces together."""
        return _height(self.rows)


def match_tensors(checkpoint: Checkpoint, model: EngramModel, names: Mapping[str, str]) -> dict[int, LayerTensors]:
    """Tensors for each layer of `model`.

    names: role -> tensor name; roles are `<layer>.rows` and `<layer>.scale`
    Raises InvalidArgument, listing what the checkpoint holds, if one is missing, ambiguous or of another dtype or shape.
    """
    _check_roles(model, names)
    return {layer: _layer_tensors(checkpoint, model, layer, names) for layer in model.layers}


def listed(checkpoint: Checkpoint) -> str:
    """What a checkpoint holds, the largest first, for a refusal."""
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: -tensor.row_bytes * (tensor.shape[0] if tensor.shape else 1))
    more = f" and {len(tensors) - TENSORS_LISTED_MAX} smaller ones" if len(tensors) > TENSORS_LISTED_MAX else ""
    return f"{checkpoint.name} holds {', '.join(map(str, tensors[:TENSORS_LISTED_MAX])) or 'no tensors'}{more}"


def _check_roles(model: EngramModel, names: Mapping[str, str]) -> None:
    known = {f"{layer}.{role}" for layer in model.layers for role in _SUFFIXES}
    unknown = sorted(set(names) - known)
    if unknown or len(names) > ROLES_MAX:
        raise InvalidArgument(f"tensors: unknown roles {unknown[:8]}; {model.name} has {sorted(known)[:8]}")


def _layer_tensors(checkpoint: Checkpoint, model: EngramModel, layer: int, names: Mapping[str, str]) -> LayerTensors:
    layout = model.row
    rows = _find(checkpoint, layer, "rows", names)
    packed = _all_like(rows, ("U8",), layout.bytes)  # as a segment holds them
    if not packed:
        width = layout.value_bytes if layout.dtype == "int4" else layout.dim  # int4 comes as bytes of two values
        _check(checkpoint, f"{layer}.rows", rows, _DTYPES[layout.dtype], width)
    if layout.scale is None or packed:
        found = LayerTensors(rows, ())
    else:
        scale = _find(checkpoint, layer, "scale", names)
        _check(checkpoint, f"{layer}.scale", scale, _SCALE_DTYPES[layout.scale.dtype], layout.dim // layout.scale.block)
        found = LayerTensors(rows, scale)
        if _height(scale) != found.row_count:
            raise InvalidArgument(f"{layer}.scale: {found.row_count} rows expected, as in {layer}.rows, got {_height(scale)}")
    if found.row_count < model.rows_hashed(layer):
        raise InvalidArgument(
            f"{layer}.rows: {found.row_count} rows, but the hash of {model.name} reaches {model.rows_hashed(layer)}: "
            "the manifest belongs to another checkpoint"
        )
    return found


def _find(checkpoint: Checkpoint, layer: int, role: str, names: Mapping[str, str]) -> tuple[Tensor, ...]:
    wanted = names.get(f"{layer}.{role}")
    if wanted is not None:
        found = _named(checkpoint, wanted)
        missing = f"tensor {wanted!r}, named for the role {layer}.{role}, is not there"
    else:
        found = tuple(tensor for name, tensor in checkpoint.tensors.items() if _layer_of(name, role) == layer)
        missing = f"no tensor `layers.{layer}.….{_SUFFIXES[role][0]}`; name one for the role {layer}.{role}"
        if len(found) > 1:
            raise InvalidArgument(f"{layer}.{role}: {', '.join(t.name for t in found[:8])} all fit; name one for the role")
    if not found:
        raise InvalidArgument(f"{missing}. {listed(checkpoint)}")
    return found


def _named(checkpoint: Checkpoint, wanted: str) -> tuple[Tensor, ...]:
    if "*" not in wanted:
        tensor = checkpoint.tensors.get(wanted)
        return (tensor,) if tensor else ()
    before, _, after = wanted.partition("*")
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    pieces = [(int(match[1]), tensor) for name, tensor in checkpoint.tensors.items() if (match := pattern.fullmatch(name))]
    return tuple(tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0]))


def _layer_of(name: str, role: str) -> int | None:
    if not any(name.endswith("." + suffix) or name == suffix for suffix in _SUFFIXES[role]):
        return None
    numbers = _LAYER.findall(name)
    return int(numbers[-1]) if numbers else None


def _check(checkpoint: Checkpoint, role: str, tensors: tuple[Tensor, ...], dtypes: tuple[str, ...], width: int) -> None:
    if not _all_like(tensors, dtypes, width):
        got = ", ".join(map(str, tensors[:4]))
        raise InvalidArgument(f"{role}: {' or '.join(dtypes)} [rows, {width}] expected, got {got}. {listed(checkpoint)}")


def _all_like(tensors: tuple[Tensor, ...], dtypes: tuple[str, ...], width: int) -> bool:
    return all(tensor.dtype in dtypes and len(tensor.shape) == 2 and tensor.shape[1] == width for tensor in tensors)


def _height(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.shape[0] for tensor in tensors)
