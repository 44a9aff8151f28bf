"""GatewayService's messages as the JSON of the HTTP routes: parsed there, so that both doors understand a request alike.

Owns the names of fields and which absent ones stay absent. What they mean, and which are refused, is request_parsing's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.json_texts import read_json
from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import worker_pb2

_LATE = {worker_pb2.LATE_POLICY_MASK: "mask", worker_pb2.LATE_POLICY_FAIL: "fail"}
_PRESENT = (
    "n", "max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p",
)  # fmt: skip


def chat_body(request: pb.ChatRequest) -> bytes:
    """The body of /v1/chat/completions that asks for the same."""
    body = {"model": request.model, "messages": [_message(message) for message in request.messages], **_options(request.options)}
    if request.tools:
        body["tools"] = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    if request.tool_choice:
        body["tool_choice"] = request.tool_choice
    if request.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.options.HasField("top_logprobs"):
        body |= {"logprobs": True, "top_logprobs": request.options.top_logprobs}
    return _json(body)


def completion_body(request: pb.CompleteRequest) -> bytes:
    """The body of /v1/completions that asks for the same."""
    body = {"model": request.model, "prompt": _prompts("prompts", request.prompts), **_options(request.options)}
    if request.options.HasField("top_logprobs"):
        body["logprobs"] = request.options.top_logprobs
    return _json(body)


def embedding_body(request: pb.GatewayServiceEmbedRequest) -> bytes:
    """The body of /v1/embeddings that asks for the same."""
    return _json({"model": request.model, "input": _prompts("inputs", request.inputs)})


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return turn


def _tool(index: int, tool: pb.ChatTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        try:
            function["parameters"] = read_json(tool.parameters_json)
        except ValueError as error:
            place = f"tools[{index}].parameters_json"
            raise RequestRefused(
                f"'{place}': JSON as text expected, without unpaired surrogates", param=place, code="invalid_value"
            ) from error
    return {"type": "function", "function": function}


def _prompts(field: str, prompts: Sequence[pb.CompletionPrompt]) -> list[str] | list[list[int]]:
    if all(prompt.WhichOneof("prompt") == "text" for prompt in prompts):
        return [prompt.text for prompt in prompts]
    if all(prompt.WhichOneof("prompt") == "tokens" for prompt in prompts):
        return [list(prompt.tokens.ids) for prompt in prompts]
    raise RequestRefused(f"'{field}': all texts, or all token ids", param=field, code="invalid_value")


def _options(options: pb.GenerationOptions) -> dict[str, Any]:
    body: dict[str, Any] = {name: getattr(options, name) for name in _PRESENT if options.HasField(name)}  # type: ignore[arg-type]  # names of its fields
    for name in ("stop", "stop_token_ids"):
        if getattr(options, name):
            body[name] = list(getattr(options, name))
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in options.logit_bias.items()}
    if options.cache_salt:
        body["cache_salt"] = options.cache_salt
    if options.session:
        body["prompt_cache_key"] = options.session
    treadle = _treadle(options)
    return body | ({"treadle": treadle} if treadle else {})


def _treadle(options: pb.GenerationOptions) -> dict[str, Any]:
    treadle: dict[str, Any] = {}
    if options.engram:
        treadle["engram"] = options.engram
    if options.prefix:
        treadle["prefix"] = options.prefix
    if options.priority:
        treadle["priority"] = options.priority
    if options.HasField("memory_policy"):
        policy = options.memory_policy
        waits = {"wait_seconds_max": policy.wait_seconds_max} if policy.wait_seconds_max else {}
        treadle["policy"] = waits | ({"late": _LATE[policy.late]} if policy.late in _LATE else {})
    return treadle


def _json(body: dict[str, Any]) -> bytes:
    """Raises RequestRefused for a number that is none, which JSON does not have."""
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestRefused(f"'{name}': a finite number expected", param=name, code="invalid_value")
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError as error:
        raise RequestRefused("finite numbers expected, everywhere", code="invalid_value") from error
