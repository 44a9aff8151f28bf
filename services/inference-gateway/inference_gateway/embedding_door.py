"""The route that makes vectors of texts: a body comes in, vectors go out."""

from __future__ import annotations

import base64
import struct

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from inference_gateway.answer_models import EmbeddingList
from inference_gateway.completion_door import DoorLimits
from inference_gateway.domain.embedding import Embedding, Vectors
from inference_gateway.domain.errors import ClientLeft, RequestCancelled
from inference_gateway.domain.generation import Usage
from inference_gateway.domain.lifetime import Admission
from inference_gateway.domain.ports import Figures
from inference_gateway.domain.running import Running
from inference_gateway.domain.tally import prompt_charged
from inference_gateway.frame import record_of
from inference_gateway.replies import json_reply
from inference_gateway.request_body import departure_ends, read_body
from inference_gateway.request_headers import priority_of, timeout_of
from inference_gateway.request_parsing import EmbeddingOrder, parse_embedding
from inference_gateway.span_attributes import tell_asked, tell_used


class EmbeddingDoor:
    """An ASGI application for /v1/embeddings."""

    def __init__(self, embedding: Embedding, admission: Admission, running: Running, figures: Figures, limits: DoorLimits) -> None:
        self._embedding, self._admission, self._running = embedding, admission, running
        self._figures, self._limits = figures, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; errors are raised."""
        record, limits = record_of(scope), self._limits
        try:
            async with self._admission.admit(limits.request_timeout_seconds) as lifetime:
                headers = Headers(scope=scope)
                timeout_seconds, _ = timeout_of(headers), priority_of(headers)  # vectors wait in no line; a wrong class is refused
                body = await read_body(receive, headers, bytes_max=limits.body_bytes_max, seconds_max=limits.body_seconds_max)
                if timeout_seconds is not None:
                    lifetime.shorten(timeout_seconds)
                order = parse_embedding(body, limits.parsing)
                for name in order.ignored:
                    self._figures.field_ignored(name)
                tell_asked("embeddings", order.model, record.request_id)
                with self._running.entered(record.caller.tenant, record.request_id, lifetime):
                    async with departure_ends(lifetime, receive):
                        plan = await self._embedding.plan(order.model, order.prompts, order.dimensions)
                        with prompt_charged(record.caller, self._figures, plan.prompt_tokens):
                            vectors = await self._embedding.vectors(plan, record.request_id, lifetime.deadline)
        except ClientLeft:
            record.outcome = "left"
            self._figures.client_left()
            return
        except RequestCancelled:
            record.outcome = "cancelled"
            raise
        tell_used(Usage(vectors.prompt_tokens, 0, 0))
        await json_reply(_written(vectors, order))(scope, receive, send)


def _written(vectors: Vectors, order: EmbeddingOrder) -> EmbeddingList:
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(values).decode()
                if order.base64
                else [value for (value,) in struct.iter_unpack("<f", values)],
            }
            for index, values in enumerate(vectors.values)
        ],
        "model": vectors.model,
        "usage": {"prompt_tokens": vectors.prompt_tokens, "total_tokens": vectors.prompt_tokens},
    }
