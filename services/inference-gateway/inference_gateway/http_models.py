"""The JSON that strangers send, as pydantic models: the one place where types must be checked.

Owns the shape of requests: names, types, ranges. What a field means is request_parsing's. Unknown fields are kept in
`model_extra`, so that they can be refused or counted by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from inference_gateway.domain.generation import Priority
from treadle.contract import Late
from treadle.contract.policy import WAIT_SECONDS_MAX

MODEL_NAME_CHARACTERS_MAX = 512  # of a model, and in an alias of a memory and its version
ENGRAM_CHARACTERS_MAX = 256  # of NAME@VERSION: a name has up to 128, a version 64
STOP_CHARACTERS_MAX = 256  # a worker holds text back while a stop string may be beginning
STOP_TOKENS_MAX = 64
CACHE_SALT_CHARACTERS_MAX = 256
LOGPROBS_MAX = 20  # of rivals of a token, as far as the worker goes
TIMEOUT_SECONDS_MAX = 1e6
TOKEN_ID_MAX = 2**32 - 1
LOGIT_BIAS_TOKENS_MAX = 1024  # as far as a worker goes
BIAS_MAX, PENALTY_MAX, REPETITION_PENALTY_MAX = 100.0, 2.0, 10.0
TOOLS_MAX, TOOL_CALLS_MAX = 128, 128  # of a request, of a message
FUNCTION_NAME_CHARACTERS_MAX = 256
EMBED_INPUTS_MAX = 64  # as far as a worker goes
DIMENSIONS_MAX = 1 << 20
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1


def _shape(value: Any) -> str | None:
    """Tag of a value's shape. Tags stand in angle brackets, so that they are never taken for names of fields."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list | tuple):
        return None
    first = value[0] if value else None
    if isinstance(first, list | tuple):
        return "<lists of tokens>"
    return "<tokens>" if isinstance(first, int) else "<list>"


def _either(expected: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="shape", custom_error_message=f"{expected} expected")


TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
Bias = Annotated[float, Field(ge=-BIAS_MAX, le=BIAS_MAX)]
Tokens = Annotated[tuple[TokenId, ...], Field(min_length=1, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS_MAX)]
Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[tuple[StopText, ...], Field(fail_fast=True), Tag("<list>")],
    _either("a string or a list of strings"),
]
TextPrompts = Annotated[tuple[str, ...], Field(min_length=1, fail_fast=True)]
TokenPrompts = Annotated[tuple[Tokens, ...], Field(min_length=1, fail_fast=True)]
PromptField = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TextPrompts, Tag("<list>")]
    | Annotated[Tokens, Tag("<tokens>")]
    | Annotated[TokenPrompts, Tag("<lists of tokens>")],
    _either("a string or a list of token ids"),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(_Body):
    """Part of a message's content; text is the only kind that is understood."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[tuple[TextPart, ...], Field(fail_fast=True), Tag("<list>")],
    _either("a string or a list of text parts"),
]


FunctionName = Annotated[str, Field(min_length=1, max_length=FUNCTION_NAME_CHARACTERS_MAX)]


class Function(_Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    """A tool that the model may use; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionCall(_Body):
    """The call of a function. `arguments`: an object as JSON text."""

    name: FunctionName
    arguments: str


class ToolCall(_Body):
    """A call that an assistant's turn made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Body):
    """One turn. `developer` is another name for `system`; `tool` gives what a call came to; only an assistant's content may be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Field(max_length=TOOL_CALLS_MAX, fail_fast=True)] | None = None
    tool_call_id: str | None = None


class StreamOptions(_Body):
    """What a stream also carries."""

    include_usage: bool | None = None


class MemoryPolicyOptions(_Body):
    """How long one layer may wait for memory, seconds, and then what; absent: the worker's setting."""

    model_config = ConfigDict(extra="forbid")

    wait_seconds_max: float | None = Field(default=None, ge=0, le=WAIT_SECONDS_MAX)
    late: Late | None = None


class TreadleOptions(_Body):
    """What OpenAI's API has no field for. `session` is reserved: it must be null.

    `engram`: the memory to answer with, `NAME` or `NAME@VERSION` (8 to 64 hexadecimal digits from its beginning); `none`;
    `default`: the worker's; null or absent: what the model's name (`MODEL+MEMORY`) says, else the key's default, else the worker's.
    `prefix`: the long prefix to answer behind, `NAME` or `NAME@VERSION`, without its tokens in the prompt; `none`, null or absent: none.
    `timeout_seconds`: longest time for the whole answer, within the gateway's own limit. `priority`: who begins first of those
    that wait; absent: the key's, else normal.
    """

    model_config = ConfigDict(extra="forbid")

    engram: str | None = Field(default=None, max_length=ENGRAM_CHARACTERS_MAX)
    prefix: str | None = Field(default=None, max_length=ENGRAM_CHARACTERS_MAX)
    session: Any = None
    policy: MemoryPolicyOptions | None = None
    timeout_seconds: float | None = Field(default=None, gt=0, le=TIMEOUT_SECONDS_MAX)
    priority: Priority | None = None


class _GenerationRequest(_Body):
    model: str = Field(min_length=1, max_length=MODEL_NAME_CHARACTERS_MAX)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=SEED_MIN, le=SEED_MAX)
    stop: Stop | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=STOP_TOKENS_MAX, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=LOGIT_BIAS_TOKENS_MAX)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-PENALTY_MAX, le=PENALTY_MAX)
    frequency_penalty: float | None = Field(default=None, ge=-PENALTY_MAX, le=PENALTY_MAX)
    repetition_penalty: float | None = Field(default=None, gt=0, le=REPETITION_PENALTY_MAX)
    top_k: int | None = Field(default=None, ge=-1, le=TOKEN_ID_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARACTERS_MAX)] | None = None
    treadle: TreadleOptions | None = None


class ChatCompletionRequest(_GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    tools: Annotated[tuple[Tool, ...], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_GenerationRequest):
    """Body of POST /v1/completions. Without max_tokens, 16 tokens are generated."""

    prompt: PromptField
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)


class EmbeddingRequest(_Body):
    """Body of POST /v1/embeddings. `dimensions`: nothing but the model's own can be had."""

    model: str = Field(min_length=1, max_length=MODEL_NAME_CHARACTERS_MAX)
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=DIMENSIONS_MAX)
