"""One request's use of a long prefix: by its dictionary, or, once the guard has found it off the dictionary's task, by the exact KV.

Owns the verdict and what is reported. Does not look up (`treadle.nn.prefix_memory`) or restart the request (the engine).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from inference_worker.domain.request import MemoryReport

if TYPE_CHECKING:  # the scheduler and its tests know requests without torch
    from inference_worker.domain.prefix import OpenPrefix
    from treadle.nn.prefix_memory import PrefixUse

OFF_TASK = "off_task"
UNAVAILABLE = "unavailable"


class Verdict(Enum):
    """What the guard finds of a prompt."""

    KEEP = auto()  # the dictionary was made for such queries
    EXACT = auto()  # it was not: the exact KV is kept, and there is room for it
    DEGRADED = auto()  # it was not, and nothing better is there


@dataclass(slots=True)
class PrefixRun:
    """The prefix of one request while it runs; the engine's thread only.

    use:     what looks up, and counts; None once the exact KV is used
    verdict: None until the prompt was computed
    """

    prefix: OpenPrefix
    use: PrefixUse | None
    verdict: Verdict | None = None
    lookups: int = 0
    lookups_outside: int = 0

    def judge(self, outside_share_max: float, *, has_room: bool) -> Verdict:
        """Decide, once, from the lookups of the prompt.

        outside_share_max: share of them with a cosine below the guard's quantile, beyond which a request is off the dictionary's task
        has_room:          whether the exact KV and the request fit together
        """
        assert self.use is not None, "a request is judged while the dictionary answers it"
        if self.use.off_task(outside_share_max):
            self.verdict = Verdict.EXACT if self.prefix.kv is not None and has_room else Verdict.DEGRADED
        else:
            self.verdict = Verdict.KEEP
        return self.verdict

    def fall_back(self) -> None:
        """Use the exact KV from now on."""
        assert self.use is not None
        self.lookups, self.lookups_outside, self.use = self.use.lookups, self.use.lookups_outside, None
        self.prefix.fallbacks += 1

    @property
    def is_exact(self) -> bool:
        """Whether the request's KV begins with the prefix's own."""
        return self.use is None

    @property
    def identity(self) -> dict[str, str]:
        """What KV made with it depends on: the version, and whether the dictionary made it or the exact KV."""
        return {"prefix": self.prefix.model.name, "prefix_version": self.prefix.version, "prefix_exact": str(self.is_exact)}

    @property
    def position_offset(self) -> int:
        """Added to the positions of the request's own tokens. Behind the exact KV they stand where they would stand behind the prefix."""
        return self.prefix.tokens if self.is_exact else self.prefix.model.position_offset

    @property
    def outcome(self) -> str:
        """As metrics say it."""
        return "exact" if self.is_exact else "off_task" if self.verdict is Verdict.DEGRADED else "dictionary"

    @property
    def counted(self) -> tuple[int, int]:
        """Lookups so far, and those of them outside."""
        return (self.lookups, self.lookups_outside) if self.use is None else (self.use.lookups, self.use.lookups_outside)

    @property
    def report(self) -> MemoryReport:
        """What the prefix did for the request."""
        lookups, outside = self.counted
        return MemoryReport(
            "prefix", self.prefix.model.name, self.prefix.version, "mapped", 0, 0, 0, False,
            OFF_TASK if self.verdict is Verdict.DEGRADED else "", lookups, outside, self.is_exact, self.prefix.tokens,
        )  # fmt: skip


def run_of(prefix: OpenPrefix | None) -> PrefixRun | None:
    """The beginning of a request's use of a prefix; None: it has none."""
    return None if prefix is None else PrefixRun(prefix, prefix.begin())


def missing_report(name: str, version: str) -> MemoryReport:
    """Of a prefix that could not be had, for a request that goes on without."""
    return MemoryReport("prefix", name, version, "", 0, 0, 0, False, UNAVAILABLE)
