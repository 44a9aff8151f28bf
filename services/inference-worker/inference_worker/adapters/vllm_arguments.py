"""What vLLM is started with: its environment, which must be made before vllm or torch is imported, and the engine's arguments.

Owns how the worker's settings become vLLM's. Does not import vllm; does not start anything (`vllm_engine`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_worker.domain.limits import Limits
from treadle.nn.config import ModelConfig

BLOCK_TOKENS = 32  # vLLM's CPU kernels want a multiple of 32; the smallest shares the most
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
LOG_LEVELS = {"debug": "INFO", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}  # vLLM's info is a page for each start


def set_environment(home: Path, threads: int, log_level: str, start_seconds_max: float) -> None:
    """Make this process's environment, which vLLM and its children read. Before torch or vllm are imported.

    home:    where vLLM may keep what it compiles, in `home`/vllm
    threads: compute threads of the process that runs the model
    start_seconds_max: longest time for that process to be ready
    """
    cache = home / "vllm"
    values = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",  # a worker calls nobody but its pool
        "VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork beside threads may hang
        "GLOO_SOCKET_IFNAME": "lo",  # its one rank meets nobody: no listener on the address of the host's name
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every worker of a host sits on the same first core
        "OMP_NUM_THREADS": str(threads), "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_seconds_max)),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output carries the ready line
        "VLLM_LOGGING_LEVEL": LOG_LEVELS[log_level], "VLLM_LOGGING_COLOR": "0",
    }  # fmt: skip
    os.environ.update(values)


def kv_bytes(config: ModelConfig, tokens: int, dtype: str) -> int:
    """Bytes of KV for so many tokens, in whole blocks, and the one that vLLM keeps for itself."""
    blocks = -(-tokens // BLOCK_TOKENS) + 1
    return blocks * BLOCK_TOKENS * config.kv_values_per_token * VALUE_BYTES[dtype]


def engine_arguments(
    folder: Path, config: ModelConfig, limits: Limits, dtype: str, *, eager: bool, events: Sequence[str], memories: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of AsyncEngineArgs, but for the KV events' own configuration.

    eager:    no torch.compile, which takes a minute at each cold start
    events:   ZeroMQ addresses of KV events and of their replay; empty: none are published
    memories: what `treadle.vllm.engine_arguments` gives: model classes, worker, scheduler, pool
    """
    return {
        "model": str(folder), "skip_tokenizer_init": True,  # text and stop strings are ours: both engines write the same
        "dtype": dtype, "enforce_eager": eager, "max_model_len": min(limits.context_tokens_max, config.positions_max),
        "max_num_seqs": limits.sequences_max, "max_num_batched_tokens": limits.step_tokens_max, "enable_chunked_prefill": True,
        "block_size": BLOCK_TOKENS, "kv_cache_memory_bytes": kv_bytes(config, limits.kv_tokens_max, dtype),
        "enable_prefix_caching": limits.prefix_cache_bytes_max > 0, "scheduling_policy": "priority",
        "enable_logging_iteration_details": True,  # how many tokens each step ran, and for how long
        "disable_log_stats": True, "seed": 0,
        **({"kv_events_config": {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events[0], "replay_endpoint": events[1],
        }} if events else {}),
        **memories,
    }  # fmt: skip
