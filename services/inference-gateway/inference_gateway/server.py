"""The HTTP application: routes, and how errors leave it.

Owns which path is served by what. Messages in, domain calls, messages out; no logic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler

from inference_gateway.answer_models import Cancelled, Health, ModelList, Readiness, Version, WorkerReadiness
from inference_gateway.completion_door import CHAT, COMPLETION, CompletionDoor, DoorLimits
from inference_gateway.domain.api_keys import ApiKeys
from inference_gateway.domain.dispatch import Dispatch
from inference_gateway.domain.embedding import Embedding
from inference_gateway.domain.fleet import Fleet, meant
from inference_gateway.domain.lifetime import Admission, stopping
from inference_gateway.domain.member import Member
from inference_gateway.domain.pool_watch import PoolWatch
from inference_gateway.domain.ports import Figures
from inference_gateway.domain.running import Running
from inference_gateway.domain.served_model import ServedModel
from inference_gateway.domain.serving import Serving
from inference_gateway.embedding_door import EmbeddingDoor
from inference_gateway.frame import Frame, record_of
from inference_gateway.metered_routes import MeteredRoutes
from inference_gateway.model_list import model_answer, model_list
from inference_gateway.openapi import openapi_document
from inference_gateway.page_route import Page
from inference_gateway.replies import error_object, error_reply, json_reply
from inference_gateway.request_head import HeadLimits
from inference_gateway.status_answer import FabricStatus, pools_status, workers_status
from treadle.contract import PROTO_VERSION
from treadle.contract.errors import AccessDenied, TreadleError, Unavailable


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes are made of; put together in `__main__`."""

    fleet: Fleet
    serving: Serving
    embedding: Embedding
    admission: Admission
    dispatch: Dispatch
    running: Running
    figures: Figures
    keys: ApiKeys
    pools: Sequence[PoolWatch]
    limits: DoorLimits
    head: HeadLimits
    looks_open: bool  # /metrics, and the workers in /ready, need no key
    build_version: str

    def not_ready_because(self) -> str | None:
        """Why a request would not be served now; None: it would."""
        return str(stopping()) if self.admission.leaving else self.fleet.not_ready_because()


def build_app(parts: Parts) -> ASGIApp:
    """The whole application."""
    door = (parts.serving, parts.admission, parts.running, parts.figures, parts.limits)
    looks = Looks(parts)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", CompletionDoor(CHAT, *door), methods=["POST"]),
            Route("/v1/completions", CompletionDoor(COMPLETION, *door), methods=["POST"]),
            Route("/", Page().answer),
            Route("/v1/treadle/status", looks.status),
            Route("/v1/embeddings", EmbeddingDoor(parts.embedding, *door[1:]), methods=["POST"]),
            Route("/v1/requests/{request_id}/cancel", CancelDoor(parts.running).cancel, methods=["POST"]),
            Route("/v1/models", looks.models),
            Route("/v1/models/{model:path}", looks.model),
            Route("/health", looks.health),
            Route("/ready", looks.ready),
            Route("/version", looks.version),
            Route("/metrics", looks.metrics),
            Route("/openapi.json", looks.openapi),
        ],
        exception_handlers={
            TreadleError: cast("ExceptionHandler", _on_error),
            HTTPException: cast("ExceptionHandler", _on_wrong_path),
            Exception: cast("ExceptionHandler", _on_error),  # raised again after its answer; the frame logs it
        },
    )
    return Frame(MeteredRoutes(app, parts.figures), parts.keys, parts.figures, parts.head)


class CancelDoor:
    """The route that ends a request of the same caller."""

    def __init__(self, running: Running) -> None:
        self._running = running

    async def cancel(self, request: Request) -> Response:
        """POST /v1/requests/{request_id}/cancel: by X-Request-Id, or by the id of its answer."""
        asked = request.path_params["request_id"]
        self._running.cancel(record_of(request.scope).caller.tenant, asked)
        done: Cancelled = {"id": asked, "cancelled": True}
        return json_reply(done)


class Looks:
    """The routes that only look."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._openapi = openapi_document(parts.build_version)
        self._begun_seconds = time.monotonic()

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the last known models and their memories, even while their workers restart."""
        caller = record_of(request.scope).caller
        listed = [entry for model in self._served() for entry in model_list(model, caller.memory)]
        served: ModelList = {"object": "list", "data": listed}
        return json_reply(served)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}: also of an alias, its `+` as it is or as %2B."""
        asked = request.path_params["model"]
        model = meant(asked, self._served())
        return json_reply(model_answer(model, asked, record_of(request.scope).caller.memory))

    async def status(self, request: Request) -> Response:
        """GET /v1/treadle/status: how everything is, as far as it is known now."""
        reason = self._parts.not_ready_because()
        status: FabricStatus = {
            "gateway": {
                "version": self._parts.build_version,
                "ready": reason is None,
                "reason": reason,
                "draining": self._parts.admission.draining,
                "uptime_seconds": round(time.monotonic() - self._begun_seconds, 3),
                "in_progress": self._parts.admission.in_progress,
                "waiting": sum(line.waiting for line in self._parts.dispatch.lines.values()),
            },
            "workers": workers_status(self._parts.fleet),
            "pools": pools_status(self._parts.pools),
        }
        return json_reply(status, headers={"cache-control": "no-store"})

    async def health(self, request: Request) -> Response:
        """GET /health: the process lives, whatever the worker does."""
        alive: Health = {"status": "ok"}
        return json_reply(alive)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 if a request would be served now, else 503; with the reason and the workers for who may see them."""
        reason = self._parts.not_ready_because()
        answer: Readiness = {"ready": reason is None}
        if self._may_look(request):
            answer["workers"] = [_readiness(member) for member in self._parts.fleet.members]
            if reason is not None:
                answer["reason"] = reason
        return json_reply(answer, 200 if reason is None else 503, {} if reason is None else {"retry-after": "1"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        version: Version = {"version": self._parts.build_version, "proto_version": PROTO_VERSION}
        return json_reply(version)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus's format. Raises AccessDenied."""
        if not self._parts.looks_open:
            self._check_key(request)
        text, content_type = self._parts.figures.exposition()
        return Response(text, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return json_reply(self._openapi)

    def _may_look(self, request: Request) -> bool:
        try:
            self._check_key(request)
        except AccessDenied:
            return self._parts.looks_open
        return True

    def _check_key(self, request: Request) -> None:
        self._parts.keys.caller_of(request.headers.get("authorization"))

    def _served(self) -> list[ServedModel]:
        models = self._parts.fleet.models()
        if not models:
            raise Unavailable(f"no worker is ready: {self._parts.fleet.not_ready_because()}")
        return models


def _readiness(member: Member) -> WorkerReadiness:
    known, reason = member.watch.last_known, member.not_usable_because()
    answer: WorkerReadiness = {"name": member.name, "model": known.name if known else None, "state": member.state.value}
    if reason is not None:
        answer["reason"] = reason
    return answer


async def _on_error(request: Request, error: Exception) -> Response:
    return error_reply(error)


async def _on_wrong_path(request: Request, error: HTTPException) -> Response:
    """Starlette's own 404 and 405."""
    answer = error_object(f"{request.method} {request.url.path[:200]}: {error.detail}", "invalid_request_error")
    return json_reply(answer, error.status_code, error.headers)
