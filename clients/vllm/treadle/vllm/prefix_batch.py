"""The long prefixes of a model's batch: which request stands behind what, its steps, and where its tokens stand.

What the runner and EngramBatch hold of prefixes. One thread, that of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treadle.contract.errors import InvalidArgument, NotFound
from treadle.contract.policy import Late
from treadle.vllm import prefix_attention
from treadle.vllm.config import MemoryConfig, RequestChoice
from treadle.vllm.history import HistoryPages
from treadle.vllm.prefix_step import Member, PrefixStep, RunningPrefix
from treadle.vllm.prefixes import HeldPrefix, Prefixes
from treadle.vllm.windows import Span

if TYPE_CHECKING:
    from treadle.vllm.batch import BatchView
    from treadle.vllm.step import RunningRequest


class PrefixBatch:
    """See the module. folder: of the model that the engine runs."""

    def __init__(self, config: MemoryConfig, folder: Path) -> None:
        self._prefixes = Prefixes(config, folder)
        self._outside_share_max = config.prefix_outside_share_max
        self._step: PrefixStep | None = None
        self._outside_of_slots: NDArray[np.int32] | None = None

    def open(self, what: str, *, checked: bool = False) -> str:
        """See Prefixes.open."""
        return self._prefixes.open(what, checked=checked)

    def let_go(self, what: str) -> None:
        """See Prefixes.let_go."""
        self._prefixes.let_go(what)

    def take(self, wanted: RequestChoice, prompt_tokens: int, tokens_max: int) -> RunningPrefix:
        """A request begins behind the prefix that it chose.

        prompt_tokens, tokens_max: of its prompt, and of prompt and answer at most
        Raises NotFound (not open here; no exact KV), InvalidArgument where the model has too few positions for prefix and request.
        """
        assert wanted.prefix is not None, "asked for a request with a prefix"
        held = self._prefixes.take(wanted.prefix)
        try:
            self._check(held, wanted, tokens_max)
        except BaseException:
            self._prefixes.release(held)
            raise
        return RunningPrefix(held, wanted.prefix_exact, wanted.begins_anew, wanted.policy.late is Late.FAIL, prompt_tokens)

    def release(self, prefix: RunningPrefix) -> None:
        """A request is over."""
        self._prefixes.release(prefix.held)

    def begin(self, view: BatchView, requests: Mapping[str, RunningRequest], token_count: int, pages: HistoryPages | None) -> None:
        """A step begins. pages: where the KV lies; requests: by their ids, those of the step among them"""
        members, place = [], 0
        for row, request_id in enumerate(view.request_ids):
            request, first, count = requests[request_id], int(view.firsts[row]), int(view.counts[row])
            if request.prefix is not None and request.error is None:
                assert pages is not None, "the pages are made with the KV, before any step"
                slots = pages.slots_of(view.blocks[row], 0, first + count)
                members.append(Member(request, request.prefix, Span(row, first, count, place), slots))
            place += count
        if members and pages is not None:
            if self._outside_of_slots is None:
                self._outside_of_slots = np.zeros(pages.slots, dtype=np.int32)
            self._step = PrefixStep(members, token_count, self._prefixes.rope, self._outside_of_slots, self._outside_share_max)

    def positions(self, positions: Tensor) -> Tensor:
        """Where the model is told that the tokens stand: [T] of the runner's, T the step's tokens or more, and what stands before each."""
        if self._step is None:
            return positions
        shifted = positions.clone()
        shifted[: len(self._step.offsets)] += self._step.offsets
        return shifted

    def run(self) -> None:
        """The model runs the step now."""
        prefix_attention.run(self._step)

    def end(self) -> None:
        """The step is over, or was none."""
        prefix_attention.run(None)
        step, self._step = self._step, None
        if step is not None:
            step.finish()

    def tidy(self) -> None:
        """See Prefixes.tidy."""
        self._prefixes.tidy()

    def close(self) -> None:
        """Close all."""
        self._prefixes.close()

    def _check(self, held: HeldPrefix, wanted: RequestChoice, tokens_max: int) -> None:
        if wanted.prefix_exact and held.kv is None:
            raise NotFound(f"prefix_exact: no exact KV is kept beside {held.choice}")
        exact = wanted.prefix_exact or (wanted.begins_anew and held.kv is not None)
        before, most = held.positions_before(exact=exact), self._prefixes.model.positions_max
        if before + tokens_max > most:
            raise InvalidArgument(
                f"prefix {held.choice.name!r} takes {before} positions, prompt and answer up to {tokens_max}: more than the model's {most}"
            )
