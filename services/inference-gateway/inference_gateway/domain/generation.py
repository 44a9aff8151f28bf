"""A generation as plain values: what is asked of a worker, and what comes back piece by piece.

Owns the shapes. Does not know HTTP's names for them (http_models, answers) or the wire (adapters.worker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from inference_gateway.domain.memories import WORKERS_DEFAULT, Memory, MemoryChoice
from inference_gateway.domain.prefixes import Prefix, PrefixChoice
from inference_gateway.domain.worker_figures import WorkerFigures
from treadle.contract import Late


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat, its text already one string.

    tool_calls:   calls that an assistant's turn made, as templates see them: `arguments` an object
    tool_call_id: of the call that a tool's turn answers
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Turns that the chat template makes into one text. `tools`: those that the model may call, as the caller wrote them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


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
    logit_bias:   (token id, what is added to its logit)
    presence_penalty, frequency_penalty, repetition_penalty, top_k (0: all), min_p: as the worker's proto says
    """

    tokens_max: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What a request says about memory; None leaves it to the worker.

    engram: the memory that it chooses in a field of its own
    prefix: the long prefix that it is to be answered behind; None: none
    """

    engram: MemoryChoice | None = None
    wait_seconds_max: float | None = None
    late: Late | None = None
    prefix: PrefixChoice | None = None


class Priority(StrEnum):
    """Who begins first of those that wait."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Wish:
    """A request once its JSON is understood: which model continues which prompt, and how.

    model:      as it was asked for, so possibly an alias that chooses a memory
    priority:   None: the caller's
    cache_salt: keeps its cached prefixes apart from others of the same tenant
    session:    requests with the same one should meet the same worker; "": they need not
    """

    model: str
    prompt: Prompt
    sampling: Sampling
    memory: MemoryWish = MemoryWish()
    priority: Priority | None = None
    cache_salt: str | None = None
    session: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """What goes to a worker. `cache_salt` keeps one tenant's cached prefixes apart from another's.

    engram:  the memory whose choice counts, whoever made it; that of `memory` is the field's alone
    model:   name under which it is served: only workers of that model are asked
    session: requests with the same one should meet the same worker; "": they need not
    joins:   another answer to a request that was let in: it waits for its place as long as it takes
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    memory: MemoryWish
    cache_salt: str
    engram: MemoryChoice = WORKERS_DEFAULT
    model: str = ""
    session: str = ""
    priority: Priority = Priority.NORMAL
    joins: bool = False


class FinishReason(StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"  # a stop string, a stop token or end of sequence
    LENGTH = "length"  # tokens_max or the model's limit
    TOOL_CALLS = "tool_calls"  # stopped, and calls tools; only in answers, no worker says it
    ABORT = "abort"  # its caller cancelled it; neither does any worker say this


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
    """What one piece of memory did for a request.

    missing_because: why rows are missing: late, unavailable, damaged, gone, refused; of a prefix off_task, unavailable; empty: nothing is
    lookups, lookups_outside, fell_back, prefix_tokens: of a prefix alone, as the worker's proto says
    """

    kind: str
    name: str
    version: str
    transport: str
    tickets: int
    tickets_in_time: int
    rows_missing: int
    shadowed: bool
    missing_because: str = ""
    lookups: int = 0
    lookups_outside: int = 0
    fell_back: bool = False
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer. The first names the worker that makes it; the last has a finish reason, usage and reports.

    choice: which of the answers of one request it belongs to
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    degraded: bool = False
    memory: tuple[MemoryReport, ...] = ()
    worker: str = ""
    choice: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker says about itself.

    memories, prefixes:     include those that do not fit its model
    requests_running, …max: in its batch now, and at most
    requests_waiting, …max: for a place in it; 0 as a maximum: not told
    wait_seconds_predicted: of a request that came now
    block_tokens:           of a block of its prefix cache; 0: it tells of none
    embedding_dim:          length of its vectors; 0: it gives none
    """

    model: str
    model_dir: Path
    tokenizer_digest: str
    context_tokens_max: int
    draining: bool
    build_version: str
    pid: int
    memories: tuple[Memory, ...] = ()
    requests_running: int = 0
    requests_running_max: int = 0
    requests_waiting: int = 0
    requests_waiting_max: int = 0
    wait_seconds_predicted: float = 0.0
    block_tokens: int = 0
    embedding_dim: int = 0
    engine: str = ""
    figures: WorkerFigures | None = field(default=None, compare=False)
    prefixes: tuple[Prefix, ...] = ()
