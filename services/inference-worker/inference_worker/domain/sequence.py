"""A request while it runs: its tokens, how many of them are computed, and what it has met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference_worker.domain.lease import Lease
from inference_worker.domain.ports import Sink
from inference_worker.domain.request import Request, TokenLogprob, Usage
from inference_worker.domain.text import TextStream

if TYPE_CHECKING:  # the scheduler and its tests know sequences without torch
    import torch

    from inference_worker.domain.engram import EngramMemory
    from inference_worker.domain.prefix import OpenPrefix
    from inference_worker.domain.prefix_run import PrefixRun
    from treadle.nn.kv import SequenceKV


@dataclass(slots=True)
class MemoryCounts:
    """What the Engram memory did for one request."""

    tickets: int = 0
    tickets_in_time: int = 0
    rows_missing: int = 0
    missing_because: str = ""  # of the first that did not come


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request in the engine; owned by whoever runs the steps, but for `cancelled`, which anybody may set.

    tokens:     prompt and answer so far
    tokens_max: most tokens it may have; KV for all of them is reserved
    computed:   tokens whose KV is there; tokens[computed:] are still to run
    kv:         keys, values and what the fusion keeps; there while the sequence has its place
    lease:      on the memory that it uses, or on none; released once it is over
    prefix_lease: the same, on the long prefix that it is answered behind
    prefix:     what that does for it; None: it has none
    generator:  of this request alone; None: greedy
    block_keys: prefix-cache keys of the full blocks of `tokens` known so far
    published:  blocks of it that are in the prefix cache already
    degraded:   True once rows were missing: nothing made from it is shared
    """

    request: Request
    sink: Sink
    text: TextStream
    tokens: list[int]
    tokens_max: int
    computed: int = 0
    cached: int = 0
    kv: SequenceKV | None = None
    lease: Lease[EngramMemory] = field(default_factory=Lease)
    prefix_lease: Lease[OpenPrefix] = field(default_factory=Lease)
    prefix: PrefixRun | None = None
    generator: torch.Generator | None = None
    block_keys: list[bytes] = field(default_factory=list)
    published: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    memory: MemoryCounts = field(default_factory=MemoryCounts)
    degraded: bool = False
    cancelled: bool = False
    started_ns: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def turn_seconds(self) -> float:
        """Its place among those that wait, the smallest first."""
        return self.request.turn_seconds(self.started_ns / 1e9)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def to_run(self) -> int:
        """Tokens whose KV is not there yet: more than one during prefill."""
        return len(self.tokens) - self.computed

    @property
    def position_offset(self) -> int:
        """Added to the places of its tokens: where the model is told that they stand."""
        return self.prefix.position_offset if self.prefix is not None else 0

    @property
    def kv_offset(self) -> int:
        """Tokens of KV before its own: those of the prefix, where the exact KV is used."""
        return self.prefix.prefix.tokens if self.prefix is not None and self.prefix.is_exact else 0

    @property
    def kv_tokens_max(self) -> int:
        """Tokens of KV that it reserves."""
        return self.kv_offset + self.tokens_max

    def restart_exact(self) -> None:
        """Begin anew behind the exact KV of the prefix; nothing of it has gone out yet."""
        assert self.prefix is not None, "only a request with a prefix has something to fall back to"
        self.prefix.fall_back()
        self.kv, self.computed, self.cached, self.published = None, 0, 0, 0
        self.block_keys, self.prompt_logprobs = [], []
        self.memory, self.degraded = MemoryCounts(), bool(self.request.missing)  # what the first pass met is no part of the answer

    @property
    def usage(self) -> Usage:
        """Tokens counted so far."""
        return Usage(self.prompt_length, self.cached, self.generated)


def kv_of(sequence: Sequence) -> SequenceKV:
    """The KV of a sequence that has its place in the batch."""
    assert sequence.kv is not None, "a sequence in the batch has its KV"
    return sequence.kv
