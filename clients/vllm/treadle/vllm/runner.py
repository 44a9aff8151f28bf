"""vLLM's CPU model runner with memories: hands each step's exact tokens to the lookups, and lets its layers take the rows.

Thin: what is overridden is private to vLLM, and tests/test_vllm_hooks.py says what it must look like.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from treadle.vllm import prefix_attention
from treadle.vllm.batch import BatchView, EngramBatch
from treadle.vllm.config import MemoryConfig
from treadle.vllm.prefix_batch import PrefixBatch
from treadle.vllm.support import check_model, check_supported, history_pages, language_model_of
from treadle.vllm.windows import windows_of


class EngramCPUModelRunner(CPUModelRunner):
    """See the module. engram: the memories of its batch."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_supported(vllm_config)
        super().__init__(vllm_config, device)
        self._config = config = MemoryConfig.of(vllm_config.additional_config)
        prefixes = PrefixBatch(config, Path(vllm_config.model_config.model))
        self.engram = EngramBatch(config, language_model_of(vllm_config), device, prefixes)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """See CPUModelRunner. Raises InvalidArgument, where there is a pool, for a model whose layers take no rows in."""
        super().load_model(load_dummy_weights)
        if self._config.engram_pool:
            check_model(self.model)
        prefix_attention.install(self.vllm_config)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """See CPUModelRunner."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.engram.pages = history_pages(kv_cache_config, self.input_batch.block_table[0].block_size)

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.engram.forget(req_id)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        batch = self.input_batch
        is_token_id = batch.is_token_ids if self.enable_prompt_embeds else None
        windows = partial(windows_of, batch.token_ids_cpu, is_token_id)
        blocks = batch.block_table[0].get_numpy_array()
        firsts = batch.num_computed_tokens_cpu
        self.engram.begin(BatchView(batch.req_ids, self._extra_args, firsts, num_scheduled_tokens, windows, blocks, self._lengths))
        return prepared

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        assert self.engram.prefixes is not None, "this runner made it"
        self.engram.run()
        try:
            return super()._model_forward(input_ids, self.engram.prefixes.positions(positions), *args, **kwargs)
        finally:
            self.engram.end()

    def _lengths(self, request_id: str) -> tuple[int, int]:
        state = self.requests[request_id]
        answer = None if state.sampling_params is None else state.sampling_params.max_tokens
        most = self.max_model_len if answer is None else min(state.num_prompt_tokens + answer, self.max_model_len)
        return state.num_prompt_tokens, most

    def _extra_args(self, request_id: str) -> Mapping[str, Any] | None:
        params = self.requests[request_id].sampling_params
        return None if params is None else params.extra_args
