"""Listens for GatewayService, beside the HTTP server of the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from inference_gateway.rpc_door import STATUS, GatewayServer
from inference_gateway.server import Parts
from inference_gateway.settings import Settings
from treadle.chassis.interceptors import CallGuard, RpcMetrics
from treadle.chassis.server import MESSAGE_BYTES_MAX, bind
from treadle.inference.v1 import gateway_pb2, gateway_pb2_grpc

CLOSE_SECONDS = 3  # for calls that were ended by the drain to leave


@asynccontextmanager
async def rpc_listening(settings: Settings, parts: Parts, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves while the body runs; gives the address that is listened on, host:port, or "" where the settings name none.

    Raises WrongSetting for an address that cannot be used.
    """
    if not settings.grpc_listen:
        yield ""
        return
    # Keys are looked at by the service itself, which knows whose they are; the guard has the error table and the figures.
    guard = CallGuard(
        status=STATUS, keys=frozenset(), calls_max=settings.connections_max, metrics=RpcMetrics(registry, "gateway"),
        begins_traces=True, words_in_logs=False,
    )  # fmt: skip
    options = [
        ("grpc.max_receive_message_length", settings.body_bytes_max),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(interceptors=[guard], options=options)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayServer(parts), server)
    reflection.enable_server_reflection(
        [gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name, reflection.SERVICE_NAME], server
    )
    address = bind(server, replace(settings, listen=settings.grpc_listen))
    await server.start()
    try:
        yield address
    finally:
        await server.stop(CLOSE_SECONDS)
