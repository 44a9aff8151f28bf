"""Decides, once a prompt is computed, whether the dictionary of its prefix was made for such a request.

Owns the decision for a sequence and what it means under the request's policy. Does not know cosines (`treadle.nn.prefix_memory`
counts those below the quantile) or restart anything (the engine).
"""

from __future__ import annotations

from collections.abc import Sequence as Slots

from inference_worker.domain.errors import MemoryMissing
from inference_worker.domain.prefix_run import Verdict
from inference_worker.domain.scheduler import Slot
from inference_worker.domain.sequence import Sequence
from treadle.contract.policy import Late
from treadle.nn.prefix_memory import PrefixUse


class PrefixGuard:
    """The guard of one engine.

    outside_share_max: see PrefixRun.judge
    kv_tokens_max:     tokens of KV that the batch may reserve
    """

    def __init__(self, outside_share_max: float, kv_tokens_max: int) -> None:
        self._outside_share_max, self._kv_tokens_max = outside_share_max, kv_tokens_max

    def sends_back(self, sequence: Sequence) -> bool:
        """Whether a sequence whose prompt is computed begins anew, behind the exact KV of its prefix; it is ready for that then.

        A sequence that is off the task and has nothing to fall back to goes on degraded, or MemoryMissing is raised where its policy
        is to fail then.
        """
        run = sequence.prefix
        if run is None or run.verdict is not None:
            return False
        has_room = run.prefix.tokens + sequence.tokens_max <= self._kv_tokens_max
        verdict = run.judge(self._outside_share_max, has_room=has_room)
        if verdict is Verdict.EXACT:
            sequence.restart_exact()
        elif verdict is Verdict.DEGRADED:
            if sequence.request.policy.late is Late.FAIL:
                raise MemoryMissing(
                    f"prefix {run.prefix.model.name!r}: this prompt is off the task of its dictionary, and "
                    + ("its exact KV and the request exceed kv_tokens_max" if run.prefix.kv is not None else "no exact KV is kept")
                    + "; ask for late = mask to go on all the same"
                )
            sequence.degraded = True
        return verdict is Verdict.EXACT


def failure_of(sequence: Sequence) -> Exception | None:
    """What kept the dictionary of a sequence's prefix from answering in this step; its numbers are worth nothing then."""
    use = sequence.prefix.use if sequence.prefix is not None else None
    return use.failure if use is not None else None


def uses_of(slots: Slots[Slot]) -> list[PrefixUse | None] | None:
    """What each sequence of a step looks up in; None where none does."""
    uses = [slot.sequence.prefix.use if slot.sequence.prefix is not None else None for slot in slots]
    return uses if any(use is not None for use in uses) else None
