"""The fake pool, store and worker: gRPC servers that keep names and versions of what is loaded, and make answers up.

The worker asks for a key where it is given a file of keys, as the real one does.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, start_http_server

from treadle.asm.v1 import asm_store_pb2, asm_store_pb2_grpc
from treadle.client import Fabric
from treadle.contract import PROTO_VERSION, EngramModel
from treadle.engram.v1 import engram_pool_pb2, engram_pool_pb2_grpc
from treadle.inference.v1 import worker_pb2, worker_pb2_grpc

MODEL = "fake-135m"
NATS_A_TOKEN = 3.0  # without a memory
BLOCK_TOKENS = 256  # of a prompt; longer ones hold a text to go by
WEIGHTS = b"weights"  # of every grown folder that the tests write
SERVERS: list[grpc.Server] = []  # a gRPC server that nobody refers to is stopped


class _Pool(engram_pool_pb2_grpc.EngramPoolServiceServicer):
    def __init__(self, kept: Path) -> None:
        self._kept = kept  # as a real pool's segments do, it outlives the process
        self._registry = CollectorRegistry()
        self._sent = Counter("treadle_engram_fusion_bytes", "Fusion weights", registry=self._registry)
        self._read: set[str] = set()  # models whose weights somebody has: counted as read

    def serve_metrics(self, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        server, _ = start_http_server(int(port), host, self._registry)
        return f"{host}:{server.server_port}"

    def Status(self, request: Any, context: Any) -> engram_pool_pb2.StatusResponse:  # noqa: N802 - gRPC's name
        return engram_pool_pb2.StatusResponse(
            build_version="9.9", proto_version=PROTO_VERSION, table_bytes=204 << 20, page_bytes=4096
        )

    def LoadTable(self, request: Any, context: Any) -> Iterator[engram_pool_pb2.LoadTableResponse]:  # noqa: N802
        manifest = (Path(request.grown.path) / "manifest.json").read_bytes() if request.grown.path else request.manifest_json
        name = EngramModel.from_json(manifest).name
        self._kept.joinpath(f"{name}.json").write_bytes(manifest)
        yield engram_pool_pb2.LoadTableResponse(loaded=self._resident(manifest))

    def ListModels(self, request: Any, context: Any) -> engram_pool_pb2.ListModelsResponse:  # noqa: N802
        manifests = [path.read_bytes() for path in sorted(self._kept.glob("*.json"))]
        return engram_pool_pb2.ListModelsResponse(models=map(self._resident, manifests))

    def OpenModel(self, request: Any, context: Any) -> engram_pool_pb2.OpenModelResponse:  # noqa: N802
        manifest = self._kept.joinpath(f"{request.ref.model}.json").read_bytes()
        return engram_pool_pb2.OpenModelResponse(model=self._resident(manifest))

    def ReadFusion(self, request: Any, context: Any) -> Iterator[engram_pool_pb2.ReadFusionResponse]:  # noqa: N802
        self._read.add(request.ref.model)
        self._sent.inc(int(os.environ.get("FAKE_WEIGHTS", len(WEIGHTS))))
        yield engram_pool_pb2.ReadFusionResponse(data=WEIGHTS, bytes_total=len(WEIGHTS))

    def RemoveModel(self, request: Any, context: Any) -> engram_pool_pb2.RemoveModelResponse:  # noqa: N802
        self._kept.joinpath(f"{request.ref.model}.json").unlink()
        return engram_pool_pb2.RemoveModelResponse(removed=[request.ref])

    def _resident(self, manifest: bytes) -> engram_pool_pb2.Model:
        model = EngramModel.from_json(manifest)
        ref = engram_pool_pb2.ModelRef(model=model.name, version=model.version)
        readers = int(model.name in self._read)
        return engram_pool_pb2.Model(ref=ref, manifest_json=manifest, current=True, segment_bytes=12 << 20, readers=readers)


class _Store(asm_store_pb2_grpc.AsmStoreServiceServicer):
    def Status(self, request: Any, context: Any) -> asm_store_pb2.StatusResponse:  # noqa: N802
        return asm_store_pb2.StatusResponse(
            build_version="9.9", proto_version=PROTO_VERSION, file_bytes=int(os.environ.get("FAKE_KEPT", "0")), file_bytes_max=10**9
        )

    def List(self, request: Any, context: Any) -> asm_store_pb2.ListResponse:  # noqa: N802
        return asm_store_pb2.ListResponse()


class _KeyAsked(grpc.ServerInterceptor):
    """Refuses calls that do not show the key."""

    def __init__(self, key: str) -> None:
        self._shown = f"Bearer {key}"
        self._refused: Any = grpc.unary_unary_rpc_method_handler(
            lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "show a key")
        )

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        shown = dict(details.invocation_metadata).get("authorization")
        return continuation(details) if shown == self._shown else self._refused


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, pool: str, model_dir: str, engine: str) -> None:
        self._pool, self._model_dir, self._engine = pool, model_dir, engine
        self._tokens: dict[str, int] = {}

    def Status(self, request: Any, context: Any) -> worker_pb2.StatusResponse:  # noqa: N802
        layers = [
            worker_pb2.EngramLayerStatus(layer=layer, tickets=40, tickets_in_time=40, gather_seconds_p50=6e-5, row_bytes=1 << 20)
            for layer in (2, 15)
        ]
        memories = [
            worker_pb2.EngramModelStatus(
                model=name, version=version, open=name in self._tokens, tokens=self._tokens.get(name, 0), transport="mapped", fused=True,
                refusal="" if name in _offered() else "token_map differs",
            )
            for name, version in self._versions().items()
        ]  # fmt: skip
        prefixes = [
            worker_pb2.PrefixStatus(
                name=name, version="a5" * 32, prefix_tokens=4096, open=name != "old-rules", mapped_bytes=12 << 20,
                refusal="model.rope differs" if name == "old-rules" else "",
            )
            for name in filter(None, os.environ.get("FAKE_PREFIXES", "").split(","))
        ]  # fmt: skip
        return worker_pb2.StatusResponse(
            build_version="9.9", proto_version=PROTO_VERSION, prefixes=prefixes, model=MODEL, model_dir=self._model_dir, steps=40, step_seconds=2.0,
            completion_tokens=38, engram_model="smollm2-demo", engram_transport="mapped", engram_layers=layers, engram_models=memories,
            engine=self._engine, engine_version="1.2", dtype="float32",
        )  # fmt: skip

    def Generate(self, request: Any, context: Any) -> Iterator[worker_pb2.GenerateResponse]:  # noqa: N802
        """Log-probabilities of the prompt; FAKE_NATS (a JSON object, by memory) says how much better or worse than without.

        Behind a long prefix, or with a long text in the prompt, they are better; FAKE_DICTIONARY `useless`: not behind a prefix.
        """
        name, tokens = request.engram.model, request.prompt_token_ids
        nats = NATS_A_TOKEN + json.loads(os.environ.get("FAKE_NATS", "{}")).get(name, -0.2 if name == "kjv" else 0.0)
        useful = request.prefix.name and os.environ.get("FAKE_DICTIONARY") != "useless"
        nats -= 2.0 if useful or len(tokens) > BLOCK_TOKENS else 0.0
        if name and name not in self._tokens:
            with Fabric(engram=self._pool) as fabric:
                fabric.engram.read_fusion(name)
        self._tokens[name] = self._tokens.get(name, 0) + len(tokens)
        predicted = [worker_pb2.TokenLogprob(token_id=token, logprob=-nats) for token in tokens[1:]]
        yield worker_pb2.GenerateResponse(prompt_logprobs=predicted[:7])
        report = worker_pb2.MemoryReport(
            kind="engram", name=name, version=self._versions().get(name, ""), transport="mapped", tickets=4, tickets_in_time=4,
            rows_missing=int(os.environ.get("FAKE_MISSING", "0")),
        )  # fmt: skip
        yield worker_pb2.GenerateResponse(
            prompt_logprobs=predicted[7:], finish_reason=worker_pb2.FINISH_REASON_LENGTH, memory=[report] if name else []
        )

    def _versions(self) -> dict[str, str]:
        if not self._pool:
            return {}
        with Fabric(engram=self._pool) as fabric:
            return {model.model.name: model.version for model in fabric.engram.list_models()}


def _offered() -> list[str]:
    return os.environ.get("FAKE_MEMORIES", "kjv,code").split(",")


def _grpc_server(listen: str, key_file: str = "") -> tuple[grpc.Server, str]:
    key_asked: list[grpc.ServerInterceptor] = [_KeyAsked(Path(key_file).read_text().strip())] if key_file else []
    server = grpc.server(ThreadPoolExecutor(2), interceptors=key_asked)
    host, _, _ = listen.rpartition(":")
    SERVERS.append(server)
    return server, f"{host}:{server.add_insecure_port(listen)}"


def serve_pool(arguments: dict[str, str]) -> tuple[str, str]:
    """Where it listens, for calls and for its metrics."""
    folder = Path(arguments["--segment-dir"])
    folder.mkdir(mode=0o750, exist_ok=True)
    lock = os.open(folder / "pool.lock", os.O_RDWR | os.O_CREAT, 0o640)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "segment").write_bytes(b"x" * 4096)
    server, address = _grpc_server(arguments["--listen"])
    pool = _Pool(folder)  # type: ignore[abstract]
    engram_pool_pb2_grpc.add_EngramPoolServiceServicer_to_server(pool, server)
    server.start()
    return address, pool.serve_metrics(arguments["--metrics-listen"])


def serve_store(arguments: dict[str, str]) -> tuple[str, str]:
    """Where it listens for calls, and where its metrics would be."""
    Path(arguments["--data-dir"]).mkdir(parents=True, exist_ok=True)
    server, address = _grpc_server(arguments["--listen"])
    asm_store_pb2_grpc.add_AsmStoreServiceServicer_to_server(_Store(), server)  # type: ignore[abstract]  # nobody calls the others
    server.start()
    return address, arguments["--metrics-listen"].replace(":0", ":2")


def serve_worker(arguments: dict[str, str]) -> tuple[str, str]:
    """Where it listens for calls, and where its metrics would be."""
    server, address = _grpc_server(arguments["--listen"], arguments.get("--api-key-file", ""))
    worker = _Worker(arguments.get("--engram-pool", ""), arguments["--model"], arguments["--engine"])  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    server.start()
    return address, arguments["--metrics-listen"].replace(":0", ":1")


SERVE = {"engram-pool": serve_pool, "asm-store": serve_store, "inference-worker": serve_worker}
