"""GatewayService: messages in, the same requests as at the HTTP routes, messages out, and the error table.

Owns the second door alone: parsing, planning, limits and counting are those of the first.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from inference_gateway.domain.api_keys import Caller
from inference_gateway.domain.errors import MemoryDamaged, PrefixDamaged, RateLimited, RequestCancelled, RequestRefused
from inference_gateway.domain.lifetime import Lifetime
from inference_gateway.domain.serving import Asking
from inference_gateway.domain.tally import metered, prompt_charged
from inference_gateway.frame import REQUEST_ID, outcome_of_error
from inference_gateway.model_list import model_list
from inference_gateway.request_parsing import Limits, Order, parse_chat, parse_completion, parse_embedding
from inference_gateway.rpc_answers import AnswerPieces
from inference_gateway.rpc_requests import chat_body, completion_body, embedding_body
from inference_gateway.rpc_writer import CallWriter
from inference_gateway.server import Parts
from inference_gateway.span_attributes import tell_answered, tell_asked
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.contract import PROTO_VERSION
from treadle.contract.errors import Unavailable
from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import gateway_pb2_grpc as pb_grpc
from treadle.inference.v1 import worker_pb2

STATUS: dict[type[Exception], grpc.StatusCode] = CONTRACT_STATUS | {
    MemoryDamaged: grpc.StatusCode.DATA_LOSS,
    PrefixDamaged: grpc.StatusCode.DATA_LOSS,
    RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RequestCancelled: grpc.StatusCode.CANCELLED,  # of vectors; an answer that was cut off says so itself
}
Context = Any  # grpc.aio.ServicerContext: the stubs and the runtime disagree about its parameters


@dataclass(slots=True)
class _Counted:
    """A request that is counted. `outcome`: of one that ends otherwise than it seems."""

    outcome: str | None = None


class GatewayServer(pb_grpc.GatewayServiceServicer):
    """Serves the same requests as the HTTP routes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See the proto."""
        async with CallWriter(context, lambda piece: pb.ChatResponse(piece=piece)) as writer:
            await self._answer("Chat", request, lambda: chat_body(request), parse_chat, context, writer)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See the proto."""
        async with CallWriter(context, lambda piece: pb.CompleteResponse(piece=piece)) as writer:
            await self._answer("Complete", request, lambda: completion_body(request), parse_completion, context, writer)

    async def Embed(self, request: pb.GatewayServiceEmbedRequest, context: Context) -> pb.GatewayServiceEmbedResponse:  # noqa: N802
        """See the proto."""
        parts, asking = self._parts, self._asking(request, context)
        with self._counted("Embed"), metered(asking.caller, parts.figures):
            async with parts.admission.admit(parts.limits.request_timeout_seconds) as lifetime:
                _shorten(lifetime, context)
                order = parse_embedding(embedding_body(request), parts.limits.parsing)
                tell_asked("embeddings", order.model, asking.request_id)
                with parts.running.entered(asking.caller.tenant, asking.request_id, lifetime):
                    plan = await parts.embedding.plan(order.model, order.prompts, order.dimensions)
                    with prompt_charged(asking.caller, parts.figures, plan.prompt_tokens):
                        vectors = await parts.embedding.vectors(plan, asking.request_id, lifetime.deadline)
        return pb.GatewayServiceEmbedResponse(
            embeddings=[worker_pb2.Embedding(values=values) for values in vectors.values],
            usage=worker_pb2.Usage(prompt_tokens=vectors.prompt_tokens),
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        """See the proto."""
        caller, models = self._caller(context), self._parts.fleet.models()
        if not models:
            raise Unavailable(f"no worker is ready: {self._parts.fleet.not_ready_because()}")
        return pb.ListModelsResponse(
            models=[
                pb.ServedModel(
                    id=entry["id"],
                    context_tokens_max=entry["max_model_len"],
                    engram=entry["treadle"]["engram"] or "",
                    engram_version=entry["treadle"]["version"] or "",
                    default=entry["treadle"]["default"],
                )
                for model in models
                for entry in model_list(model, caller.memory)
            ]
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """See the proto."""
        self._parts.running.cancel(self._caller(context).tenant, request.request_id)
        return pb.CancelResponse()

    async def Status(  # noqa: N802
        self, request: pb.GatewayServiceStatusRequest, context: Context
    ) -> pb.GatewayServiceStatusResponse:
        """See the proto."""
        self._caller(context)
        reason = self._parts.not_ready_because()
        return pb.GatewayServiceStatusResponse(
            build_version=self._parts.build_version, proto_version=PROTO_VERSION, pid=os.getpid(), ready=reason is None,
            reason=reason or "", requests_in_progress=self._parts.admission.in_progress,
        )  # fmt: skip

    async def _answer(
        self, name: str, request: Any, body: Callable[[], bytes], parse: Callable[[bytes, Limits], Order], context: Context,
        writer: CallWriter,
    ) -> None:  # fmt: skip
        """Write the pieces of an answer. One that its caller cancels ends with what there is of it."""
        parts, asking = self._parts, self._asking(request, context)
        written = AnswerPieces(asking.request_id)
        with self._counted(name) as counted, metered(asking.caller, parts.figures):
            try:
                async with parts.admission.admit(parts.limits.request_timeout_seconds) as lifetime:
                    _shorten(lifetime, context)
                    order = parse(body(), parts.limits.parsing)
                    tell_asked("chat" if name == "Chat" else "text_completion", order.wish.model, asking.request_id)
                    with parts.running.entered(asking.caller.tenant, asking.request_id, lifetime):
                        served = await parts.serving.begin(order.wishes, order.choices, asking, lifetime)
                        written.begin(served.ends, reads_calls=served.reads_calls)
                        async with aclosing(served.pieces) as pieces:
                            async for piece in pieces:
                                await writer.write(written.write(piece))
                        tell_answered(served.ends)
            except RequestCancelled:
                counted.outcome = "cancelled"
                if not (written.begun and await writer.finish(written.cut())):
                    raise

    def _asking(self, request: Any, context: Context) -> Asking:
        """Raises AccessDenied without a fit key, RequestRefused for a name that is none."""
        caller = self._caller(context)
        if request.request_id and not REQUEST_ID.fullmatch(request.request_id):
            raise RequestRefused(
                "'request_id': letters, digits, '.', '_' and '-', up to 128", param="request_id", code="invalid_value"
            )
        return Asking(request.request_id or uuid.uuid4().hex, caller, time.monotonic())

    def _caller(self, context: Context) -> Caller:
        shown = next((str(value) for name, value in context.invocation_metadata() or () if name == "authorization"), None)
        return self._parts.keys.caller_of(shown)

    @contextmanager
    def _counted(self, name: str) -> Iterator[_Counted]:
        """Counts a request as the HTTP routes do."""
        figures, counted = self._parts.figures, _Counted()
        route, begun, outcome = f"rpc/{name}", time.monotonic(), "left"
        figures.request_began(route)
        try:
            yield counted
            outcome = "ok"
        except RequestCancelled:
            outcome = "cancelled"
            raise
        except Exception as error:
            outcome = outcome_of_error(error)
            raise
        finally:
            figures.request_ended(route, counted.outcome or outcome, time.monotonic() - begun)


def _shorten(lifetime: Lifetime, context: Context) -> None:
    left = context.time_remaining()
    if left is not None and left < 1e9:
        lifetime.shorten(max(left, 0.0))
