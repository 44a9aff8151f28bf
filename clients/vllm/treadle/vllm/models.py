"""vLLM's dense Llama, Qwen2 and Qwen3 with layers that let Engram rows in: one mechanism for all of them.

No parameters are added: a model folder is used as it is, and the fusion's weights come with the memory. Which layers have rows is
the memories' affair, so every layer can; one without costs nothing but a question.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import PPMissingLayer

from treadle.vllm.fuse_op import is_wanted


@cache
def engram_layer(plain: type[nn.Module]) -> type[nn.Module]:
    """The decoder layer `plain`, whose stream takes rows in before it runs; `engram_index` is set by whoever makes one."""

    def forward(self: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        # The stream is hidden + residual, so that adding to one of them is enough. A compiled graph always has the operator in it.
        if torch.compiler.is_compiling() or is_wanted(self.engram_index):
            hidden_states = torch.ops.treadle.engram_fuse(hidden_states, residual, self.engram_index)
        return plain.forward(self, positions, hidden_states, residual, *args, **kwargs)

    return type(f"Engram{plain.__name__}", (plain,), {"forward": forward, "__module__": __name__})


class EngramModel:
    """Beside one of vLLM's causal language models: its layers take rows in, and GPUs get their state from us."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        for index, layer in enumerate(self.model.layers):  # type: ignore[attr-defined]
            if not isinstance(layer, PPMissingLayer):
                kind: Any = type(layer)
                layer.__class__ = engram_layer(kind)
                layer.engram_index = index

    @staticmethod
    def get_model_state_cls() -> type:
        """What vLLM's second model runner, which GPUs use, keeps for this model."""
        from treadle.vllm.model_state import EngramModelState

        return EngramModelState


class EngramLlamaForCausalLM(EngramModel, LlamaForCausalLM):
    """Llama with memories."""


class EngramQwen2ForCausalLM(EngramModel, Qwen2ForCausalLM):
    """Dense Qwen2 with memories."""


class EngramQwen3ForCausalLM(EngramModel, Qwen3ForCausalLM):
    """Dense Qwen3 with memories."""
