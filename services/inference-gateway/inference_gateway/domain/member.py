"""One worker of the fleet: what it runs, how busy it is, and whether it may get requests.

Owns the counting of requests and the word for its state. Following it is its watch's (served_model), what lies in its prefix
cache its block index's; whether it fails too often its breaker says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from inference_gateway.domain.block_index import BlockIndex, Room
from inference_gateway.domain.breaker import Breaker
from inference_gateway.domain.generation import WorkerStatus
from inference_gateway.domain.ports import Worker
from inference_gateway.domain.served_model import WorkerWatch

SILENCES_MAX = 2  # one poll may meet a worker that just then does something else
_asked = itertools.count(1)


class WorkerState(StrEnum):
    """What a worker is to the gateway; also a label of the metric."""

    READY = "ready"
    AWAY = "away"
    DRAINING = "draining"
    DIFFERS = "differs"
    RESTING = "resting"  # its breaker keeps requests away


@dataclass(eq=False, slots=True)
class Member:
    """One worker of the fleet.

    name:      stable; the address where there is no better one
    in_flight: requests of this gateway that it works on
    others:    requests there that are not this gateway's, as far as its last status told
    leaving:   the directory says that it drains
    differs:   the field in which it is another than the other members of its model; "": in none
    blocks:    what lies in its prefix cache, as far as it tells
    asked_last: rises with every request; the lowest was not asked for longest
    pid:       its process, by its last status
    silences:  polls of its status that it did not answer in time, in a row
    spoke_seconds: time.monotonic() when a piece of any answer came from it last
    first_waits: of calls that wait for a first piece; called when it answers no status any more
    """

    name: str
    worker: Worker
    watch: WorkerWatch
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    others: int = 0
    leaving: bool = False
    differs: str = ""
    blocks: BlockIndex = field(default_factory=lambda: BlockIndex(Room(0)))
    asked_last: int = 0
    pid: int = 0
    silences: int = 0
    spoke_seconds: float = 0.0
    first_waits: set[Callable[[], None]] = field(default_factory=set)
    _when_idle: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.watch.heard, self.watch.unheard = self._heard, self._unheard

    @property
    def load(self) -> int:
        """Requests there, running or waiting: ours as they are now, the others' as of its last status."""
        return self.in_flight + self.others

    @property
    def is_full(self) -> bool:
        """Whether it would refuse a request for want of a place in its queue, by its last status."""
        status = self.watch.status
        return status is not None and 0 < status.requests_waiting_max <= status.requests_waiting

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of its prefix cache; 0: it tells of none."""
        return 0 if self.watch.status is None else self.watch.status.block_tokens

    def begin(self) -> None:
        """A request of ours goes there; whoever says so says `end` once."""
        self.in_flight += 1
        self.asked_last = next(_asked)

    def end(self) -> None:
        """It is over, well or not."""
        self.in_flight -= 1
        if not self.in_flight and self._when_idle is not None:
            self._when_idle()

    def when_idle(self, work: Callable[[], None]) -> None:
        """Call `work` once no request of ours is there: now, or at the end of the last one."""
        self._when_idle = work
        if not self.in_flight:
            work()

    @property
    def state(self) -> WorkerState:
        """What it is to new requests."""
        if self.leaving or self.watch.draining:
            return WorkerState.DRAINING
        if self.watch.not_ready_because() is not None:
            return WorkerState.AWAY
        if self.differs:
            return WorkerState.DIFFERS
        return WorkerState.READY if self.breaker.allows() else WorkerState.RESTING

    def not_usable_because(self) -> str | None:
        """Why it can get no new request; None: it may. Whether its breaker lets it rest is the fleet's to weigh."""
        if self.leaving:
            return "the worker is draining"
        trouble = self.watch.not_ready_because()
        if trouble is not None:
            return trouble
        return f"the worker serves another {self.differs} than the others of its model" if self.differs else None

    def _unheard(self) -> None:
        """Whoever stands still so long does not answer soon: nothing is lost by asking another one, where there is one."""
        self.silences += 1
        if self.silences >= SILENCES_MAX:
            for give_up in self.first_waits:
                give_up()

    def _heard(self, status: WorkerStatus) -> None:
        self.silences = 0
        if status.pid != self.pid:  # another process: what the one before it did tells nothing
            self.pid = status.pid
            self.breaker.reset()
        self.others = max(0, status.requests_running + status.requests_waiting - self.in_flight)
