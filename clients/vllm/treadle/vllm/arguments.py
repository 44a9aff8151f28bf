"""The engine arguments that turn a stock vLLM into one with memories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle.vllm.config import KEY, MemoryConfig
from treadle.vllm.plugin import ARCHITECTURES, PREFIX

WORKER_CLS = "treadle.vllm.worker.EngramWorker"
SCHEDULER_CLS = "treadle.vllm.scheduler.EngramScheduler"


def architecture_for(folder: Path) -> str:
    """The architecture to run a model folder with, unchanged: that of its config.json with memories.

    Raises NotFound, DataLoss (config.json is no JSON object), InvalidArgument for an architecture without one.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise NotFound(f"{path}: no such file; a model folder holds config.json, safetensors weights and tokenizer.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataLoss(f"{path}: not JSON: {error}") from error
    named = config.get("architectures") if isinstance(config, dict) else None
    if isinstance(named, list) and len(named) == 1:
        plain = str(named[0]).removeprefix(PREFIX)
        if plain in ARCHITECTURES:
            return PREFIX + plain
    raise InvalidArgument(f"{path}: architectures: one of {list(ARCHITECTURES)}, got {named!r}")


def engine_arguments(folder: Path, memories: MemoryConfig) -> dict[str, Any]:
    """What EngineArgs, AsyncEngineArgs or LLM must get for an engine of `folder` with `memories`; add your own beside it.

    Raises what `architecture_for` does.
    """
    return {
        "model": str(folder),
        "hf_overrides": {"architectures": [architecture_for(folder)]},
        "worker_cls": WORKER_CLS,
        "scheduler_cls": SCHEDULER_CLS,
        "additional_config": {KEY: memories.to_dict()},
    }
