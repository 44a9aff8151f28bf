"""The two routes that generate: a body comes in, pieces of an answer go out, whole or as events.

Owns the order of one request: admission, body, parsing, generation, answer, and what is done when it ends early. The two
forms (chat, completion) differ in how they are parsed and written, no more.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inference_gateway.answer_models import ChatCompletion, Completion
from inference_gateway.answers import AnswerWriter, ChatWriter, CompletionWriter
from inference_gateway.domain.errors import ClientLeft
from inference_gateway.domain.generating import Generating, Plan
from inference_gateway.domain.generation import Piece
from inference_gateway.domain.lifetime import Admission, Lifetime
from inference_gateway.domain.ports import Figures
from inference_gateway.domain.tally import tallied
from inference_gateway.event_stream import EventStream
from inference_gateway.frame import RequestRecord, outcome_of_error, record_of
from inference_gateway.replies import error_answer, json_reply, kind_of
from inference_gateway.request_body import departure_ends, read_body
from inference_gateway.request_parsing import Limits, Order, parse_chat, parse_completion
from treadle.contract.errors import TreadleError

log = logging.getLogger("treadle.gateway.http")


class WriterClass(Protocol):
    """How a form makes the writer of one answer."""

    def __call__(self, request_id: str, model: str, *, logprobs: bool, include_usage: bool) -> AnswerWriter:
        """A writer for one answer."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """One of OpenAI's two forms: how its body is read and its answer written."""

    parse: Callable[[bytes, Limits], Order]
    writer: WriterClass


CHAT = Form(parse_chat, ChatWriter)
COMPLETION = Form(parse_completion, CompletionWriter)


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Named limits of a request at the door; all are settings."""

    request_timeout_seconds: float
    body_bytes_max: int
    body_seconds_max: float
    keep_alive_seconds: float
    parsing: Limits


class CompletionDoor:
    """An ASGI application for one form."""

    def __init__(self, form: Form, generating: Generating, admission: Admission, figures: Figures, limits: DoorLimits) -> None:
        self._form, self._generating, self._admission = form, generating, admission
        self._figures, self._limits = figures, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors before the first event are raised; later ones become an event."""
        record, stream = record_of(scope), EventStream(send)
        try:
            async with self._admission.admit(self._limits.request_timeout_seconds) as lifetime:
                order = await self._order(scope, receive)
                async with departure_ends(lifetime, receive):
                    whole = await self._serve(order, record, lifetime, stream)
        except ClientLeft:
            record.outcome = "left"
            self._figures.client_left()
        except Exception as error:
            if not stream.opened:
                raise
            await self._end_early(stream, record, error)
        else:
            if whole is None:
                await stream.finish()
            else:
                await json_reply(whole)(scope, receive, send)

    async def _order(self, scope: Scope, receive: Receive) -> Order:
        limits = self._limits
        body = await read_body(receive, Headers(scope=scope), bytes_max=limits.body_bytes_max, seconds_max=limits.body_seconds_max)
        order = self._form.parse(body, limits.parsing)
        for name in order.ignored:
            self._figures.field_ignored(name)
        return order

    async def _serve(
        self, order: Order, record: RequestRecord, lifetime: Lifetime, stream: EventStream
    ) -> ChatCompletion | Completion | None:
        """The whole answer, or None once all events but the end are sent."""
        plan = await self._generating.plan(order.wish, request_id=record.request_id, caller=record.caller)
        self._figures.memory_chosen(plan.chosen.by, plan.uses_memory)
        writer = self._form.writer(
            record.request_id,
            plan.asked_model,
            logprobs=order.wish.sampling.top_logprobs is not None,
            include_usage=order.include_usage,
        )
        async with aclosing(self._pieces(plan, record, lifetime)) as pieces:
            if not order.stream:
                return writer.whole([piece async for piece in pieces])
            async with stream.kept_alive(self._limits.keep_alive_seconds):
                await _write_events(writer, pieces, stream)
        return None

    def _pieces(self, plan: Plan, record: RequestRecord, lifetime: Lifetime) -> AsyncGenerator[Piece, None]:
        return tallied(
            self._generating.pieces(plan, lifetime.deadline),
            self._figures,
            prompt_tokens=len(plan.generation.prompt_token_ids),
            begun_seconds=record.begun_seconds,
        )

    async def _end_early(self, stream: EventStream, record: RequestRecord, error: Exception) -> None:
        """Tell of an error in a stream that has begun: its status says 200 already."""
        record.outcome = outcome_of_error(error)
        fields = {"request": record.request_id, "error": type(error).__name__, "status": kind_of(error).status}
        log.warning("stream ended early", extra=fields, exc_info=None if isinstance(error, TreadleError) else error)
        await stream.finish(error_answer(error))


async def _write_events(writer: AnswerWriter, pieces: AsyncGenerator[Piece, None], stream: EventStream) -> None:
    """Nothing is sent before the first piece, so that a refusal of the worker can still be a status."""
    begun = False
    async for piece in pieces:
        for chunk in [*([] if begun else writer.opening()), *writer.chunks(piece)]:
            await stream.event(chunk)
        begun = True
