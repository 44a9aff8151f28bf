"""The HTTP application: routes, and how errors leave it.

Owns which path is served by what. Messages in, domain calls, messages out; no logic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler

from inference_gateway.answer_models import Health, ModelList, Readiness, Version
from inference_gateway.completion_door import CHAT, COMPLETION, CompletionDoor, DoorLimits
from inference_gateway.domain.api_keys import ApiKeys
from inference_gateway.domain.generating import Generating
from inference_gateway.domain.lifetime import Admission, stopping
from inference_gateway.domain.ports import Figures
from inference_gateway.domain.served_model import ServedModel, WorkerWatch
from inference_gateway.frame import Frame, record_of
from inference_gateway.model_list import model_answer, model_list
from inference_gateway.openapi import openapi_document
from inference_gateway.replies import error_object, error_reply, json_reply
from treadle.contract import PROTO_VERSION
from treadle.contract.errors import TreadleError, Unavailable


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes are made of; put together in `__main__`."""

    watch: WorkerWatch
    generating: Generating
    admission: Admission
    figures: Figures
    keys: ApiKeys
    limits: DoorLimits
    build_version: str


def build_app(parts: Parts) -> ASGIApp:
    """The whole application."""
    door = (parts.generating, parts.admission, parts.figures, parts.limits)
    looks = Looks(parts)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", CompletionDoor(CHAT, *door), methods=["POST"]),
            Route("/v1/completions", CompletionDoor(COMPLETION, *door), methods=["POST"]),
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
    return Frame(app, parts.keys, parts.figures)


class Looks:
    """The routes that only look."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._openapi = openapi_document(parts.build_version)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the last known model and its memories, even while its worker restarts."""
        listed = model_list(self._served(), record_of(request.scope).caller.memory)
        served: ModelList = {"object": "list", "data": listed}
        return json_reply(served)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}: also of an alias, its `+` as it is or as %2B."""
        return json_reply(model_answer(self._served(), request.path_params["model"], record_of(request.scope).caller.memory))

    async def health(self, request: Request) -> Response:
        """GET /health: the process lives, whatever the worker does."""
        alive: Health = {"status": "ok"}
        return json_reply(alive)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 if a request would be served now, else 503 with the reason."""
        draining = str(stopping()) if self._parts.admission.draining else None
        reason = draining or self._parts.watch.not_ready_because()
        answer: Readiness = {"ready": True} if reason is None else {"ready": False, "reason": reason}
        return json_reply(answer, 200 if reason is None else 503, {} if reason is None else {"retry-after": "1"})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        version: Version = {"version": self._parts.build_version, "proto_version": PROTO_VERSION}
        return json_reply(version)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus's format."""
        text, content_type = self._parts.figures.exposition()
        return Response(text, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return json_reply(self._openapi)

    def _served(self) -> ServedModel:
        model = self._parts.watch.last_known
        if model is None:
            raise Unavailable(f"no worker is ready: {self._parts.watch.not_ready_because()}")
        return model


async def _on_error(request: Request, error: Exception) -> Response:
    return error_reply(error)


async def _on_wrong_path(request: Request, error: HTTPException) -> Response:
    """Starlette's own 404 and 405."""
    answer = error_object(f"{request.method} {request.url.path[:200]}: {error.detail}", "invalid_request_error")
    return json_reply(answer, error.status_code, error.headers)
