"""From a request's JSON to a wish of the domain: what each field means, which are refused, which are ignored.

Owns the lists of known fields. Refusals name the field as OpenAI does: `messages[0].content`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from inference_gateway import http_models
from inference_gateway.chat_parsing import chat_prompt, extras
from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import (
    MemoryWish,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Wish,
)
from inference_gateway.domain.memories import MemoryChoice, parse_choice
from inference_gateway.domain.prefixes import FIELD, PrefixChoice, parse_prefix
from inference_gateway.domain.tool_calls import CALL_CLOSES
from treadle.contract.errors import InvalidArgument

Model = TypeVar("Model", bound=BaseModel)
TOKEN_ID_DIGITS = len(str(http_models.TOKEN_ID_MAX))
COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's, for /v1/completions only

# Known fields that are not supported, with the values that ask for nothing.
UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
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
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
}
_WHY = {  # where it may be asked what to do instead
    "response_format": "answers are not made to follow a schema; ask for the form in the prompt, and check what comes",
    "functions": "give them as 'tools'",
    "function_call": "say it with 'tool_choice'",
}
# Fields that change nothing here, each with its own label in the metric; every other unknown one is counted as "other".
SESSION_FIELDS = ("prompt_cache_key", "user")  # they say which requests should meet the same worker, and nothing else here
IGNORED = frozenset(
    {
        "metadata", "service_tier", "safety_identifier", "prompt_cache_retention",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Named limits of a request that are settings."""

    messages_max: int
    stop_strings_max: int
    choices_max: int
    prompts_max: int


@dataclass(frozen=True, slots=True)
class Order:
    """A request, understood: the wishes, how their answers are to be written, and the labels of ignored fields.

    wishes:  one for each prompt
    choices: answers to each of them
    timeout_seconds: longest time for the answer; None: the gateway's
    """

    wishes: tuple[Wish, ...]
    choices: int
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]
    timeout_seconds: float | None = None

    @property
    def wish(self) -> Wish:
        """The first one: but for the prompt, all are alike."""
        return self.wishes[0]


@dataclass(frozen=True, slots=True)
class EmbeddingOrder:
    """A request for vectors, understood. `dimensions`: None: the model's own."""

    model: str
    prompts: tuple[TextPrompt | TokenPrompt, ...]
    base64: bool
    dimensions: int | None
    ignored: tuple[str, ...]


def parse_chat(body: bytes, limits: Limits) -> Order:
    """The order in the body of /v1/chat/completions. Raises RequestRefused naming the field."""
    request = _validated(http_models.ChatCompletionRequest, body)
    _refuse_unsupported(request, UNSUPPORTED_CHAT)
    if len(request.messages) > limits.messages_max:
        raise RequestRefused(f"'messages': at most {limits.messages_max}", param="messages")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestRefused("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    prompt = chat_prompt(request)
    tokens_max = request.max_completion_tokens or request.max_tokens
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = _sampling(request, tokens_max, top_logprobs, limits)
    if prompt.tools and request.parallel_tool_calls is False:
        sampling = replace(sampling, stop=_stop_after_one_call(sampling.stop, limits))
    ignored = [*_ignored(request, UNSUPPORTED_CHAT), *("messages" for message in request.messages if extras(message))]
    return _order(request, (prompt,), sampling, ignored, limits)


def parse_completion(body: bytes, limits: Limits) -> Order:
    """The order in the body of /v1/completions. Raises RequestRefused naming the field."""
    request = _validated(http_models.CompletionRequest, body)
    _refuse_unsupported(request, UNSUPPORTED_COMPLETION)
    if request.best_of not in (None, request.n or 1):
        raise RequestRefused(
            "'best_of': every answer is returned, so only the value of 'n'", param="best_of", code="unsupported_value"
        )
    sampling = _sampling(request, request.max_tokens or COMPLETION_TOKENS_DEFAULT, request.logprobs, limits)
    prompts = _prompts(request.prompt, "prompt", limits.prompts_max)
    return _order(request, prompts, sampling, list(_ignored(request, UNSUPPORTED_COMPLETION)), limits)


def parse_embedding(body: bytes, limits: Limits) -> EmbeddingOrder:
    """The order in the body of /v1/embeddings. Raises RequestRefused naming the field."""
    request = _validated(http_models.EmbeddingRequest, body)
    return EmbeddingOrder(
        model=request.model,
        prompts=_prompts(request.input, "input", http_models.EMBED_INPUTS_MAX),
        base64=request.encoding_format == "base64",
        dimensions=request.dimensions,
        ignored=tuple(_ignored(request, {})),
    )


def _order(
    request: http_models._GenerationRequest, prompts: Sequence[Prompt], sampling: Sampling, ignored: list[str], limits: Limits
) -> Order:
    options, more = request.stream_options, request.treadle or http_models.TreadleOptions()
    if options is not None and not request.stream:
        raise RequestRefused("'stream_options' needs 'stream': true", param="stream_options")
    choices = request.n or 1
    if choices > limits.choices_max:
        raise RequestRefused(f"'n': at most {limits.choices_max}", param="n", code="invalid_value")
    memory = _memory(request.treadle)
    return Order(
        wishes=tuple(
            Wish(request.model, prompt, sampling, memory, more.priority, request.cache_salt, _session(request))
            for prompt in prompts
        ),
        choices=choices,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        ignored=tuple(ignored),
        timeout_seconds=more.timeout_seconds,
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
        logit_bias=_logit_bias(request.logit_bias or {}),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
    )


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= TOKEN_ID_DIGITS and int(key) <= http_models.TOKEN_ID_MAX):
            raise RequestRefused(f"'logit_bias': {key[:64]!r} is no token id", param="logit_bias", code="invalid_value")
    return tuple((int(key), value) for key, value in bias.items())


def _stop_after_one_call(stop: tuple[str, ...], limits: Limits) -> tuple[str, ...]:
    """Stop strings that end an answer with its first call of a tool."""
    if len(stop) >= limits.stop_strings_max:
        raise RequestRefused(
            f"'stop': at most {limits.stop_strings_max - 1} strings beside 'parallel_tool_calls': false, which takes one",
            param="stop",
        )
    return (*stop, CALL_CLOSES)


def _memory(options: http_models.TreadleOptions | None) -> MemoryWish:
    if options is None:
        return MemoryWish()
    if options.session is not None:
        raise RequestRefused("'treadle.session' is not supported yet", param="treadle.session", code="unsupported_value")
    policy = options.policy or http_models.MemoryPolicyOptions()
    return MemoryWish(_engram(options.engram), policy.wait_seconds_max, policy.late, _prefix(options.prefix))


def _engram(text: str | None) -> MemoryChoice | None:
    try:
        return None if text is None else parse_choice(text)
    except InvalidArgument as error:
        raise RequestRefused(f"'treadle.engram': {error}", param="treadle.engram", code="invalid_value") from error


def _prefix(text: str | None) -> PrefixChoice | None:
    try:
        return None if text is None else parse_prefix(text)
    except InvalidArgument as error:
        raise RequestRefused(f"'{FIELD}': {error}", param=FIELD, code="invalid_value") from error


def _prompts(prompt: str | tuple[Any, ...], field: str, count_max: int) -> tuple[TextPrompt | TokenPrompt, ...]:
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    if isinstance(prompt[0], int):
        return (TokenPrompt(prompt),)
    if len(prompt) > count_max:
        raise RequestRefused(f"'{field}': at most {count_max} in one request", param=field, code="invalid_value")
    return tuple(TextPrompt(each) if isinstance(each, str) else TokenPrompt(each) for each in prompt)


def _refuse_unsupported(request: BaseModel, table: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in extras(request).items():
        if name in table and not any(type(value) is type(known) and value == known for known in table[name]):
            why = f"; {_WHY[name]}" if name in _WHY else ""
            raise RequestRefused(f"'{name}': this value is not supported{why}", param=name, code="unsupported_value")


def _ignored(request: BaseModel, known: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Labels of the fields that meant nothing."""
    for name in extras(request):
        if name not in known and name not in SESSION_FIELDS:
            yield name if name in IGNORED else "other"


def _session(request: BaseModel) -> str:
    """The session that a request belongs to, by the first of OpenAI's fields that says so; "": none."""
    told = (extras(request).get(name) for name in SESSION_FIELDS)
    return next((value for value in told if isinstance(value, str) and value), "")


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
