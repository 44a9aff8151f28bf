"""Engram memories and long prefixes in vLLM, as a plugin: no patched file, vLLM pinned to one version.

    plugin             what vLLM loads in every process: registers the models, checks the version
    arguments, config  what a deployment says: engine arguments, `additional_config["treadle"]`, a request's `extra_args`
    models, fuse_op    decoder layers that let rows in, through an opaque operator
    runner, worker     hand exact windows to the SDK's prefetcher, and wait at the layer
    prefixes, prefix_attention, prefix_step, prefix_batch    open dictionaries, and merge them into vLLM's attention on CPUs
    scheduler          keeps memories apart in the prefix cache, shares no degraded block, brings outcomes back
    model_state        the same for vLLM's second model runner, which GPUs use

Importing this package imports neither vLLM nor torch. What is no part of it: growing or keeping memories (the pool), and any
engine but vLLM.
"""

from __future__ import annotations

from treadle.vllm.arguments import SCHEDULER_CLS, WORKER_CLS, architecture_for, engine_arguments
from treadle.vllm.config import MemoryConfig
from treadle.vllm.plugin import VLLM_VERSION

__all__ = ["SCHEDULER_CLS", "VLLM_VERSION", "WORKER_CLS", "MemoryConfig", "architecture_for", "engine_arguments"]
