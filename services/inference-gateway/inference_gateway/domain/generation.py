"""A generation as plain values: what is asked of a worker, and what comes back piece by piece.

Owns the shapes. Does not know HTTP's names for them (http_models, answers) or the wire (adapters.worker).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference_gateway.domain.memories import WORKERS_DEFAULT, Memory, MemoryChoice
from treadle.contract import Late


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat, its text already one string."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Turns that the chat template makes into one text."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be continued as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to be continued as they stand."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop.

    tokens_max:   None: up to the model's limit
    temperature:  0: greedy
    seed:         any integer; None: random
    top_logprobs: None: no log-probabilities; n: of the chosen token and the n most likely ones
    """

    tokens_max: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What a request says about memory; None leaves it to the worker.

    engram: the memory that it chooses in a field of its own
    """

    engram: MemoryChoice | None = None
    wait_seconds_max: float | None = None
    late: Late | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A request once its JSON is understood: which model continues which prompt, and how.

    model: as it was asked for, so possibly an alias that chooses a memory
    """

    model: str
    prompt: Prompt
    sampling: Sampling
    memory: MemoryWish = MemoryWish()


@dataclass(frozen=True, slots=True)
class Generation:
    """What goes to a worker. `cache_salt` keeps one tenant's cached prefixes apart from another's.

    engram: the memory whose choice counts, whoever made it; that of `memory` is the field's alone
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    memory: MemoryWish
    cache_salt: str
    engram: MemoryChoice = WORKERS_DEFAULT


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"  # a stop string, a stop token or end of sequence
    LENGTH = "length"  # tokens_max or the model's limit


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its bytes (it may be half a character), the natural logarithm of its probability, and its rivals."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for one generation; `cached_tokens` are those of the prompt that were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What one piece of memory did for a request."""

    kind: str
    name: str
    version: str
    transport: str
    tickets: int
    tickets_in_time: int
    rows_missing: int
    shadowed: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer. The last one has a finish reason, usage and reports."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    degraded: bool = False
    memory: tuple[MemoryReport, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker says about itself. `memories` includes those that do not fit its model."""

    model: str
    model_dir: Path
    tokenizer_digest: str
    context_tokens_max: int
    draining: bool
    build_version: str
    pid: int
    memories: tuple[Memory, ...] = ()
