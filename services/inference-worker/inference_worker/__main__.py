"""The worker's process: puts settings, model, memory, engine and server together."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from inference_worker.settings import EngineChoice, Precision, Settings
from treadle.chassis import log as chassis_log
from treadle.chassis.settings import WrongSetting, load_settings
from treadle.chassis.threads import set_compute_threads
from treadle.contract.errors import NotFound, TreadleError

if TYPE_CHECKING:  # all of these import torch, which must find its thread settings made
    from prometheus_client import CollectorRegistry

    from inference_worker.adapters.prometheus import WorkerMetrics
    from inference_worker.domain.engine import Engine
    from inference_worker.server import ModelCard
    from treadle.nn.config import ModelConfig

PROGRAM = "treadle-inference-worker"
log = logging.getLogger("treadle.worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until it is told to stop.

    The exit code: 0 drained, 1 could not start, 2 wrong setting, 3 the engine's process died.
    """
    settings = load_settings(Settings, "WORKER", PROGRAM, argv)
    chassis_log.configure(settings.log_level, settings.log_format)
    set_compute_threads(settings.threads)
    try:
        return _serve_vllm(settings) if settings.engine is EngineChoice.VLLM else _serve_embedded(settings)
    except WrongSetting as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except TreadleError as error:
        sys.stderr.write(f"{PROGRAM}: cannot start: {error}\n")
        return 1


def _serve_embedded(settings: Settings) -> int:
    from prometheus_client import CollectorRegistry

    from inference_worker.assembly import memories_of, model_card, prefixes_of, serve
    from inference_worker.domain.engine_thread import EngineThread

    registry = CollectorRegistry()
    with ExitStack() as stack:
        card = model_card(settings)
        engine, metrics, config = _engine(settings, card, registry)
        memories = stack.enter_context(memories_of(settings, config, card.folder, metrics))
        prefixes = stack.enter_context(prefixes_of(settings, config, card.folder, registry))
        thread = stack.enter_context(EngineThread(engine))
        return asyncio.run(serve(settings, thread, card, memories, registry, engine.close_door, prefixes=prefixes))


def _engine(settings: Settings, card: ModelCard, registry: CollectorRegistry) -> tuple[Engine, WorkerMetrics, ModelConfig]:
    """The engine with its model, who counts, and what memories must fit."""
    import torch

    from inference_worker.adapters.prometheus import WorkerMetrics
    from inference_worker.adapters.tokenizer_file import read_vocabulary
    from inference_worker.domain.engine import Engine
    from treadle.client.engram import StepPrefetcher
    from treadle.nn.model import CausalLM

    vocabulary = read_vocabulary(card.folder / "tokenizer.json")
    model = CausalLM.load(card.folder, torch.bfloat16 if settings.dtype is Precision.BFLOAT16 else torch.float32)
    metrics = WorkerMetrics(registry)
    engine = Engine(
        model, vocabulary, settings.limits, prefetcher=StepPrefetcher(policy=settings.policy, prefetch=settings.engram_prefetch),
        engram_wait_seconds_max=settings.engram_wait_seconds_max, name=card.name, observer=metrics,
        prefix_outside_share_max=settings.prefix_outside_share_max,
    )  # fmt: skip
    metrics.watch(engine)
    told = {"model": card.name, "folder": str(card.folder), "context_tokens_max": engine.context_tokens_max}
    log.info("model loaded", extra=told)
    return engine, metrics, model.config


def _serve_vllm(settings: Settings) -> int:
    missing = [name for name in ("vllm", "treadle.vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFound(
            f"engine vllm: {' and '.join(missing)} cannot be imported in {sys.executable}; `make vllm-env` makes an environment that can"
        )
    from inference_worker.adapters.vllm_arguments import set_environment
    from treadle.nn.model_fetch import treadle_home

    set_environment(treadle_home(), settings.threads, settings.log_level, settings.vllm_start_seconds_max)
    from inference_worker.vllm_assembly import serve_vllm

    return asyncio.run(serve_vllm(settings))


if __name__ == "__main__":
    sys.exit(main())
