"""Which Engram models fit which language model, whether their rows are added, and the fusion that their manifest names.

Shared by all engines. Owns these rules; not opening versions, nor the fusion's mathematics (`fusion`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.contract import EngramModel
from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.contract.fusion_mode import FusionMode
from treadle.nn import demo_profile
from treadle.nn.fusion import EngramFusion


def check_fits(engram: EngramModel, layers: int, vocab: int, token_map_of: Callable[[], str]) -> None:
    """Raise FingerprintMismatch, naming the field, unless rows of this Engram model can be looked up and fused for a language model.

    layers, vocab: of the language model
    token_map_of:  gives the digest of its own token map; asked only where one is needed
    Fields: `layers`, `eos_id`, `token_map` (the tables were made for another tokenizer), `fusion` (the manifest has no form).
    """
    beyond = [layer for layer in engram.layers if layer >= layers]
    if beyond:
        raise FingerprintMismatch("layers", f"below {layers}, the language model's", beyond)
    if engram.fusion is None:
        raise FingerprintMismatch("fusion", "a form", None)
    if engram.token_map is None:
        if engram.eos_id is not None and engram.eos_id >= vocab:
            raise FingerprintMismatch("eos_id", f"below {vocab}, the language model's tokens", engram.eos_id)
        return
    digest = token_map_of()
    if digest != engram.token_map:
        raise FingerprintMismatch("token_map", digest, engram.token_map)


def is_fused(engram: EngramModel, mode: FusionMode) -> bool:
    """Whether rows are added: random weights would only disturb, so `auto` leaves those out."""
    if mode is FusionMode.AUTO:
        return engram.fusion is not None and engram.fusion.weights is not None
    return mode is FusionMode.ON


def fusion_of(engram: EngramModel, hidden: int, weights: Path | bytes | None) -> EngramFusion:
    """The fusion that the manifest names: its weights from a file or its bytes, or random ones from a seed where it names none.

    Raises InvalidArgument for a manifest without a form, or when the weights or their digest are there without the other,
    FingerprintMismatch for other weights than the manifest's.
    """
    digest = None if engram.fusion is None else engram.fusion.weights
    if digest is None and weights is None:
        known = engram.name == demo_profile.NAME and engram.layers == demo_profile.LAYERS
        return EngramFusion.build(engram, hidden, delta_rms=demo_profile.DELTA_RMS) if known else EngramFusion.build(engram, hidden)
    if weights is None:
        raise InvalidArgument(f"engram_fusion_weights: {engram.name} was made with the weights {digest}; give their file")
    if isinstance(weights, Path):
        return EngramFusion.load(weights, engram, hidden)
    return EngramFusion.from_bytes(weights, engram, hidden, origin=f"fusion weights of {engram.name}")
