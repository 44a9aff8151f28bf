"""What vLLM's second model runner, which GPUs use, keeps for a model with memories: exact windows and its step of lookups.

Written after vLLM's own `qwen4_exp` and `deepseek_v41` states. The tokens before a step lie on the device, all of them exact, also
those that were generated; what lookups need of them, a few for each request, is copied to the host at the step's start.
Not run on a GPU yet: its windows are tested with tensors on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from treadle.contract.errors import InvalidArgument
from treadle.contract.windows import BEFORE_SEQUENCE, LOOKBACK_MAX, Windows
from treadle.vllm.batch import BatchView, EngramBatch
from treadle.vllm.config import MemoryConfig
from treadle.vllm.support import check_supported, history_pages, language_model_of
from treadle.vllm.windows import Span


class EngramModelState(DefaultModelState):
    """See the module. engram: the memories of its batch."""

    supports_prompt_embeds = False  # vLLM then refuses them: positions that came as vectors are not told apart here

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        check_supported(vllm_config)
        if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            raise InvalidArgument("treadle.vllm: a captured graph cannot wait for rows: start vLLM with --enforce-eager")
        self.engram = EngramBatch(MemoryConfig.of(vllm_config.additional_config), language_model_of(vllm_config), device)
        self._extra_args: dict[str, Mapping[str, Any] | None] = {}
        self._block_tables: Any = None

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """See ModelState."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._block_tables = block_tables
        self.engram.pages = history_pages(kv_cache_config, block_tables.block_sizes[0], self.device)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """See ModelState."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        self._extra_args[new_req_data.req_id] = None if params is None else params.extra_args

    def remove_request(self, req_id: str) -> None:
        """See ModelState."""
        super().remove_request(req_id)
        self._extra_args.pop(req_id, None)
        self.engram.forget(req_id)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """See ModelState; the step's lookups start here, and its layers take their rows from now on."""
        model_inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        self.engram.end()
        if all(request_id in self._extra_args for request_id in input_batch.req_ids):  # else a run without requests
            self.engram.begin(self._view(input_batch, req_states))
            self.engram.run()
        return model_inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """See ModelState."""
        self.engram.end()
        model_inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)
        return model_inputs

    def _view(self, input_batch: Any, req_states: Any) -> BatchView:
        count, rows = input_batch.num_reqs, input_batch.idx_mapping[: input_batch.num_reqs]
        firsts = req_states.num_computed_tokens.gpu[rows.long()]
        lookback = lookback_of(req_states.all_token_ids.gpu, rows, firsts, LOOKBACK_MAX)
        tokens = input_batch.input_ids[: input_batch.num_tokens]
        windows = partial(windows_on_host, tokens.cpu().numpy(), lookback.cpu().numpy())
        blocks = self._block_tables.input_block_tables[0][:count].cpu().numpy()
        counts = np.diff(input_batch.query_start_loc_np[: count + 1])
        return BatchView(input_batch.req_ids, self._extra_args.__getitem__, firsts.cpu().numpy(), counts, windows, blocks)


def lookback_of(all_token_ids: Tensor, rows: Tensor, firsts: Tensor, depth: int) -> Tensor:
    """The tokens before each request's step, nearest first, -1 before the sequence: [requests, depth] int32, on their device.

    all_token_ids: [rows_max, positions_max] int32, of each request that the runner keeps
    rows, firsts:  [requests] of each request of the step: its row there, and the position of its first token of the step
    """
    positions = firsts.long().unsqueeze(1) - torch.arange(1, depth + 1, device=firsts.device)
    near = all_token_ids[rows.long().unsqueeze(1), positions.clamp_min(0)]
    return torch.where(positions >= 0, near, near.new_full((), BEFORE_SEQUENCE))


def windows_on_host(tokens: NDArray[np.int32], lookback: NDArray[np.int32], spans: Sequence[Span], depth: int) -> Windows:
    """The windows of some spans. tokens: [T] of the whole step; lookback: [requests, depth or more]"""
    starts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum([span.count for span in spans], out=starts[1:])
    own = [tokens[span.place : span.place + span.count] for span in spans]
    before = lookback[[span.row for span in spans], :depth]
    return Windows(np.concatenate(own).astype(np.int64), starts, np.ascontiguousarray(before, dtype=np.int64))
