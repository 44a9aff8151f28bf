"""From the messages and tools of a chat's JSON to what a chat template is given.

Owns what a turn may hold. Whether the model's template knows tools at all is the template's to say (adapters.chat_template).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from inference_gateway import http_models
from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import ChatPrompt, Message
from inference_gateway.domain.json_texts import read_json

MESSAGE_CONTENT_JOINT = "\n"  # between the text parts of one message, as vLLM joins them
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"function_call": (None,), "audio": (None,)}


def chat_prompt(request: http_models.ChatCompletionRequest) -> ChatPrompt:
    """The turns and the tools. Raises RequestRefused naming the field."""
    messages = tuple(_message(index, message) for index, message in enumerate(request.messages))
    return ChatPrompt(messages, _tools(request))


def extras(request: BaseModel) -> dict[str, Any]:
    """The fields that a model does not name."""
    return request.model_extra or {}


def _tools(request: http_models.ChatCompletionRequest) -> tuple[dict[str, Any], ...]:
    """The tools as the caller wrote them; none where none is to be called."""
    choice = request.tool_choice
    if choice not in (None, "none", "auto"):
        raise RequestRefused(
            "'tool_choice': 'none' or 'auto'; an answer cannot be made to call a tool",
            param="tool_choice",
            code="unsupported_value",
        )
    return () if choice == "none" else tuple(tool.model_dump(exclude_unset=True) for tool in request.tools or ())


def _message(index: int, message: http_models.ChatMessage) -> Message:
    place = f"messages[{index}]"
    for name, value in extras(message).items():
        if name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
            raise RequestRefused(
                f"'{place}.{name}': this value is not supported", param=f"{place}.{name}", code="unsupported_value"
            )
    if message.content is None and message.role != "assistant":
        raise RequestRefused(f"'{place}.content' is needed for the role {message.role!r}", param=f"{place}.content")
    if message.tool_calls and message.role != "assistant":
        raise RequestRefused(f"'{place}.tool_calls': only an assistant calls tools", param=f"{place}.tool_calls")
    parts = message.content or ""
    text = parts if isinstance(parts, str) else MESSAGE_CONTENT_JOINT.join(part.text for part in parts)
    calls = tuple(_call(f"{place}.tool_calls[{number}]", call) for number, call in enumerate(message.tool_calls or ()))
    role = "system" if message.role == "developer" else message.role
    return Message(role, text, message.name, calls, message.tool_call_id)


def _call(place: str, call: http_models.ToolCall) -> dict[str, Any]:
    """A call as templates see it: they write the arguments as JSON themselves."""
    try:
        arguments = read_json(call.function.arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{place}.function.arguments"
        raise RequestRefused(
            f"'{param}': a JSON object as text expected, without unpaired surrogates", param=param, code="invalid_value"
        )
    named = {"id": call.id} if call.id is not None else {}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
