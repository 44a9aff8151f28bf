"""A worker's status as the figures that people look at."""

from __future__ import annotations

from inference_gateway.domain.worker_figures import EngramFigures, LayerFigures, MemoryUse, WorkerFigures
from treadle.inference.v1 import worker_pb2


def figures_of(response: worker_pb2.StatusResponse) -> WorkerFigures:
    """The figures that a status carries."""
    return WorkerFigures(
        engine=response.engine,
        engine_version=response.engine_version,
        dtype=response.dtype,
        requests_running=response.requests_running,
        requests_running_max=response.requests_running_max,
        requests_waiting=response.requests_waiting,
        requests_waiting_max=response.requests_waiting_max,
        wait_seconds_predicted=response.wait_seconds_predicted,
        steps=response.steps,
        step_seconds=response.step_seconds,
        prompt_tokens=response.prompt_tokens,
        completion_tokens=response.completion_tokens,
        cached_tokens=response.cached_tokens,
        engram=EngramFigures(
            response.engram_model,
            response.engram_version,
            response.engram_transport,
            response.engram_fused,
            tuple(_layer(layer) for layer in response.engram_layers),
        ),
        memories=tuple(_memory(item) for item in response.engram_models),
    )


def _layer(told: worker_pb2.EngramLayerStatus) -> LayerFigures:
    return LayerFigures(
        told.layer, told.tickets, told.tickets_in_time, told.gather_seconds_p50, told.gather_seconds_p99,
        told.slack_seconds_p50, told.slack_seconds_p01, told.stall_seconds, told.row_bytes, told.rows_missing,
    )  # fmt: skip


def _memory(told: worker_pb2.EngramModelStatus) -> MemoryUse:
    return MemoryUse(
        told.model, told.version, told.open, told.default, told.requests, told.tokens, told.transport, told.fused, told.refusal
    )
