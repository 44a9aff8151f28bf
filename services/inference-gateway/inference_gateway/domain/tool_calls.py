"""Calls of tools in the text of an answer, for the one form that is read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Hermes's form, which Qwen's templates ask for too. Owns reading it piece by piece. Text of any other form stays text, and so
does a call that is not what it should be: nothing that the model said is lost.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from enum import StrEnum

from inference_gateway.domain.generation import FinishReason
from inference_gateway.domain.json_texts import read_json

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"


class ToolForm(StrEnum):
    """How a model writes calls, as its chat template tells."""

    HERMES = "hermes"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments`: JSON as the model wrote it, spaces aside."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class CallReader:
    """Takes calls out of one answer's text. Text that may be the beginning of a call, and space before one, is held back."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self.calls = 0

    def read(self, text: str, finish: FinishReason | None) -> tuple[str, list[ToolCall], FinishReason | None]:
        """The next piece's text without calls, the calls that are whole now, and its finish reason as callers of tools know it."""
        found = self.push(text)
        if finish is not None:
            found += self.finish(stopped=finish is FinishReason.STOP)
            if self.calls and finish is FinishReason.STOP:
                finish = FinishReason.TOOL_CALLS
        return (
            "".join(part for part in found if isinstance(part, str)),
            [part for part in found if isinstance(part, ToolCall)],
            finish,
        )

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain now: text and calls, in their order."""
        self._held += text
        found: list[str | ToolCall] = []
        while True:
            mark = CALL_CLOSES if self._inside else CALL_OPENS
            before, met, after = self._held.partition(mark)
            if not met:
                break
            self._held = after
            if self._inside:
                found.append(self._read(before, closed=True))
            elif before.strip():
                found.append(before.rstrip())
            self._inside = not self._inside
        if not self._inside and (certain := _certain(self._held)):
            found.append(self._held[:certain])
            self._held = self._held[certain:]
        return found

    def finish(self, *, stopped: bool) -> list[str | ToolCall]:
        """The answer is over. `stopped`: by itself or by a stop string, which may have been the end of a call."""
        held, self._held = self._held, ""
        if self._inside:
            self._inside = False
            return [self._read(held, closed=False)] if stopped else [CALL_OPENS + held]
        return [held] if held.strip() or (held and not self.calls) else []

    def _read(self, text: str, *, closed: bool) -> str | ToolCall:
        try:
            made = read_json(text)
            name, arguments = made["name"], made.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict | str):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError):
            return f"{CALL_OPENS}{text}{CALL_CLOSES if closed else ''}"
        self.calls += 1
        return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _certain(text: str) -> int:
    """Characters of `text` that belong to no call, whatever comes next."""
    for size in range(min(len(CALL_OPENS) - 1, len(text)), 0, -1):
        if CALL_OPENS.startswith(text[-size:]):
            return len(text[:-size].rstrip())
    return len(text.rstrip())
