"""One open version of an Engram model: its handle and its fusion.

Owns what is told of it. Does not choose or open versions (`catalogue`, `memory_opening`), run steps (`engram_step`) or know which fit
(`treadle.nn.memory_fit`) or the fusion's mathematics (`treadle.nn.fusion`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from inference_worker.domain.ports import RowHandle
from inference_worker.domain.request import MemoryReport
from inference_worker.domain.sequence import MemoryCounts
from treadle.contract.errors import TreadleError
from treadle.nn.fusion import EngramFusion

log = logging.getLogger("treadle.worker")
FAILURE_LOG_SECONDS = 60.0  # lookups fail at every step of a pool that is gone: one line a minute says so


class EngramMemory:
    """One version of an Engram model, for the steps of one engine.

    handle: where its rows come from; the memory's own, until whoever opened it closes it
    close_elsewhere: tells that process that this one needs the version no more
    fusion: None where another process runs the model, and keeps the weights: this one holds the version
    transport: how its rows come; empty: as the handle's do
    fused:  True: rows are added to the hidden state. False (shadowed): all is computed and nothing added; waits, policies
            and degraded answers are the same, so that a shadowed run shows what a fused one would meet.
    tokens: looked up since it was opened; written by whoever runs the steps
    """

    def __init__(
        self, handle: RowHandle, fusion: EngramFusion | None, *, fused: bool, transport: str = "",
        close_elsewhere: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.handle, self._fusion, self.fused, self._close_elsewhere = handle, fusion, fused, close_elsewhere
        self.model, self.version, self.transport = handle.model, handle.version, transport or str(handle.transport)
        self.tokens = 0
        self._failure_logged: float | None = None

    def close(self) -> None:
        """Let go of the version, here and where else it was opened. No step may be using it."""
        self.handle.close()
        if self._close_elsewhere is not None:
            self._close_elsewhere()

    @property
    def tally(self) -> int:
        """See OpenMemory: tokens that were looked up."""
        return self.tokens

    @property
    def identity(self) -> dict[str, str]:
        """What KV made with this memory depends on."""
        return {"engram": self.model.name, "engram_version": self.version, "engram_fused": str(self.fused)}

    @property
    def fusion(self) -> EngramFusion:
        """Its weights, for steps in this process."""
        assert self._fusion is not None, "steps with this memory are run in another process"
        return self._fusion

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

    def report(self, counts: MemoryCounts) -> MemoryReport:
        """What this memory did for a request."""
        return MemoryReport(
            "engram", self.model.name, self.version, self.transport, counts.tickets, counts.tickets_in_time, counts.rows_missing,
            not self.fused, counts.missing_because,
        )  # fmt: skip
