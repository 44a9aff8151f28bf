"""Pieces of a generation written down as OpenAI's objects: chat completions, completions and their chunks.

Owns what goes into which field and chunk. Does not know how chunks travel (event_stream).
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol, cast

from inference_gateway.answer_models import (
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
    TreadleAnswer,
    UsageAnswer,
)
from inference_gateway.domain.generation import FinishReason, Piece, TokenLogprob, Usage

LOGPROB_MIN = -9999.0  # stands for minus infinity, which JSON does not have
Chunk = ChatCompletionChunk | Completion


class AnswerWriter(Protocol):
    """Writes one answer, whole or as chunks. `answer_id` names it."""

    answer_id: str

    def opening(self) -> Sequence[Chunk]:
        """Chunks before the first piece."""
        ...

    def chunks(self, piece: Piece) -> Sequence[Chunk]:
        """Chunks for a piece; none if it changes nothing that the client can see."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion | Completion:
        """The answer made of all its pieces."""
        ...


class ChatWriter:
    """Fits AnswerWriter, for /v1/chat/completions."""

    def __init__(self, request_id: str, model: str, *, logprobs: bool, include_usage: bool) -> None:
        self.answer_id = f"chatcmpl-{request_id}"
        self._model, self._logprobs, self._include_usage = model, logprobs, include_usage
        self._created = int(time.time())

    def opening(self) -> Sequence[Chunk]:
        """One chunk that names the role."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)]

    def chunks(self, piece: Piece) -> Sequence[Chunk]:
        """Text if there is any; after the last piece its finish reason, and the usage if asked for."""
        made = []
        logprobs = self._logprobs_of(piece.logprobs) if piece.logprobs else None
        if piece.text or logprobs:
            made.append(self._chunk({"content": piece.text}, logprobs, None))
        if piece.finish_reason is not None:
            made.append(self._chunk({}, None, piece.finish_reason))
            if self._include_usage:
                made.append(self._chunk(None, None, None))
                made[-1]["usage"] = usage_answer(piece.usage)
            made[-1]["treadle"] = treadle_answer(piece)
        return made

    def whole(self, pieces: Sequence[Piece]) -> ChatCompletion:
        """One choice with the whole text."""
        last = pieces[-1]
        logprobs = self._logprobs_of([item for piece in pieces for item in piece.logprobs]) if self._logprobs else None
        return {
            "id": self.answer_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
                    "logprobs": logprobs,
                    "finish_reason": (last.finish_reason or FinishReason.STOP).value,
                }
            ],
            "usage": usage_answer(last.usage),
            "treadle": treadle_answer(last),
        }

    def _chunk(self, delta: Delta | None, logprobs: ChatLogprobs | None, finish: FinishReason | None) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self.answer_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [],
        }
        if delta is not None:
            chunk["choices"] = [
                {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish.value if finish else None}
            ]
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs_of(self, items: Sequence[TokenLogprob]) -> ChatLogprobs:
        return {"content": [_content_logprob(item) for item in items], "refusal": None}


class CompletionWriter:
    """Fits AnswerWriter, for /v1/completions."""

    def __init__(self, request_id: str, model: str, *, logprobs: bool, include_usage: bool) -> None:
        self.answer_id = f"cmpl-{request_id}"
        self._model, self._include_usage = model, include_usage
        self._logprobs = _TextLogprobsWriter() if logprobs else None
        self._created = int(time.time())

    def opening(self) -> Sequence[Chunk]:
        """Nothing: a completion has no role."""
        return []

    def chunks(self, piece: Piece) -> Sequence[Chunk]:
        """Text and finish reason in one chunk; the usage after the last piece if asked for."""
        made = []
        logprobs = self._logprobs.write(piece.logprobs) if self._logprobs and piece.logprobs else None
        if piece.text or logprobs or piece.finish_reason is not None:
            made.append(self._answer(piece.text, logprobs, piece.finish_reason))
            if self._include_usage:
                made[-1]["usage"] = None
        if piece.finish_reason is not None:
            if self._include_usage:
                made.append(self._answer(None, None, None))
                made[-1]["usage"] = usage_answer(piece.usage)
            made[-1]["treadle"] = treadle_answer(piece)
        return made

    def whole(self, pieces: Sequence[Piece]) -> Completion:
        """One choice with the whole text."""
        logprobs = self._logprobs.write([item for piece in pieces for item in piece.logprobs]) if self._logprobs else None
        answer = self._answer("".join(piece.text for piece in pieces), logprobs, pieces[-1].finish_reason)
        answer["usage"] = usage_answer(pieces[-1].usage)
        answer["treadle"] = treadle_answer(pieces[-1])
        return answer

    def _answer(self, text: str | None, logprobs: TextLogprobs | None, finish: FinishReason | None) -> Completion:
        choices: list[CompletionChoice] = []
        if text is not None:
            choices = [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish.value if finish else None}]
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


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


def usage_answer(usage: Usage | None) -> UsageAnswer:
    """Usage in OpenAI's words."""
    usage = usage or Usage(0, 0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def treadle_answer(last: Piece) -> TreadleAnswer:
    """What memory did, from the last piece."""
    return {"degraded": last.degraded, "memory": [cast("MemoryAnswer", asdict(report)) for report in last.memory]}


def _content_logprob(item: TokenLogprob) -> ContentLogprob:
    return {**_rival(item), "top_logprobs": [_rival(rival) for rival in item.top]}


def _rival(item: TokenLogprob) -> RivalLogprob:
    return {"token": token_name(item.text), "logprob": _finite(item.logprob), "bytes": list(item.text)}


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)  # also for what is not a number
