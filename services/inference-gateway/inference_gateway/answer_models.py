"""The JSON that goes out, in OpenAI's shapes, as typed dictionaries: nothing to check, only to name.

Owns the words of answers. Filling them is answers', describing them to strangers openapi's.
"""

from __future__ import annotations

from typing import (
    Literal,
    NotRequired,  # typing's own is not understood by pydantic before Python 3.12
)

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class UsageAnswer(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class MemoryAnswer(TypedDict):
    """What one piece of memory, `engram` or `prefix`, did for the request; tickets are layers of steps it took part in.

    `missing_because`: why rows are missing: late, unavailable, damaged, gone, refused; of a prefix `off_task` (the prompt is not what its
    dictionary was made for) or `unavailable` (it was answered without); empty: nothing is missing.
    Of a prefix alone: `lookups` in its dictionary, those `lookups_outside` its calibration, `fell_back` to its exact KV, and the
    tokens that it stands for.
    """

    kind: str
    name: str
    version: str
    transport: str
    tickets: int
    tickets_in_time: int
    rows_missing: int
    shadowed: bool
    missing_because: str
    lookups: int
    lookups_outside: int
    fell_back: bool
    prefix_tokens: int


class TreadleAnswer(TypedDict):
    """What memory did for the request. `degraded`: the answer was made with memory missing."""

    degraded: bool
    memory: list[MemoryAnswer]


class RivalLogprob(TypedDict):
    """A token that could have stood at this place."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(RivalLogprob):
    """A token of the answer with its log-probability."""

    top_logprobs: list[RivalLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat answer."""

    content: list[ContentLogprob]
    refusal: None


class FunctionCallAnswer(TypedDict):
    """The function that is called; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCallAnswer


class ToolCallDelta(ToolCallAnswer):
    """A call of a tool in a chunk: each comes whole."""

    index: int


class AnswerMessage(TypedDict):
    """The answer's turn. `content` is null where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoice(TypedDict):
    """One answer; `abort`: its caller cancelled it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


class ChatCompletion(TypedDict):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    treadle: TreadleAnswer


class Delta(TypedDict):
    """What a chunk adds to the answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """A chunk's part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None


class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat answer. `usage` is there if asked for, `treadle` in the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageAnswer | None]
    treadle: NotRequired[TreadleAnswer]


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion; offsets count characters from the beginning of its text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None


class Completion(TypedDict):
    """Answer of /v1/completions, or one event of it. In events `usage` is there if asked for, `treadle` in the last one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageAnswer | None]
    treadle: NotRequired[TreadleAnswer]


class EmbeddingAnswer(TypedDict):
    """The vector of one input, of length 1: numbers, or their float32 bytes, little-endian, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


class Cancelled(TypedDict):
    """A request was told to end."""

    id: str
    cancelled: Literal[True]


class ModelTreadle(TypedDict):
    """The memory that requests for this name are answered with which choose no other; null: none.

    `default`: requests get it that only name the model; `open`: the first request waits for nothing.
    """

    engram: str | None
    version: str | None
    default: bool
    open: bool


class ModelAnswer(TypedDict):
    """A model that is served here, under its own name or as `MODEL+MEMORY`.

    `max_model_len`: most tokens of prompt and answer together.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    treadle: ModelTreadle


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class ErrorDetail(TypedDict):
    """What went wrong. `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Any answer that is not a success, and the event that ends a stream early."""

    error: ErrorDetail


class Health(TypedDict):
    """The process lives."""

    status: Literal["ok"]


class WorkerReadiness(TypedDict):
    """One worker. `model`: null before it has answered; `reason`: why it gets no requests."""

    name: str
    model: str | None
    state: Literal["ready", "away", "draining", "differs", "resting"]
    reason: NotRequired[str]


class Readiness(TypedDict):
    """Whether requests would be served now, and if not, why. Beyond loopback `reason` and `workers` are for callers with a key."""

    ready: bool
    reason: NotRequired[str]
    workers: NotRequired[list[WorkerReadiness]]


class Version(TypedDict):
    """Versions of the build and of the protocol between treadle's services."""

    version: str
    proto_version: str
