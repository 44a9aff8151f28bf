"""The fake pool and worker: gRPC servers that know their status and nothing else."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from treadle.contract import PROTO_VERSION
from treadle.engram.v1 import engram_pool_pb2, engram_pool_pb2_grpc
from treadle.inference.v1 import worker_pb2, worker_pb2_grpc

MODEL = "fake-135m"
SERVERS: list[grpc.Server] = []  # a gRPC server that nobody refers to is stopped


class _Pool(engram_pool_pb2_grpc.EngramPoolServiceServicer):
    def Status(self, request: Any, context: Any) -> engram_pool_pb2.StatusResponse:  # noqa: N802 - gRPC's name
        return engram_pool_pb2.StatusResponse(
            build_version="9.9", proto_version=PROTO_VERSION, table_bytes=204 << 20, page_bytes=4096
        )

    def ListModels(self, request: Any, context: Any) -> engram_pool_pb2.ListModelsResponse:  # noqa: N802
        return engram_pool_pb2.ListModelsResponse()


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    def Status(self, request: Any, context: Any) -> worker_pb2.StatusResponse:  # noqa: N802
        tickets = int(os.environ.get("FAKE_TICKETS", "40"))
        layers = [
            worker_pb2.EngramLayerStatus(
                layer=layer, tickets=tickets, tickets_in_time=tickets, gather_seconds_p50=6e-5, row_bytes=1 << 20
            )
            for layer in (2, 15)
        ]
        return worker_pb2.StatusResponse(
            build_version="9.9", proto_version=PROTO_VERSION, model=MODEL, steps=40, step_seconds=2.0, completion_tokens=38,
            engram_model="smollm2-demo", engram_transport="mapped", engram_layers=layers,
        )  # fmt: skip


def _grpc_server(listen: str) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(2))
    host, _, _ = listen.rpartition(":")
    SERVERS.append(server)
    return server, f"{host}:{server.add_insecure_port(listen)}"


def serve_pool(arguments: dict[str, str]) -> str:
    folder = Path(arguments["--segment-dir"])
    folder.mkdir(mode=0o750, exist_ok=True)
    lock = os.open(folder / "pool.lock", os.O_RDWR | os.O_CREAT, 0o640)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "segment").write_bytes(b"x" * 4096)
    server, address = _grpc_server(arguments["--listen"])
    engram_pool_pb2_grpc.add_EngramPoolServiceServicer_to_server(_Pool(), server)  # type: ignore[abstract]
    server.start()
    return address


def serve_worker(arguments: dict[str, str]) -> str:
    server, address = _grpc_server(arguments["--listen"])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Worker(), server)  # type: ignore[abstract]
    server.start()
    return address
