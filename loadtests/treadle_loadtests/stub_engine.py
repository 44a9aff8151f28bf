"""An engine without a model: a queue, one prefill at a time, slots that give tokens at a steady pace, a prefix cache.

One timer for all streams, so that a thousand of them cost what their tokens cost. Owns when a token comes; what is said in
it, and how it travels, is the server's.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from treadle.contract.errors import ResourceExhausted, Unavailable
from treadle_loadtests.stub_blocks import Block, BlockCache

State = Literal["waiting", "prefill", "decode", "finished", "aborted"]
RETRY_SECONDS_MIN = 0.05


class Draining(Unavailable):
    """The worker is stopping; the name is the one that a real worker tells."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the engine can do. tokens_per_second: of each stream; seconds: of a prompt's token that is not cached."""

    slots: int
    waiting_max: int
    tokens_per_second: float
    prefill_seconds_per_token: float


@dataclass(slots=True, eq=False)
class Stream:
    """One generation. `made`: tokens that are there; `blocks`: of its prompt."""

    request_id: str
    prompt_tokens: int
    tokens: int
    blocks: list[Block]
    priority: int
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    state: State = "waiting"
    cached_blocks: int = 0
    made: int = 0
    _waiter: asyncio.Future[None] | None = None

    async def more(self, taken: int) -> None:
        """Until more than `taken` tokens are there."""
        if self.made <= taken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def make(self) -> None:
        """One more token."""
        self.made += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class Totals:
    """Counted since the start. `prompt_tokens`: those that were computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_made: int = 0
    busy_seconds: float = 0.0


class Engine:
    """Runs in one event loop. `noted`: hears of every arrival, abort and end."""

    def __init__(self, pace: Pace, cache: BlockCache | None, block_tokens: int, noted: Callable[[str, Stream], None]) -> None:
        self.pace, self.cache, self.block_tokens, self.totals = pace, cache, block_tokens, Totals()
        self.draining = False
        self.running: set[Stream] = set()
        self._noted = noted
        self._waiting: list[tuple[int, int, Stream]] = []
        self._due: list[tuple[float, int, Stream]] = []
        self._prefilling: Stream | None = None
        self._number, self._waiting_count = 0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._gap_seconds = 1 / pace.tokens_per_second

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return self._waiting_count

    @property
    def wait_seconds_predicted(self) -> float:
        """How long a request that came now would wait: those before it, at the pace of what runs."""
        ahead = self._waiting_count + len(self.running) + 1 - self.pace.slots
        if ahead <= 0:
            return 0.0
        lengths = [stream.tokens for stream in self.running] or [1]
        return ahead * sum(lengths) / len(lengths) * self._gap_seconds / self.pace.slots

    def submit(self, stream: Stream) -> None:
        """Take a request in. Raises Draining, or ResourceExhausted when `waiting_max` wait already."""
        if self.draining:
            raise Draining("the worker is stopping; ask another one")
        if self._waiting_count >= self.pace.waiting_max and (len(self.running) >= self.pace.slots or self._waiting_count):
            seconds = max(RETRY_SECONDS_MIN, self.wait_seconds_predicted)
            raise ResourceExhausted(f"{self._waiting_count} requests wait, the limit waiting_max", seconds)
        self._noted("arrived", stream)
        self._waiting_count += 1
        heapq.heappush(self._waiting, (-stream.priority, self._next(), stream))
        self._begin()

    def leave(self, stream: Stream) -> None:
        """The call is over: if the stream is not, this is an abort. Its place is free at once."""
        if stream.state in ("finished", "aborted"):
            return
        self._noted("aborted", stream)
        if stream.state == "waiting":
            self._waiting_count -= 1
        self._over(stream, "aborted")

    def _over(self, stream: Stream, state: State) -> None:
        stream.state = state
        self.running.discard(stream)
        if self._prefilling is stream:
            self._prefilling = None
        self._begin()

    def _begin(self) -> None:
        """Begin the next prefill if there is a place."""
        while self._waiting and self._prefilling is None and len(self.running) < self.pace.slots:
            _, _, stream = heapq.heappop(self._waiting)
            if stream.state != "waiting":
                continue  # it left
            self._waiting_count -= 1
            stream.state, self._prefilling = "prefill", stream
            self.running.add(stream)
            if self.cache is not None:
                stream.cached_blocks = self.cache.match(stream.blocks)
            cached = min(stream.cached_blocks * self.block_tokens, stream.prompt_tokens - 1)
            self.totals.cached_tokens += cached
            self.totals.prompt_tokens += stream.prompt_tokens - cached
            seconds = (stream.prompt_tokens - cached) * self.pace.prefill_seconds_per_token
            self.totals.busy_seconds += seconds
            if seconds:
                self._at(time.monotonic() + seconds, stream)
            else:
                self._prefilled(stream, time.monotonic())

    def _prefilled(self, stream: Stream, now: float) -> None:
        if self.cache is not None:
            self.cache.store(stream.blocks)
        stream.state, self._prefilling = "decode", None
        self._token(stream, now)

    def _token(self, stream: Stream, due: float) -> None:
        self.totals.tokens_made += 1
        stream.make()
        if stream.made < stream.tokens:
            self._at(due + self._gap_seconds, stream)
            return
        self.totals.completion_tokens += stream.tokens
        self._noted("finished", stream)
        self._over(stream, "finished")

    def _at(self, due: float, stream: Stream) -> None:
        heapq.heappush(self._due, (due, self._next(), stream))
        if self._due[0][2] is stream:
            self._wake_at(due)

    def _wake_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._tick)  # the loop's clock is time.monotonic

    def _tick(self) -> None:
        self._timer, now = None, time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, _, stream = heapq.heappop(self._due)
            if stream.state == "prefill":
                self._prefilled(stream, due)
                self._begin()
            elif stream.state == "decode":
                self._token(stream, due)
        if self._due:
            self._wake_at(self._due[0][0])

    def _next(self) -> int:
        self._number += 1
        return self._number
