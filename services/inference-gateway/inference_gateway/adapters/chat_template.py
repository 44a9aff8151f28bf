"""Chat templates as transformers renders them, in a sandbox.

Owns the Jinja environment. The behaviour to match is `render_jinja_template` in transformers' chat_template_utils.py: block
trimming, loop controls, the `generation` tag, `tojson` without HTML escapes, `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference_gateway.domain.errors import RequestRefused
from inference_gateway.domain.generation import ChatPrompt, Message
from inference_gateway.domain.tool_calls import CALL_OPENS, ToolForm
from treadle.contract.errors import InvalidArgument


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises InvalidArgument if `source` is not a template."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the chat template cannot be compiled: {error}") from error
        self.tool_form = ToolForm.HERMES if self._knows_tools and CALL_OPENS in source else None
        self._special_tokens = dict(special_tokens)

    def render(self, prompt: ChatPrompt) -> str:
        """The turns as one text, with the opening of an answer. Raises RequestRefused if the template refuses them."""
        if not self._knows_tools:
            _refuse_tools(prompt)
        turns = [_as_template_sees(message) for message in prompt.messages]
        try:
            return self._template.render(
                messages=turns, tools=list(prompt.tools) or None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            # A template is a program of the model's author that gets strangers' data: what it stumbles on is the data.
            raise RequestRefused(f"the model's chat template does not take these messages: {error}", param="messages") from error


def _refuse_tools(prompt: ChatPrompt) -> None:
    """A template that knows no tools would leave them out in silence."""
    param = "tools" if prompt.tools else ""
    for index, message in enumerate(prompt.messages):
        if message.tool_calls or message.role == "tool":
            param = param or f"messages[{index}].{'tool_calls' if message.tool_calls else 'role'}"
    if param:
        raise RequestRefused(f"'{param}': this model's chat template knows no tools", param=param, code="unsupported_value")


def _as_template_sees(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = list(message.tool_calls)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what training learns from; for rendering it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
