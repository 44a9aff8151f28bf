"""Whether the tensors of a checkpoint are the rows and scales that a manifest speaks of.

Owns dtypes, shapes and row counts. Does not find the tensors (`tensor_names`) or read rows (`checkpoint_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engram_pool.domain.single_scale import is_single, read_single
from engram_pool.domain.sources import Checkpoint, Tensor
from engram_pool.domain.tensor_names import Found, Shards, find_tensors, height, listed, refuse_open
from treadle.contract import EngramModel, FingerprintMismatch, InvalidArgument, RowLayout

BYTE_DTYPES = ("int4", "nf4")  # stored as bytes of two values
TENSOR_DTYPES = {
    "bf16": ("BF16",), "fp16": ("F16",), "fp32": ("F32",), "fp8_e4m3": ("F8_E4M3",), "u8": ("U8",), "int4": ("U8",), "nf4": ("U8",),
}  # fmt: skip
SCALE_DTYPES = {"ue8m0": ("F8_E8M0", "U8"), "fp16": ("F16",), "fp32": ("F32",)}  # the raw bytes are kept in any case


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Tensors of one layer, each in shards along the rows; `scale` is empty where the rows hold none, or are packed already."""

    rows: Shards
    scale: Shards

    @property
    def row_count(self) -> int:
        """Rows of all shards together."""
        return height(self.rows)


def match_tensors(checkpoint: Checkpoint, model: EngramModel, names: Mapping[str, str]) -> dict[int, LayerTensors]:
    """Tensors for each layer of `model`.

    names: role -> tensor name; see `tensor_names`
    Raises InvalidArgument, listing what the checkpoint holds, if one is missing, ambiguous or of another dtype or shape;
    FingerprintMismatch if the one scale of all rows is another than the manifest's.
    """
    found = find_tensors(checkpoint, model.layers, names)
    layout = model.row
    needing = [layer for layer, tensors in found.items() if layout.inline_scale and not _packed(tensors.rows, layout)]
    refuse_open(checkpoint, [f"{layer}.scale" for layer in needing if not found[layer].scale])
    return {layer: _fitting(checkpoint, model, layer, tensors) for layer, tensors in found.items()}


def _fitting(checkpoint: Checkpoint, model: EngramModel, layer: int, found: Found) -> LayerTensors:
    layout, packed = model.row, _packed(found.rows, model.row)
    if not packed:
        width = layout.value_bytes if layout.dtype in BYTE_DTYPES else layout.dim
        _check(checkpoint, f"{layer}.rows", found.rows, TENSOR_DTYPES[layout.dtype], width)
    if layout.inline_scale is not None and not packed:
        scale = found.scale
        _check(
            checkpoint, f"{layer}.scale", scale, SCALE_DTYPES[layout.inline_scale.dtype], layout.dim // layout.inline_scale.block
        )
        if height(scale) != height(found.rows):
            raise InvalidArgument(f"{layer}.scale: {height(found.rows)} rows expected, as in {layer}.rows, got {height(scale)}")
        matched = LayerTensors(found.rows, scale)
    else:
        _check_scale_of_all_rows(checkpoint, layer, layout, found)
        matched = LayerTensors(found.rows, ())
    if matched.row_count < model.rows_hashed(layer):
        raise InvalidArgument(
            f"{layer}.rows: {matched.row_count} rows in {len(found.rows)} tensor(s), but the hash of {model.name} reaches "
            f"{model.rows_hashed(layer)}: a shard is missing, or the manifest belongs to another checkpoint"
        )
    return matched


def _check_scale_of_all_rows(checkpoint: Checkpoint, layer: int, layout: RowLayout, found: Found) -> None:
    """Where the rows hold no scale, the checkpoint may have one for all of them, and then it is the manifest's."""
    if layout.inline_scale is not None or not found.scale or layout.dtype == "u8":  # u8: bytes that only the engine understands
        return
    if layout.scale is None:
        raise InvalidArgument(
            f"{layer}.rows: the checkpoint scales these rows by {found.scale[0]}, the manifest has no row.scale: all their numbers "
            "would be wrong"
        )
    if not is_single(found.scale):
        raise InvalidArgument(
            f"{layer}.scale: one number expected, for the manifest has one scale of all rows; got {found.scale[0]}"
        )
    there = read_single(checkpoint, found.scale)
    if there != layout.scale:
        raise FingerprintMismatch("row.scale", f"{layout.scale.value!r} (manifest)", f"{there.value!r} ({found.scale[0].name})")


def _packed(rows: Shards, layout: RowLayout) -> bool:
    """Whether rows lie in the checkpoint as a segment holds them."""
    return _all_like(rows, ("U8",), layout.bytes)


def _check(checkpoint: Checkpoint, role: str, tensors: Shards, dtypes: tuple[str, ...], width: int) -> None:
    if not _all_like(tensors, dtypes, width):
        wrong = next(tensor for tensor in tensors if not _like(tensor, dtypes, width))
        raise InvalidArgument(f"{role}: {' or '.join(dtypes)} [rows, {width}] expected, got {wrong}. {listed(checkpoint)}")


def _all_like(tensors: Shards, dtypes: tuple[str, ...], width: int) -> bool:
    return all(_like(tensor, dtypes, width) for tensor in tensors)


def _like(tensor: Tensor, dtypes: tuple[str, ...], width: int) -> bool:
    flat = width == 1 and len(tensor.shape) == 1  # one scale a row may come without a second dimension
    return tensor.dtype in dtypes and (flat or (len(tensor.shape) == 2 and tensor.shape[1] == width))
