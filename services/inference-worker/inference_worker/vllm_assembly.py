"""The worker of the engine `vllm`, put together: its processes, the check of its answers, memories and server.

Imported only once the environment is made (`vllm_arguments`): vllm and torch read it when they are imported.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

import vllm
from prometheus_client import CollectorRegistry
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import treadle.vllm
from inference_worker.adapters.golden_check import check_answers
from inference_worker.adapters.prometheus import WorkerMetrics
from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.adapters.vllm_arguments import BLOCK_TOKENS, engine_arguments
from inference_worker.adapters.vllm_engine import VllmEngine
from inference_worker.adapters.vllm_memories import VllmMemories
from inference_worker.adapters.vllm_prefixes import VllmPrefixes
from inference_worker.adapters.vllm_process import VllmProcess
from inference_worker.adapters.vllm_steps import Steps
from inference_worker.assembly import memories_of, model_card, prefixes_of, serve
from inference_worker.domain.engine_port import EngineFacts
from inference_worker.domain.text import Vocabulary
from inference_worker.server import ModelCard
from inference_worker.settings import Settings
from treadle.chassis.settings import WrongSetting
from treadle.contract.errors import InvalidArgument, TreadleError, Unavailable
from treadle.nn.config import ModelConfig
from treadle.vllm.config import MemoryConfig

PREFIXES_CLOSING = 4  # the engine's process hears of a closing a little after this one has opened another
EXIT_STOPPED = 143  # as a shell has it for SIGTERM: told to stop before it was ready
log = logging.getLogger("treadle.worker")


async def serve_vllm(settings: Settings) -> int:
    """Start vLLM, check what it answers, and serve until told to stop or until its process dies."""
    signal.signal(signal.SIGTERM, _stop_starting)  # the server has its own way once it runs
    wanted = _memory_config(settings)
    card, registry = model_card(settings), CollectorRegistry()
    config, vocabulary = ModelConfig.from_folder(card.folder), read_vocabulary(card.folder / "tokenizer.json")
    metrics = WorkerMetrics(registry)
    async with AsyncExitStack() as stack:
        files = Path(tempfile.mkdtemp(prefix="treadle-vllm-"))
        stack.callback(shutil.rmtree, files, ignore_errors=True)
        engine = await stack.enter_async_context(_started(settings, wanted, card, config, vocabulary, metrics, files))
        metrics.watch(engine)
        await check_answers(
            engine, card.folder, min(config.vocab, len(vocabulary.pieces)), params_max=settings.golden_check_params_max,
            difference_max=settings.golden_check_difference_max,
        )  # fmt: skip
        process = VllmProcess(engine.llm, asyncio.get_running_loop())
        elsewhere = VllmMemories(process, settings)
        with ExitStack() as memories_open:
            opened = memories_of(settings, config, card.folder, metrics, elsewhere.open, elsewhere.close)
            memories = await asyncio.to_thread(memories_open.enter_context, opened)  # the engine opens the default one meanwhile
            watched = prefixes_of(settings, config, card.folder, registry, VllmPrefixes(process))
            prefixes = await asyncio.to_thread(memories_open.enter_context, watched)
            return await serve(settings, engine, card, memories, registry, engine.close_door, engine.died, prefixes)


def _started(
    settings: Settings, wanted: MemoryConfig, card: ModelCard, config: ModelConfig, vocabulary: Vocabulary, metrics: WorkerMetrics,
    files: Path,
) -> VllmEngine:  # fmt: skip
    """vLLM with its processes, ready; takes its time."""
    limits, dtype = settings.limits, settings.dtype.value
    events = [f"ipc://{files}/{name}" for name in ("events", "replay")] if limits.prefix_cache_bytes_max else []
    arguments = engine_arguments(
        card.folder, config, limits, dtype, eager=settings.vllm_eager, events=events,
        memories=treadle.vllm.engine_arguments(card.folder, wanted),
    )  # fmt: skip
    steps = Steps(metrics.step)
    try:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[steps.factory])
    except TreadleError:
        raise
    except Exception as error:
        log.exception("vllm could not start")
        raise Unavailable(f"vllm could not start ({type(error).__name__}: {error}); the log above has more") from error
    context = min(limits.context_tokens_max, config.positions_max)
    facts = EngineFacts(
        "vllm", vllm.__version__, dtype, context, frozenset(config.eos_token_ids), limits.sequences_max,
        limits.requests_waiting_max, BLOCK_TOKENS if events else 0,
    )  # fmt: skip
    log.info("vllm is up", extra={"model": card.name, "folder": str(card.folder), "context_tokens_max": context})
    tokens, endpoint = min(config.vocab, len(vocabulary.pieces)), events[0] if events else ""
    return VllmEngine(
        llm, steps, facts, vocabulary, limits, tokens, metrics, endpoint, settings.vllm_silent_seconds_max,
        positions_max=config.positions_max,
    )  # fmt: skip


def _memory_config(settings: Settings) -> MemoryConfig:
    """What the process that runs the model needs to know of pool and store. Raises WrongSetting for what the plugin does not take."""
    files = (
        settings.engram_key_file, settings.engram_tls_root_file, settings.tls_cert_file, settings.tls_key_file, settings.asm_key_file,
        settings.asm_tls_root_file,
    )  # fmt: skip
    key, roots, cert, cert_key, asm_key, asm_roots = (str(file) if file is not None else "" for file in files)
    try:
        prefixes = MemoryConfig(
            tls_cert_file=cert, tls_key_file=cert_key, asm_store=settings.asm_store, asm_key_file=asm_key, asm_tls_root_file=asm_roots,
            prefixes_max=settings.prefixes_max + PREFIXES_CLOSING, prefix_outside_share_max=settings.prefix_outside_share_max,
            prefix_lists_probed=settings.prefix_lists_probed, prefix_guard_percent=settings.prefix_guard_percent,
            prefix_index=settings.prefix_index.value,
        )  # fmt: skip
        if not settings.watches_pool:
            return prefixes
        return replace(
            prefixes, engram_pool=settings.engram_pool, key_file=key, tls_root_file=roots,
            transport=settings.engram_transport.value, fusion=settings.engram_fusion.value,
            wait_seconds_max=settings.engram_wait_seconds_max, late=settings.engram_late.value,
            memories_max=settings.engram_memories_max, open_seconds_max=settings.engram_open_seconds_max,
        )  # fmt: skip
    except InvalidArgument as error:
        raise WrongSetting(f"memory settings for the engine vllm: {error}") from error


def _stop_starting(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_STOPPED)
