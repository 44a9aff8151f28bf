"""Who takes part in the next step, and with how many tokens. Knows no model: tokens are counted, not computed.

Order of a step: every decoding sequence gets its one token; then prefills go on in chunks, oldest first. Waiting
requests join before, in the order in which they came, a higher priority as if it had come sooner, while there is a place and KV
room. A long prompt therefore delays those who decode by one chunk at most, and nobody who waits is overtaken for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inference_worker.domain.limits import Limits
from inference_worker.domain.sequence import Sequence
from treadle.contract.errors import ResourceExhausted


@dataclass(frozen=True, slots=True)
class Slot:
    """`count` tokens of a sequence, from `first` on, that run in a step."""

    sequence: Sequence
    first: int
    count: int

    @property
    def completes(self) -> bool:
        """True if the sequence has nothing left to compute after it: a next token can be chosen."""
        return self.first + self.count == len(self.sequence.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt among these."""
        return max(0, min(self.first + self.count, self.sequence.prompt_length) - self.first)


class Scheduler:
    """The batch and the queue before it. Not thread-safe: whoever calls `enqueue`, `join` or `take_out` holds the engine's lock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def enqueue(self, sequence: Sequence, retry_after_seconds: float) -> None:
        """Put a sequence into the queue, behind all whose turn is not later than its own. Raises ResourceExhausted when `requests_waiting_max` wait already."""
        if len(self.waiting) >= self._limits.requests_waiting_max:
            raise ResourceExhausted(
                f"{len(self.waiting)} requests are waiting, the limit is requests_waiting_max = {self._limits.requests_waiting_max}; "
                f"try again in {retry_after_seconds:.1f} s",
                retry_after_seconds,
            )
        self._insert(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Have a running sequence wait for its place again, in its old turn; the queue's limit is for those who come."""
        self.running.remove(sequence)
        self._insert(sequence)

    def _insert(self, sequence: Sequence) -> None:
        place = len(self.waiting)
        while place and self.waiting[place - 1].turn_seconds > sequence.turn_seconds:
            place -= 1
        self.waiting.insert(place, sequence)

    def take_out(self, unwanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove and return the sequences, running or waiting, that `unwanted` is true for; their places are free at once."""
        out = [sequence for sequence in (*self.running, *self.waiting) if unwanted(sequence)]
        for sequence in out:
            if sequence in self.running:
                self.running.remove(sequence)
            else:
                self.waiting.remove(sequence)
        return out

    def join(self) -> list[Sequence]:
        """Give waiting sequences the free places, in order; returns those that got one."""
        joined = []
        while self.waiting and self._has_place(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            joined.append(self.running[-1])
        return joined

    def plan(self) -> list[Slot]:
        """The slots of the next step, from the running sequences; empty when there is nothing to do."""
        slots = [Slot(sequence, sequence.computed, 1) for sequence in self.running if sequence.to_run == 1]
        budget = self._limits.step_tokens_max - len(slots)
        for sequence in self.running:
            if sequence.to_run > 1 and budget > 0:
                slots.append(Slot(sequence, sequence.computed, min(sequence.to_run, budget)))
                budget -= slots[-1].count
        return slots

    def _has_place(self, sequence: Sequence) -> bool:
        reserved = sum(running.kv_tokens_max for running in self.running)
        return len(self.running) < self._limits.sequences_max and reserved + sequence.kv_tokens_max <= self._limits.kv_tokens_max
