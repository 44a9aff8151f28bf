"""What an engine must be like so that memories are right in it, and what it says of its model and its KV. For both model runners."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from treadle.contract.errors import InvalidArgument, NotFound
from treadle.vllm.history import HistoryPages
from treadle.vllm.memories import LanguageModel
from treadle.vllm.models import EngramModel
from treadle.vllm.scheduler import EngramScheduler


def check_supported(vllm_config: VllmConfig) -> None:
    """Raise InvalidArgument, saying what to change, for an engine in which memories would be wrong."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise InvalidArgument(
            "treadle.vllm: tensor and pipeline parallelism are not supported: each rank would decide alone which rows came too late"
        )
    if vllm_config.speculative_config is not None:
        raise InvalidArgument("treadle.vllm: speculative decoding is not supported: a rejected draft would stay in the history")
    if vllm_config.kv_transfer_config is not None:
        raise InvalidArgument(
            "treadle.vllm: KV connectors are not supported: KV would come without what the fusion keeps beside it"
        )
    if scheduler.async_scheduling:
        raise InvalidArgument("treadle.vllm: async scheduling is not supported: start vLLM with --no-async-scheduling")
    if parallel.enable_dbo:
        raise InvalidArgument("treadle.vllm: dual-batch overlap is not supported: start vLLM without --enable-dbo")
    chosen = scheduler.get_scheduler_cls()
    if not issubclass(chosen, EngramScheduler):
        raise InvalidArgument(
            "treadle.vllm: the scheduler must be ours, which keeps memories apart in the prefix cache: "
            f"--scheduler-cls treadle.vllm.scheduler.EngramScheduler; got {chosen.__qualname__}"
        )


def check_model(model: object) -> None:
    """Raise InvalidArgument for a model whose layers take no rows in."""
    if not isinstance(model, EngramModel):
        raise InvalidArgument(
            f"treadle.vllm: {type(model).__name__} takes no memories in; run it as one of ours: --hf-overrides "
            '\'{"architectures": ["EngramLlamaForCausalLM"]}\' (or EngramQwen2ForCausalLM, EngramQwen3ForCausalLM)'
        )


def history_pages(kv_cache_config: KVCacheConfig, block_tokens: int, device: torch.device | None = None) -> HistoryPages:
    """Room for the fusion's history beside this KV. Raises InvalidArgument for KV that is not whole in every layer."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise InvalidArgument("treadle.vllm: layers with a sliding window are not supported: their KV is not kept whole")
    slots = kv_cache_config.num_blocks * groups[0].kv_cache_spec.block_size
    return HistoryPages(slots, block_tokens, device)


def language_model_of(vllm_config: VllmConfig) -> LanguageModel:
    """What memories must fit, of the model that this engine runs."""
    model_config = vllm_config.model_config
    text = model_config.hf_text_config
    return LanguageModel(text.num_hidden_layers, text.vocab_size, text.hidden_size, lambda: _tokenizer_json(model_config.tokenizer))


def _tokenizer_json(tokenizer: str) -> Path:
    if Path(tokenizer).is_dir():
        return Path(tokenizer) / "tokenizer.json"
    from transformers.utils.hub import cached_file

    found = cached_file(tokenizer, "tokenizer.json")
    if found is None:
        raise NotFound(f"{tokenizer}: no tokenizer.json, which says whether a memory was made for this tokenizer")
    return Path(found)
