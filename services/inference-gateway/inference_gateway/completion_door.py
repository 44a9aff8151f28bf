"""The two routes that generate: a body comes in, pieces of an answer go out, whole or as events.

Owns the order of one request: admission, body, parsing, generation, answer, and what is done when it ends early. The two
forms (chat, completion) differ in how they are parsed and written, no more.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inference_gateway.answer_models import ChatCompletion, Completion
from inference_gateway.answers import AnswerWriter, ChatWriter, Chunk, CompletionWriter
from inference_gateway.domain.errors import ClientLeft, RequestCancelled
from inference_gateway.domain.generation import Piece
from inference_gateway.domain.lifetime import Admission, Lifetime
from inference_gateway.domain.ports import Figures
from inference_gateway.domain.running import Running
from inference_gateway.domain.serving import Asking, Serving
from inference_gateway.domain.several import Ends
from inference_gateway.event_stream import EventStream
from inference_gateway.frame import RequestRecord, outcome_of_error, record_of
from inference_gateway.replies import DEGRADED, degraded_headers, error_answer, json_reply, kind_of
from inference_gateway.request_body import departure_ends, read_body
from inference_gateway.request_headers import priority_of, session_of, timeout_of, with_headers
from inference_gateway.request_parsing import Limits, Order, parse_chat, parse_completion
from inference_gateway.span_attributes import tell_answered, tell_asked
from treadle.chassis.bug_report import bug_report
from treadle.contract.errors import TreadleError

log = logging.getLogger("treadle.gateway.http")


class WriterClass(Protocol):
    """How a form makes the writer of one answer."""

    def __call__(
        self, request_id: str, model: str, ends: Ends, *, logprobs: bool, include_usage: bool, tools: bool
    ) -> AnswerWriter:
        """A writer for one answer."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """One of OpenAI's two forms: how its body is read and its answer written."""

    parse: Callable[[bytes, Limits], Order]
    writer: WriterClass
    operation: str  # as spans name it


CHAT = Form(parse_chat, ChatWriter, "chat")
COMPLETION = Form(parse_completion, CompletionWriter, "text_completion")


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Named limits of a request at the door; all are settings."""

    request_timeout_seconds: float
    body_bytes_max: int
    body_seconds_max: float
    keep_alive_seconds: float
    parsing: Limits


@dataclass(slots=True)
class _Answer:
    """What there is of an answer: its writer once it is planned, and the pieces of one that is answered whole."""

    stream: EventStream
    writer: AnswerWriter | None = None
    ends: Ends | None = None
    pieces: list[Piece] = field(default_factory=list)
    whole: ChatCompletion | Completion | None = None
    begun: bool = False
    last: list[Chunk] = field(default_factory=list)  # sent with the end of the stream
    kinds: bytes = b"engram"  # of memory that it may miss


class CompletionDoor:
    """An ASGI application for one form."""

    def __init__(
        self, form: Form, serving: Serving, admission: Admission, running: Running, figures: Figures, limits: DoorLimits
    ) -> None:
        self._form, self._serving, self._admission, self._running = form, serving, admission, running
        self._figures, self._limits = figures, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors before the first event are raised; later ones become an event."""
        record, answer = record_of(scope), _Answer(EventStream(send))
        order: Order | None = None
        try:
            async with self._admission.admit(self._limits.request_timeout_seconds) as lifetime:
                order = await self._order(scope, receive)
                if order.timeout_seconds is not None:
                    lifetime.shorten(order.timeout_seconds)
                with self._running.entered(record.caller.tenant, record.request_id, lifetime):
                    async with departure_ends(lifetime, receive):
                        await self._serve(order, record, lifetime, answer)
        except ClientLeft:
            record.outcome = "left"
            self._figures.client_left()
            return
        except RequestCancelled:
            record.outcome = "cancelled"
            if order is None or not _cut_short(order, answer):
                raise
        except Exception as error:
            if not answer.stream.opened:
                raise
            await self._end_early(answer.stream, record, error)
            return
        if answer.ends is not None:
            tell_answered(answer.ends)
        if answer.whole is None:
            await answer.stream.finish(answer.last)
        else:
            await json_reply(answer.whole, headers=degraded_headers(answer.whole.get("treadle")))(scope, receive, send)

    async def _order(self, scope: Scope, receive: Receive) -> Order:
        limits = self._limits
        headers = Headers(scope=scope)
        timeout_seconds, priority = timeout_of(headers), priority_of(headers)  # wrong ones are refused before the body is read
        body = await read_body(receive, headers, bytes_max=limits.body_bytes_max, seconds_max=limits.body_seconds_max)
        order = with_headers(self._form.parse(body, limits.parsing), timeout_seconds, priority, session_of(headers))
        for name in order.ignored:
            self._figures.field_ignored(name)
        return order

    async def _serve(self, order: Order, record: RequestRecord, lifetime: Lifetime, answer: _Answer) -> None:
        """Fill `answer`: whole, or once all events but the end are sent."""
        asking = Asking(record.request_id, record.caller, record.begun_seconds)
        tell_asked(self._form.operation, order.wish.model, record.request_id)
        served = await self._serving.begin(order.wishes, order.choices, asking, lifetime)
        writer = self._form.writer(
            record.request_id,
            served.plan.asked_model,
            served.ends,
            logprobs=order.wish.sampling.top_logprobs is not None,
            include_usage=order.include_usage,
            tools=served.reads_calls,
        )
        answer.writer, answer.ends = writer, served.ends
        if order.wish.memory.prefix is not None:
            answer.kinds = b"engram,prefix" if served.plan.uses_memory else b"prefix"
        async with aclosing(served.pieces) as pieces:
            if order.stream:
                async with answer.stream.kept_alive(self._limits.keep_alive_seconds):
                    await _write_events(writer, pieces, answer, record)
                return
            async for piece in pieces:
                record.worker = record.worker or piece.worker
                answer.pieces.append(piece)
        answer.whole = writer.whole(answer.pieces)

    async def _end_early(self, stream: EventStream, record: RequestRecord, error: Exception) -> None:
        """Tell of an error in a stream that has begun: its status says 200 already."""
        record.outcome = outcome_of_error(error)
        fields = {"request": record.request_id, "error": type(error).__name__, "status": kind_of(error).status}
        bug = {} if isinstance(error, TreadleError) else {"bug": bug_report(error)}
        log.warning("stream ended early", extra=fields | bug)
        await stream.finish([error_answer(error)])


async def _write_events(writer: AnswerWriter, pieces: AsyncGenerator[Piece, None], answer: _Answer, record: RequestRecord) -> None:
    """Nothing is sent before the first piece, so that a refusal of the worker can still be a status."""
    async for piece in pieces:
        record.worker = record.worker or piece.worker
        await _write_event(writer, piece, answer)


async def _write_event(writer: AnswerWriter, piece: Piece, answer: _Answer) -> None:
    json = writer.text_alone(piece) if answer.begun and answer.stream.opened else None
    if json is None:
        await answer.stream.events(_chunks(writer, piece, answer))
    else:
        await answer.stream.event(json)


def _chunks(writer: AnswerWriter, piece: Piece, answer: _Answer) -> list[Chunk]:
    if piece.degraded and not answer.stream.opened:
        answer.stream.headers.append((DEGRADED.encode(), answer.kinds))  # later it is too late for a header: the last event tells
    chunks = [*([] if answer.begun else writer.opening()), *writer.chunks(piece)]
    answer.begun = True
    return chunks


def _cut_short(order: Order, answer: _Answer) -> bool:
    """End an answer that its caller cancelled with what there is of it; False: there is nothing that could be said."""
    writer, ends = answer.writer, answer.ends
    if writer is None or ends is None:
        return False
    if order.stream:
        answer.last = [chunk for piece in ends.cut() for chunk in _chunks(writer, piece, answer)]
        return True
    counted = Ends(ends.prompt_tokens)
    for piece in answer.pieces:
        counted.saw(piece)
    answer.whole = writer.whole([*answer.pieces, *counted.cut()])
    return True
