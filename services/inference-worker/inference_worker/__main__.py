"""The worker's process: puts settings, model, memory, engine and server together."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from inference_worker.settings import EngramFusionMode, Precision, Settings
from treadle.chassis import log as chassis_log
from treadle.chassis.settings import WrongSetting, load_settings
from treadle.chassis.threads import set_compute_threads
from treadle.contract.errors import TreadleError

if TYPE_CHECKING:  # all of these import torch, which must find its thread settings made
    from prometheus_client import CollectorRegistry

    from inference_worker.domain.engine import Engine
    from inference_worker.domain.engram import EngramMemory
    from inference_worker.server import ModelCard
    from treadle.nn.config import ModelConfig

PROGRAM = "treadle-inference-worker"
log = logging.getLogger("treadle.worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until it is told to stop; the exit code: 0 drained, 1 could not start, 2 wrong setting."""
    settings = load_settings(Settings, "WORKER", PROGRAM, argv)
    chassis_log.configure(settings.log_level, settings.log_format)
    set_compute_threads(settings.threads)
    try:
        return _serve(settings)
    except WrongSetting as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except TreadleError as error:
        sys.stderr.write(f"{PROGRAM}: cannot start: {error}\n")
        return 1


def _serve(settings: Settings) -> int:
    from prometheus_client import CollectorRegistry

    from inference_worker.domain.engine_thread import EngineThread
    from inference_worker.server import STATUS, WorkerServer
    from treadle.chassis.server import run_service
    from treadle.inference.v1 import worker_pb2, worker_pb2_grpc

    registry = CollectorRegistry()
    with ExitStack() as stack:
        engine, card = stack.enter_context(_engine(settings, registry))
        thread = stack.enter_context(EngineThread(engine))

        def register(server: object) -> Sequence[str]:
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServer(thread, card, settings.policy), server)  # type: ignore[arg-type]
            return [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name]

        async def close_door() -> None:
            engine.close_door()

        return asyncio.run(
            run_service(
                "inference-worker", settings, register, area="worker", status=STATUS, registry=registry,
                build_version=card.build_version, on_drain=close_door,
            )
        )  # fmt: skip


@contextmanager
def _engine(settings: Settings, registry: CollectorRegistry) -> Iterator[tuple[Engine, ModelCard]]:
    """The engine with its model and memory, and what the server says of it."""
    import torch

    from inference_worker.adapters.model_folder import find_model_folder
    from inference_worker.adapters.prometheus import WorkerMetrics
    from inference_worker.adapters.tokenizer_file import digest_of, read_vocabulary
    from inference_worker.domain.engine import Engine
    from inference_worker.server import ModelCard
    from treadle.nn.model import CausalLM

    folder, name = find_model_folder(settings.model, _log_progress)
    vocabulary = read_vocabulary(folder / "tokenizer.json")
    model = CausalLM.load(folder, torch.bfloat16 if settings.dtype is Precision.BFLOAT16 else torch.float32)
    name = settings.served_model_name or name
    metrics = WorkerMetrics(registry)
    card = ModelCard(name, folder, digest_of(folder / "tokenizer.json"), _build_version())
    with ExitStack() as stack:
        memory = stack.enter_context(_memory(settings, model.config, folder)) if settings.wants_engram else None
        engine = Engine(model, vocabulary, settings.limits, memory, name=name, observer=metrics)
        metrics.watch(engine)
        log.info("model loaded", extra={"model": name, "folder": str(folder), "context_tokens_max": engine.context_tokens_max})
        yield engine, card


@contextmanager
def _memory(settings: Settings, config: ModelConfig, folder: Path) -> Iterator[EngramMemory]:
    """The Engram memory that the settings name, from the pool; its handle is pinned to one version until the end."""
    from inference_worker.adapters.engram_pool import open_engram, read_key
    from inference_worker.domain.engram import EngramMemory, check_fits, fusion_of
    from treadle.client.endpoint import Endpoint
    from treadle.client.engram import StepPrefetcher

    endpoint = Endpoint(settings.engram_pool, read_key(settings.engram_key_file), settings.engram_tls_root_file)
    with open_engram(
        endpoint, settings.engram_model, settings.engram_version, settings.engram_transport.value, settings.engram_open_seconds_max
    ) as handle:
        check_fits(handle.model, config, folder / "tokenizer.json")
        fusion = fusion_of(handle.model, config.hidden, settings.engram_fusion_weights)
        fused = settings.engram_fusion is EngramFusionMode.ON
        prefetcher = StepPrefetcher(handle, policy=settings.policy, prefetch=settings.engram_prefetch)
        log.info(
            "engram opened",
            extra={"model": handle.model.name, "version": handle.version, "transport": handle.transport, "fused": fused},
        )
        yield EngramMemory(
            handle.model, handle.version, handle.transport, fusion, prefetcher, fused=fused,
            wait_seconds_max=settings.engram_wait_seconds_max,
        )  # fmt: skip


def _log_progress(step: str, fraction: float) -> None:
    if fraction < 1:
        log.info("fetching the model", extra={"step": step, "done": f"{fraction:.0%}"})


def _build_version() -> str:
    try:
        return metadata.version("treadle-inference-worker")
    except metadata.PackageNotFoundError:  # run from the tree
        return "0.0.0"


if __name__ == "__main__":
    sys.exit(main())
