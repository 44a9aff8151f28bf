"""What the server needs of an engine, whichever runs the model: the embedded one (`engine_thread`) or vLLM (adapters).

Owns the words between them. Knows no engine, no torch and no messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_worker.domain.cached_blocks import BlockChanges
from inference_worker.domain.ports import LayerFigures
from inference_worker.domain.report import EngineLoad, EngineTotals
from inference_worker.domain.request import Piece, Request

if TYPE_CHECKING:  # memories are made of tensors
    from inference_worker.domain.request_leases import Leases

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is; it does not change while it runs.

    engine:               `embedded` or `vllm`
    version:              of the engine; empty: that of the worker's build
    dtype:                number format of weights and KV
    context_tokens_max:   most tokens of prompt and answer together
    requests_running_max: requests in the batch at once
    requests_waiting_max: requests waiting for a place in it
    block_tokens:         of a block of the prefix cache; 0: `watch_blocks` tells of none
    embedding_dim:        length of the vectors that `embed` gives; 0: it is never called
    """

    engine: str
    version: str
    dtype: str
    context_tokens_max: int
    eos_token_ids: frozenset[int]
    requests_running_max: int
    requests_waiting_max: int
    block_tokens: int = 0
    embedding_dim: int = 0


class Generation(Protocol):
    """One answer under way."""

    def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come, the last one with `finish`; for one reader. Raises the error that ended the request."""

    def cancel(self) -> None:
        """Nobody reads any more: end it before the next step. Does nothing once it is over."""


class RunningEngine(Protocol):
    """An engine that takes requests. Called from the event loop."""

    @property
    def facts(self) -> EngineFacts:
        """What it is."""

    @property
    def load(self) -> EngineLoad:
        """How busy it is now."""

    @property
    def totals(self) -> EngineTotals:
        """What it has done since the start."""

    @property
    def wait_seconds_predicted(self) -> float:
        """How long a request that came now would wait for its place in the batch, as far as it can be told."""

    @property
    def draining(self) -> bool:
        """True once it refuses new requests."""

    def layer_figures(self) -> Mapping[int, LayerFigures]:
        """Figures of each Engram layer, of all memories together since the start."""

    def check(self, request: Request) -> None:
        """Raise InvalidArgument, naming the field, for a request that it cannot run; DeadlineExceeded if its time is over."""

    def begin(self, request: Request, leases: Leases) -> Generation:
        """Queue a request.

        leases: on the memories that it uses to its end; the engine releases them then, but not where this raises.
        Raises what `check` does, ResourceExhausted when the queue is full, Draining, Unavailable when the engine has died.
        """

    async def embed(self, texts: Sequence[Sequence[int]]) -> Sequence[Vector]:
        """Vectors of texts, given as token ids: float32 [embedding_dim] each, of length 1, in their order.

        Raises InvalidArgument naming the text, ResourceExhausted when too many texts wait, Draining.
        """

    def watch_blocks(self) -> AsyncGenerator[BlockChanges, None]:
        """The blocks of the prefix cache, first all that are there, then what changes. Raises ResourceExhausted, Draining."""
