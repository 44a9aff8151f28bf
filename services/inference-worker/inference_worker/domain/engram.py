"""One open version of an Engram model: its handle and its fusion.

Owns what fits which language model, and whether rows are added or shadowed. Does not choose or open versions (`catalogue`,
`memory_opening`), run steps (`engram_step`) or know the fusion's mathematics (`treadle.nn.fusion`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from inference_worker.domain.fusion_mode import FusionMode
from inference_worker.domain.ports import RowHandle
from inference_worker.domain.request import MemoryReport
from treadle.contract.engram_model import EngramModel
from treadle.contract.errors import FingerprintMismatch, InvalidArgument, TreadleError
from treadle.nn import demo_profile
from treadle.nn.config import ModelConfig
from treadle.nn.fusion import EngramFusion

log = logging.getLogger("treadle.worker")
FAILURE_LOG_SECONDS = 60.0  # lookups fail at every step of a pool that is gone: one line a minute says so


class EngramMemory:
    """One version of an Engram model, for the steps of one engine.

    handle: where its rows come from; the memory's own, until whoever opened it closes it
    fused:  True: rows are added to the hidden state. False (shadowed): all is computed and nothing added; waits, policies
            and degraded answers are the same, so that a shadowed run shows what a fused one would meet.
    tokens: looked up since it was opened; written by whoever runs the steps
    """

    def __init__(self, handle: RowHandle, fusion: EngramFusion, *, fused: bool) -> None:
        self.handle, self.fusion, self.fused = handle, fusion, fused
        self.model, self.version, self.transport = handle.model, handle.version, str(handle.transport)
        self.tokens = 0
        self._failure_logged: float | None = None

    @property
    def identity(self) -> dict[str, str]:
        """What KV made with this memory depends on."""
        return {"engram": self.model.name, "engram_version": self.version, "engram_fused": str(self.fused)}

    @property
    def history_widths(self) -> Mapping[int, int]:
        """What the fusion keeps for each token of a sequence beside its KV."""
        return self.fusion.history_widths

    def rows_failed(self, cause: TreadleError) -> None:
        """A lookup of a step ended with an error; said in the log at most once in FAILURE_LOG_SECONDS, however many steps there are."""
        now = time.monotonic()
        if self._failure_logged is not None and now - self._failure_logged < FAILURE_LOG_SECONDS:
            return
        self._failure_logged = now
        log.warning(
            "engram rows cannot be had, answers are made without them",
            extra={"model": self.model.name, "version": self.version, "transport": self.transport, "reason": str(cause)},
        )

    def report(self, tickets: int, tickets_in_time: int, rows_missing: int) -> MemoryReport:
        """What this memory did for a request."""
        return MemoryReport(
            "engram", self.model.name, self.version, self.transport, tickets, tickets_in_time, rows_missing, not self.fused
        )


def check_fits(engram: EngramModel, config: ModelConfig, token_map_of: Callable[[], str]) -> None:
    """Raise FingerprintMismatch, naming the field, unless rows of this Engram model can be looked up and fused for this model.

    token_map_of: gives the digest of the language model's own token map; asked only where one is needed
    Fields: `layers`, `eos_id`, `token_map` (the tables were made for another tokenizer), `fusion` (the manifest has no form).
    """
    beyond = [layer for layer in engram.layers if layer >= config.layers]
    if beyond:
        raise FingerprintMismatch("layers", f"below {config.layers}, the language model's", beyond)
    if engram.fusion is None:
        raise FingerprintMismatch("fusion", "a form", None)
    if engram.token_map is None:
        if engram.eos_id is not None and engram.eos_id >= config.vocab:
            raise FingerprintMismatch("eos_id", f"below {config.vocab}, the language model's tokens", engram.eos_id)
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
