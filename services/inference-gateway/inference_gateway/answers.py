"""Pieces of a generation written down as OpenAI's objects: chat completions, completions and their chunks.

Owns what goes into which field and chunk. Does not know how chunks travel (event_stream).
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import asdict
from json.encoder import encode_basestring_ascii
from typing import Protocol, cast

from inference_gateway.answer_models import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    ContentLogprob,
    Delta,
    MemoryAnswer,
    RivalLogprob,
    TextLogprobs,
    ToolCallAnswer,
    ToolCallDelta,
    TreadleAnswer,
    UsageAnswer,
)
from inference_gateway.domain.generation import FinishReason, Piece, TokenLogprob, Usage
from inference_gateway.domain.several import Ends
from inference_gateway.domain.tool_calls import CallReader, ToolCall
from inference_gateway.replies import json_bytes

LOGPROB_MIN = -9999.0  # stands for minus infinity, which JSON does not have
Chunk = ChatCompletionChunk | Completion


class AnswerWriter(Protocol):
    """Writes one answer, all its choices, whole or as chunks. `answer_id` names it."""

    answer_id: str

    def opening(self) -> Sequence[Chunk]:
        """Chunks before the first piece."""
        ...

    def chunks(self, piece: Piece) -> Sequence[Chunk]:
        """Chunks for a piece; none if it changes nothing that the client can see."""
        ...

    def text_alone(self, piece: Piece) -> bytes | None:
        """The JSON of the one chunk of a piece that is text and no more, as nearly all are: the bytes that `chunks` comes to,
        written into a form. None: the piece is more than that, or less, and was not counted.
        """
        ...

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion | Completion:
        """The answer made of all its pieces."""
        ...


class _TextForm:
    """The JSON of chunks that differ in one text alone, made once from a chunk where this text is empty."""

    def __init__(self, chunk: Chunk, field: str) -> None:
        # Within a string a quote has a backslash before it: no name of a model can look like the field.
        before, empty, self._after = json_bytes(chunk).partition(f'"{field}":""'.encode())
        self._before = before + empty[:-2]

    def filled(self, text: str) -> bytes:
        return self._before + encode_basestring_ascii(text).encode("ascii") + self._after


def _is_text_alone(piece: Piece) -> bool:
    return bool(piece.text) and piece.finish_reason is None and not piece.logprobs


class ChatWriter:
    """Fits AnswerWriter, for /v1/chat/completions.

    ends:  counts the pieces that are written
    tools: whether calls of tools are taken out of the text
    """

    def __init__(
        self, request_id: str, model: str, ends: Ends, *, logprobs: bool, include_usage: bool, tools: bool = False
    ) -> None:
        self.answer_id = f"chatcmpl-{request_id}"
        self._model, self._ends, self._logprobs, self._include_usage = model, ends, logprobs, include_usage
        self._readers = [CallReader() for _ in range(ends.choices)] if tools else []
        self._created = int(time.time())
        self._forms: dict[int, _TextForm] = {}  # by choice

    def opening(self) -> Sequence[Chunk]:
        """For each choice one chunk that names the role."""
        return [self._chunk(choice, {"role": "assistant", "content": ""}, None, None) for choice in range(self._ends.choices)]

    def chunks(self, piece: Piece) -> Sequence[Chunk]:
        """Text and calls if there are any; after a choice's last piece its finish reason, after all the usage if asked for."""
        self._ends.saw(piece)
        made = []
        logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
        text, calls, finish = self._read(piece) if self._readers else (piece.text, [], piece.finish_reason)
        if text or logprobs:
            made.append(self._chunk(piece.choice, {"content": text}, logprobs, None))
        if calls:
            first = self._readers[piece.choice].calls - len(calls)
            deltas = [call_delta(first + place, call) for place, call in enumerate(calls)]
            made.append(self._chunk(piece.choice, {"tool_calls": deltas}, None, None))
        if finish is not None:
            made.append(self._chunk(piece.choice, {}, None, finish))
            if self._ends.complete:
                if self._include_usage:
                    made.append(self._chunk(piece.choice, None, None, None))
                    made[-1]["usage"] = usage_answer(self._ends.usage)
                made[-1]["treadle"] = treadle_answer(self._ends)
        return made

    def text_alone(self, piece: Piece) -> bytes | None:
        """See AnswerWriter."""
        if self._readers or not _is_text_alone(piece):
            return None
        self._ends.saw(piece)
        form = self._forms.get(piece.choice)
        if form is None:
            form = self._forms[piece.choice] = _TextForm(self._chunk(piece.choice, {"content": ""}, None, None), "content")
        return form.filled(piece.text)

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion:
        """Every choice with its whole text."""
        for piece in pieces:
            self._ends.saw(piece)
        return {
            "id": self.answer_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                self._choice(choice, [piece for piece in pieces if piece.choice == choice]) for choice in range(self._ends.choices)
            ],
            "usage": usage_answer(self._ends.usage),
            "treadle": treadle_answer(self._ends),
        }

    def _choice(self, choice: int, pieces: Sequence[Piece]) -> ChatChoice:
        finish = (pieces[-1].finish_reason or FinishReason.STOP) if pieces else FinishReason.ABORT
        message: AnswerMessage = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        if self._readers:
            read = [self._read(piece) for piece in pieces]
            calls = [call_answer(call) for _, made, _ in read for call in made]
            text = "".join(part for part, _, _ in read)
            message["content"] = text if text or not calls else None
            if calls:
                message["tool_calls"] = calls
                finish = read[-1][2] or finish
        logprobs = chat_logprobs([item for piece in pieces for item in piece.logprobs]) if self._logprobs else None
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": finish.value}

    def _read(self, piece: Piece) -> tuple[str, list[ToolCall], FinishReason | None]:
        return self._readers[piece.choice].read(piece.text, piece.finish_reason)

    def _chunk(
        self, choice: int, delta: Delta | None, logprobs: ChatLogprobs | None, finish: FinishReason | None
    ) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self.answer_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [],
        }
        if delta is not None:
            chunk["choices"] = [
                {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish.value if finish else None}
            ]
        if self._include_usage:
            chunk["usage"] = None
        return chunk


class CompletionWriter:
    """Fits AnswerWriter, for /v1/completions. `ends`: counts the pieces that are written."""

    def __init__(
        self, request_id: str, model: str, ends: Ends, *, logprobs: bool, include_usage: bool, tools: bool = False
    ) -> None:
        self.answer_id = f"cmpl-{request_id}"
        self._model, self._ends, self._include_usage = model, ends, include_usage
        self._logprobs = [_TextLogprobsWriter() for _ in range(ends.choices)] if logprobs else []
        self._created = int(time.time())
        self._forms: dict[int, _TextForm] = {}  # by choice

    def opening(self) -> Sequence[Chunk]:
        """Nothing: a completion has no role."""
        return []

    def chunks(self, piece: Piece) -> Sequence[Chunk]:
        """Text and finish reason in one chunk; the usage after the last piece of all if asked for."""
        self._ends.saw(piece)
        made = []
        logprobs = self._logprobs[piece.choice].write(piece.logprobs) if self._logprobs and piece.logprobs else None
        if piece.text or logprobs or piece.finish_reason is not None:
            made.append(self._chunk(piece.choice, piece.text, logprobs, piece.finish_reason))
        if piece.finish_reason is not None and self._ends.complete:
            if self._include_usage:
                made.append(self._answer([]))
                made[-1]["usage"] = usage_answer(self._ends.usage)
            made[-1]["treadle"] = treadle_answer(self._ends)
        return made

    def text_alone(self, piece: Piece) -> bytes | None:
        """See AnswerWriter."""
        if not _is_text_alone(piece):
            return None
        self._ends.saw(piece)
        form = self._forms.get(piece.choice)
        if form is None:
            form = self._forms[piece.choice] = _TextForm(self._chunk(piece.choice, "", None, None), "text")
        return form.filled(piece.text)

    def whole(self, pieces: Sequence[Piece]) -> Completion:
        """Every choice with its whole text."""
        for piece in pieces:
            self._ends.saw(piece)
        answer = self._answer(
            [self._choice(choice, [piece for piece in pieces if piece.choice == choice]) for choice in range(self._ends.choices)]
        )
        answer["usage"] = usage_answer(self._ends.usage)
        answer["treadle"] = treadle_answer(self._ends)
        return answer

    def _choice(self, choice: int, pieces: Sequence[Piece]) -> CompletionChoice:
        items = [item for piece in pieces for item in piece.logprobs]
        logprobs = self._logprobs[choice].write(items) if self._logprobs else None
        finish = pieces[-1].finish_reason if pieces else FinishReason.ABORT
        return _completion_choice(choice, "".join(piece.text for piece in pieces), logprobs, finish)

    def _chunk(self, choice: int, text: str, logprobs: TextLogprobs | None, finish: FinishReason | None) -> Completion:
        chunk = self._answer([_completion_choice(choice, text, logprobs, finish)])
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _answer(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def _completion_choice(choice: int, text: str, logprobs: TextLogprobs | None, finish: FinishReason | None) -> CompletionChoice:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish.value if finish else None}


class _TextLogprobsWriter:
    """Log-probabilities of a completion, whose offsets go on from piece to piece."""

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, items: Sequence[TokenLogprob]) -> TextLogprobs:
        offsets = []
        for item in items:
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(item.text))
        return {
            "tokens": [token_name(item.text) for item in items],
            "token_logprobs": [_finite(item.logprob) for item in items],
            "top_logprobs": [{token_name(rival.text): _finite(rival.logprob) for rival in item.top} for item in items],
            "text_offset": offsets,
        }


def token_name(text: bytes) -> str:
    r"""A token as text; one that is no complete text as `bytes:\xe2\x80`, so that two such tokens differ."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def usage_answer(usage: Usage) -> UsageAnswer:
    """Usage in OpenAI's words."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def treadle_answer(ends: Ends) -> TreadleAnswer:
    """What memory did for all choices."""
    return {"degraded": ends.degraded, "memory": [cast("MemoryAnswer", asdict(report)) for report in ends.memory]}


def call_answer(call: ToolCall) -> ToolCallAnswer:
    """A call of a tool."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_delta(index: int, call: ToolCall) -> ToolCallDelta:
    """A call of a tool in a chunk: whole, for it is read as JSON before anybody is told of it."""
    return {"index": index, **call_answer(call)}


def chat_logprobs(items: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Log-probabilities of a chat."""
    return {"content": [_content_logprob(item) for item in items], "refusal": None}


def _content_logprob(item: TokenLogprob) -> ContentLogprob:
    return {**_rival(item), "top_logprobs": [_rival(rival) for rival in item.top]}


def _rival(item: TokenLogprob) -> RivalLogprob:
    return {"token": token_name(item.text), "logprob": _finite(item.logprob), "bytes": list(item.text)}


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)  # also for what is not a number
