"""vLLM's CPU attention, whose rows are merged with what stands before their own keys, in steps in which a request has something there.

Owns the way to log Z of vLLM's kernel, which does not tell it. Does not know requests (`prefix_step`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from treadle.contract.errors import InvalidArgument

# A sink takes part in the softmax's denominator and adds nothing to the output, so that o_sink / o = Z / (Z + e^sink). Far above log Z
# that share is small and keeps all its digits; one sink will do for log Z from 29 below it to 2 above, and 40 for nearly all there is.
SINKS = tuple(chain([40.0], *([40.0 + step, 40.0 - step] for step in range(60, 960, 60))))
SHARE_MIN, SHARE_MAX = 1e-29, 0.9  # fp32 keeps products with it normal; 1 - share keeps seven digits less one


class MergingStep(Protocol):
    """A step some of whose rows see more than their own keys."""

    def wants(self, layer: int) -> bool:
        """Whether any of its rows does in this layer."""

    def merge(self, layer: int, rotated: Tensor, out: Tensor, log_z: Tensor) -> None:
        """Write into `out` what its rows see in all.

        rotated, out: [T, H, head_dim] of the model's dtype, queries after RoPE and the attention over their own keys
        log_z:        [T, H] fp32, natural, of that attention; T tokens of the step in its order
        """


class _Process:
    """The step that this process's model runs now; a process runs one model, one step at a time."""

    step: MergingStep | None = None


def run(step: MergingStep | None) -> None:
    """From now on the model's attention merges what `step` says; None: nothing, and costs nothing."""
    _Process.step = step


class PrefixAttention(CPUAttentionBackendImpl):
    """See the module. Runs within vLLM's opaque attention operator, so under a compiled graph as without."""

    treadle_layer: int

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor,
        output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See CPUAttentionBackendImpl."""

        def attend(out: Tensor, sinks: Tensor | None) -> None:
            self.sinks = sinks
            try:
                plain(layer, query, key, value, kv_cache, attn_metadata, out, output_scale, output_block_scale)
            finally:
                self.sinks = None

        plain = super().forward
        attend(output, None)
        step = _Process.step
        if step is not None and attn_metadata is not None and step.wants(self.treadle_layer):
            count = attn_metadata.num_actual_tokens
            step.merge(self.treadle_layer, query[:count], output[:count], log_z_of(attend, output, count))
        return output


def log_z_of(attend: Callable[[Tensor, Tensor | None], None], output: Tensor, count: int) -> Tensor:
    """log Z [count, H] fp32 of an attention whose output [>= count, H, head_dim] is there, by running it again with sinks.

    attend: writes the output with sinks [H] fp32 into a tensor like `output`
    Within 1e-5 where the output is fp32. NaN where an output is all zeros, or |log Z| beyond what SINKS reach.
    """
    own = output[:count].to(torch.float32)
    squares = own.square().sum(-1)
    log_z = torch.full(squares.shape, torch.nan)
    again = torch.empty_like(output)
    for sink in SINKS:
        attend(again, torch.full(squares.shape[1:], sink))
        share = (again[:count].to(torch.float32) * own).sum(-1) / squares
        found = (share > SHARE_MIN) & (share < SHARE_MAX)
        log_z = torch.where(found & log_z.isnan(), sink + share.log() - (-share).log1p(), log_z)
        if not bool((log_z.isnan() & (squares > 0)).any()):
            break
    return log_z


def install(vllm_config: VllmConfig) -> None:
    """Make the attention of every layer of a loaded model mergeable. Raises InvalidArgument for attention of another kind."""
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        impl: Any = getattr(layer, "impl", None)
        if type(impl) is not CPUAttentionBackendImpl or impl.sinks is not None or impl.sliding_window != -1:
            raise InvalidArgument(f"treadle.vllm: {name}: long prefixes need vLLM's plain CPU attention, got {type(impl).__name__}")
        impl.__class__ = PrefixAttention
        impl.treadle_layer = extract_layer_index(name)
