"""From a version in the pool to a memory that steps can use: does it fit, its handle, its fusion weights.

Owns the checks and the order of opening. Does not own when, how many or for whom (`catalogue`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.ports import MemoryPool, OpeningObserver, ResidentVersion, RowHandle
from treadle.contract.engram_model import EngramModel
from treadle.contract.errors import DataLoss, FingerprintMismatch, TreadleError, Unavailable
from treadle.contract.fusion_mode import FusionMode
from treadle.nn.config import ModelConfig
from treadle.nn.fusion import EngramFusion
from treadle.nn.memory_fit import check_fits, fusion_of, is_fused
from treadle.nn.token_map import compressed_token_map, token_map_digest

log = logging.getLogger("treadle.worker")


@dataclass(frozen=True, slots=True)
class FusionFile:
    """Fusion weights in a file, for the memory `model` instead of those that the pool keeps."""

    model: str
    path: Path


@dataclass(frozen=True)
class Opener:
    """Opens memories for one language model. Any thread.

    tokenizer_json:  of the language model; its token map is made when the first memory asks, which takes half a second
    mode:            whether rows are added to the hidden state
    open_elsewhere:  where another process runs the model: has it open the handle's version too, says how rows come there, and raises
                     why it cannot; this process then holds the version and keeps no weights
    close_elsewhere: tells that process that this one needs the version no more; waits for nothing and raises nothing
    """

    config: ModelConfig
    tokenizer_json: Path
    mode: FusionMode = FusionMode.AUTO
    weights: FusionFile | None = None
    open_elsewhere: Callable[[RowHandle], str] | None = None
    close_elsewhere: Callable[[RowHandle], None] | None = None

    @cached_property
    def token_map(self) -> str:
        """Digest of the language model's own token map."""
        return token_map_digest(compressed_token_map(self.tokenizer_json)[0])

    def check(self, model: EngramModel) -> None:
        """Raise FingerprintMismatch, naming the field, for an Engram model that was not made for this language model."""
        check_fits(model, self.config.layers, self.config.vocab, lambda: self.token_map)

    def is_fused(self, model: EngramModel) -> bool:
        """Whether the rows of this model will be added to the hidden state."""
        return is_fused(model, self.mode)

    def try_open(
        self, pool: MemoryPool, found: ResidentVersion[EngramModel], observer: OpeningObserver | None = None
    ) -> EngramMemory | TreadleError:
        """`open`, logged and counted: the memory, or why there is none. Raises nothing."""
        name, version, began = found.model.name, found.version, time.monotonic()
        opened: EngramMemory | TreadleError
        try:
            opened = self.open(pool, found.model, version)
        except DataLoss as error:
            opened = DataLoss(f"engram memory {name!r}, version {version}, is damaged: {error}; load it into the pool again")
        except TreadleError as error:
            opened = error
        except Exception as error:
            log.exception("an engram memory could not be opened", extra={"model": name, "version": version})
            opened = Unavailable(f"engram memory {name!r} could not be opened ({type(error).__name__}); the worker's log has more")
        failed, seconds = isinstance(opened, TreadleError), time.monotonic() - began
        if observer is not None:
            outcome = "refused" if isinstance(opened, FingerprintMismatch) else "failed" if failed else "ok"
            observer.opened(outcome, seconds)
        fields = {"model": name, "version": version, "seconds": round(seconds, 3)}
        if isinstance(opened, TreadleError):
            log.warning("engram not opened", extra=fields | {"reason": str(opened)})
        else:
            log.info("engram opened", extra=fields | {"transport": opened.transport, "fused": opened.fused})
        return opened

    def open(self, pool: MemoryPool, model: EngramModel, version: str) -> EngramMemory:
        """Open a version of the pool. Raises what `check`, the pool or the weights raise; nothing stays open then."""
        self.check(model)
        handle = pool.open(model.name, version)
        try:
            return self.memory_of(pool, handle)
        except BaseException:
            handle.close()
            raise

    def memory_of(self, pool: MemoryPool, handle: RowHandle) -> EngramMemory:
        """The memory of a handle that is open already; it stays open whatever this raises."""
        self.check(handle.model)
        if self.open_elsewhere is not None:
            transport = self.open_elsewhere(handle)
            closing = None if self.close_elsewhere is None else partial(self.close_elsewhere, handle)
            fused = self.is_fused(handle.model)
            return EngramMemory(handle, None, fused=fused, transport=transport, close_elsewhere=closing)
        fusion = self._fusion(pool, handle.model, handle.version)
        fusion.pack(keep=False)  # here, so that the first step with it does not wait
        return EngramMemory(handle, fusion, fused=self.is_fused(handle.model))

    def _fusion(self, pool: MemoryPool, model: EngramModel, version: str) -> EngramFusion:
        if self.weights is not None and self.weights.model == model.name:
            return fusion_of(model, self.config.hidden, self.weights.path)
        named = model.fusion is not None and model.fusion.weights is not None
        return fusion_of(model, self.config.hidden, pool.read_fusion(model.name, version) if named else None)
