"""The worker's process: puts settings, model, memory, engine and server together."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from inference_worker.settings import Precision, Settings
from treadle.chassis import log as chassis_log
from treadle.chassis.settings import WrongSetting, load_settings
from treadle.chassis.threads import set_compute_threads
from treadle.contract.errors import TreadleError

if TYPE_CHECKING:  # all of these import torch, which must find its thread settings made
    from prometheus_client import CollectorRegistry

    from inference_worker.adapters.engram_pool import PoolOfMemories
    from inference_worker.adapters.prometheus import WorkerMetrics
    from inference_worker.domain.catalogue import Catalogue
    from inference_worker.domain.engine import Engine
    from inference_worker.domain.memory_opening import Opener
    from inference_worker.domain.memory_status import NoCatalogue
    from inference_worker.server import ModelCard
    from treadle.nn.config import ModelConfig

PROGRAM = "treadle-inference-worker"
FIRST_ANSWER_SECONDS_MAX = 10.0  # a worker that is ready should know what there is to choose, if the pool is there
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
        engine, card, metrics, config = _engine(settings, registry)
        memories = stack.enter_context(_memories(settings, config, card.folder, metrics))
        thread = stack.enter_context(EngineThread(engine))

        def register(server: object) -> Sequence[str]:
            servicer = WorkerServer(thread, card, settings.policy, memories, open_seconds_max=settings.engram_open_seconds_max)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
            return [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name]

        async def close_door() -> None:
            engine.close_door()

        return asyncio.run(
            run_service(
                "inference-worker", settings, register, area="worker", status=STATUS, registry=registry,
                build_version=card.build_version, on_drain=close_door,
            )
        )  # fmt: skip


def _engine(settings: Settings, registry: CollectorRegistry) -> tuple[Engine, ModelCard, WorkerMetrics, ModelConfig]:
    """The engine with its model, what the server says of it, who counts, and what memories must fit."""
    import torch

    from inference_worker.adapters.prometheus import WorkerMetrics
    from inference_worker.adapters.tokenizer_file import digest_of, read_vocabulary
    from inference_worker.domain.engine import Engine
    from inference_worker.server import ModelCard
    from treadle.client.engram import StepPrefetcher
    from treadle.nn.model import CausalLM
    from treadle.nn.model_folder import find_model_folder

    folder, name = find_model_folder(settings.model, _log_progress)
    vocabulary = read_vocabulary(folder / "tokenizer.json")
    model = CausalLM.load(folder, torch.bfloat16 if settings.dtype is Precision.BFLOAT16 else torch.float32)
    name = settings.served_model_name or name
    metrics = WorkerMetrics(registry)
    engine = Engine(
        model, vocabulary, settings.limits, prefetcher=StepPrefetcher(policy=settings.policy, prefetch=settings.engram_prefetch),
        engram_wait_seconds_max=settings.engram_wait_seconds_max, name=name, observer=metrics,
    )  # fmt: skip
    metrics.watch(engine)
    log.info("model loaded", extra={"model": name, "folder": str(folder), "context_tokens_max": engine.context_tokens_max})
    return engine, ModelCard(name, folder, digest_of(folder / "tokenizer.json"), _build_version()), metrics, model.config


@contextmanager
def _memories(settings: Settings, config: ModelConfig, folder: Path, metrics: WorkerMetrics) -> Iterator[Catalogue | NoCatalogue]:
    """The memories of the settings' pool, its list watched, the default one open."""
    from inference_worker.adapters.engram_pool import PoolOfMemories, read_key
    from inference_worker.adapters.pool_watch import PoolWatch
    from inference_worker.domain.catalogue import Catalogue
    from inference_worker.domain.memory_opening import FusionFile, Opener
    from inference_worker.domain.memory_status import NoCatalogue
    from inference_worker.domain.resident_versions import Choice
    from treadle.client.endpoint import Endpoint

    if not settings.watches_pool:
        yield NoCatalogue()
        return
    endpoint = Endpoint(
        settings.engram_pool, read_key(settings.engram_key_file), settings.engram_tls_root_file,
        tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file,
    )  # fmt: skip
    weights = settings.engram_fusion_weights
    opener = Opener(
        config, folder / "tokenizer.json", settings.engram_fusion,
        FusionFile(settings.engram_model, weights) if weights is not None else None,
    )  # fmt: skip
    default = Choice(settings.engram_model, settings.engram_version) if settings.has_default_memory else None
    pool = PoolOfMemories(endpoint, settings.engram_transport.value)
    catalogue = Catalogue(pool, opener, open_max=settings.engram_memories_max, default=default, observer=metrics)
    metrics.watch_memories(catalogue)
    with closing(catalogue):
        if default is not None:
            _open_default(settings, catalogue, opener, pool)
        with PoolWatch(endpoint, catalogue) as watch:
            watch.wait_answered(FIRST_ANSWER_SECONDS_MAX)
            yield catalogue


def _open_default(settings: Settings, catalogue: Catalogue, opener: Opener, pool: PoolOfMemories) -> None:
    """Open the memory of requests that choose none; the start waits for it, and fails without it."""
    from inference_worker.adapters.engram_pool import open_engram

    handle = open_engram(
        pool.endpoint, settings.engram_model, settings.engram_version, pool.transport, settings.engram_open_seconds_max
    )
    try:
        memory = opener.memory_of(pool, handle)
    except BaseException:
        handle.close()
        raise
    catalogue.adopt_default(memory)
    log.info(
        "engram opened",
        extra={"model": handle.model.name, "version": handle.version, "transport": memory.transport, "fused": memory.fused},
    )


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
