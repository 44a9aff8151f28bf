"""From a request's JSON to a wish of the domain: what each field means, which are refused, which are ignored.

Owns the lists of known fields. Refusals name the field as OpenAI does: `messages[0].content`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from inference_gateway import http_models
from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import (
    ChatPrompt,
    MemoryWish,
    Message,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Wish,
)
from inference_gateway.domain.memories import MemoryChoice, parse_choice
from treadle.contract.errors import InvalidArgument

Model = TypeVar("Model", bound=BaseModel)
COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's, for /v1/completions only
MESSAGE_CONTENT_JOINT = "\n"  # between the text parts of one message, as vLLM joins them

# Known fields that are not supported yet, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
}
UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "store": (None, False),
}
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
_UNSUPPORTED_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "audio": (None,),
}
# Fields that change nothing here, each with its own label in the metric; every other unknown one is counted as "other".
IGNORED = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Named limits of a request that are settings."""

    messages_max: int
    stop_strings_max: int


@dataclass(frozen=True, slots=True)
class Order:
    """A request, understood: the wish, how its answer is to be written, and the labels of ignored fields."""

    wish: Wish
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def parse_chat(body: bytes, limits: Limits) -> Order:
    """The order in the body of /v1/chat/completions. Raises RequestRefused naming the field."""
    request = _validated(http_models.ChatCompletionRequest, body)
    _refuse_unsupported(request, UNSUPPORTED_CHAT)
    if len(request.messages) > limits.messages_max:
        raise RequestRefused(f"'messages': at most {limits.messages_max}", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestRefused("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    prompt = ChatPrompt(tuple(_message(index, message) for index, message in enumerate(request.messages)))
    tokens_max = request.max_completion_tokens or request.max_tokens
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    ignored = [*_ignored(request, UNSUPPORTED_CHAT), *("messages" for message in request.messages if _extras(message))]
    return _order(request, prompt, _sampling(request, tokens_max, top_logprobs, limits), ignored)


def parse_completion(body: bytes, limits: Limits) -> Order:
    """The order in the body of /v1/completions. Raises RequestRefused naming the field."""
    request = _validated(http_models.CompletionRequest, body)
    _refuse_unsupported(request, UNSUPPORTED_COMPLETION)
    sampling = _sampling(request, request.max_tokens or COMPLETION_TOKENS_DEFAULT, request.logprobs, limits)
    return _order(request, _prompt(request.prompt), sampling, list(_ignored(request, UNSUPPORTED_COMPLETION)))


def _order(request: http_models._GenerationRequest, prompt: Prompt, sampling: Sampling, ignored: list[str]) -> Order:
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestRefused("'stream_options' needs 'stream': true", param="stream_options")
    return Order(
        wish=Wish(request.model, prompt, sampling, _memory(request.treadle)),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        ignored=tuple(ignored),
    )


def _sampling(
    request: http_models._GenerationRequest, tokens_max: int | None, top_logprobs: int | None, limits: Limits
) -> Sampling:
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop or ()
    if len(stop) > limits.stop_strings_max:
        raise RequestRefused(f"'stop': at most {limits.stop_strings_max} strings", param="stop")
    return Sampling(
        tokens_max=tokens_max,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=request.seed,
        stop=stop,
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=bool(request.ignore_eos),
        top_logprobs=top_logprobs,
    )


def _memory(options: http_models.TreadleOptions | None) -> MemoryWish:
    if options is None:
        return MemoryWish()
    for name in ("prefix", "session"):
        if getattr(options, name) is not None:
            raise RequestRefused(f"'treadle.{name}' is not supported yet", param=f"treadle.{name}", code="unsupported_value")
    policy = options.policy or http_models.MemoryPolicyOptions()
    return MemoryWish(_engram(options.engram), policy.wait_seconds_max, policy.late)


def _engram(text: str | None) -> MemoryChoice | None:
    try:
        return None if text is None else parse_choice(text)
    except InvalidArgument as error:
        raise RequestRefused(f"'treadle.engram': {error}", param="treadle.engram", code="invalid_value") from error


def _message(index: int, message: http_models.ChatMessage) -> Message:
    place = f"messages[{index}]"
    _refuse_unsupported(message, _UNSUPPORTED_MESSAGE, f"{place}.")
    if message.content is None and message.role != "assistant":
        raise RequestRefused(f"'{place}.content' is needed for the role {message.role!r}", param=f"{place}.content")
    parts = message.content or ""
    text = parts if isinstance(parts, str) else MESSAGE_CONTENT_JOINT.join(part.text for part in parts)
    return Message("system" if message.role == "developer" else message.role, text, message.name)


def _prompt(prompt: str | tuple[Any, ...]) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    first = prompt[0]
    if isinstance(first, int):
        return TokenPrompt(prompt)
    if len(prompt) > 1:
        raise RequestRefused("'prompt': one prompt a request; send several requests for several", param="prompt")
    return TextPrompt(first) if isinstance(first, str) else TokenPrompt(first)


def _refuse_unsupported(request: BaseModel, table: Mapping[str, tuple[Any, ...]], place: str = "") -> None:
    for name, value in _extras(request).items():
        if name in table and not any(type(value) is type(known) and value == known for known in table[name]):
            raise RequestRefused(f"'{place}{name}': this value is not supported", param=place + name, code="unsupported_value")


def _ignored(request: BaseModel, known: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Labels of the fields that meant nothing."""
    for name in _extras(request):
        if name not in known:
            yield name if name in IGNORED else "other"


def _extras(request: BaseModel) -> dict[str, Any]:
    return request.model_extra or {}


def _validated(cls: type[Model], body: bytes) -> Model:
    try:
        return cls.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _refusal(first["type"], first["loc"], first["msg"]) from error


def _refusal(kind: str, place: tuple[int | str, ...], message: str) -> RequestRefused:
    param = _param(place)
    if kind == "json_invalid":
        return RequestRefused(f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if not param:
        return RequestRefused("the body must be a JSON object")
    if kind == "missing":
        return RequestRefused(f"'{param}' is missing", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return RequestRefused(f"'{param}' is unknown", param=param, code="unknown_parameter")
    if kind == "too_short":
        message = "at least one item is needed"
    return RequestRefused(f"'{param}': {message}", param=param, code="invalid_value")


def _param(place: tuple[int | str, ...]) -> str:
    """`messages[0].content` for a pydantic location; the tags of unions, in angle brackets, are left out."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        elif not step.startswith("<"):
            text += f".{step}" if text else step
    return text
