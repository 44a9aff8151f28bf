"""Which Engram memories there are, which of them are open, and who uses them: the memories of one pool.

Owns what is told of each. How versions are chosen, opened and closed is `open_versions`.
"""

from __future__ import annotations

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.memory_status import MemoryStatus
from inference_worker.domain.open_versions import OpenVersions, Standing
from inference_worker.domain.ports import MemoryPool, OpeningObserver
from inference_worker.domain.resident_versions import ENGRAM_WORDS, Choice
from treadle.contract.engram_model import EngramModel


class Catalogue(OpenVersions[EngramModel, EngramMemory]):
    """See OpenVersions; `opener` checks and opens them."""

    def __init__(
        self, pool: MemoryPool, opener: Opener, *, open_max: int, default: Choice | None = None,
        observer: OpeningObserver | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            pool, opener.check, lambda found: opener.try_open(pool, found, observer), ENGRAM_WORDS, open_max=open_max,
            default=default, observer=observer,
        )  # fmt: skip
        self._opener = opener

    def memories(self) -> list[MemoryStatus]:
        """Every memory by name; where the pool has never answered, one without a name that says why."""
        standings, unheard = self.standings()
        statuses = [self._status(standing) for standing in standings]
        return [*statuses, MemoryStatus("", "", False, False, 0, 0, "", False, unheard)] if unheard else statuses

    def _status(self, standing: Standing[EngramModel, EngramMemory]) -> MemoryStatus:
        memory, current = standing.memory, standing.current
        fused = memory.fused if memory is not None else current is not None and self._opener.is_fused(current.model)
        return MemoryStatus(
            standing.name, standing.version, standing.default, memory is not None, standing.requests, standing.tally,
            memory.transport if memory is not None else "", fused, standing.refusal,
        )  # fmt: skip
