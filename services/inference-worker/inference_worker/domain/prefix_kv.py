"""The exact KV of a prefix, mapped and never loaded, as blocks that a sequence begins with.

Owns its shape. Does not read the file (adapters) or decide who needs it (`prefix_run`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from treadle.contract.dictionary import Dictionary
from treadle.contract.errors import DataLoss
from treadle.nn.kv import KVBlock

COPY_TOKENS = 256  # at once: 12 MB of the small model where the file's number format is not the model's
DTYPES = (torch.float32, torch.bfloat16)


class PrefixKV:
    """Keys and values of a prefix's own tokens, rotated at positions 0 to tokens - 1."""

    def __init__(self, kv: Tensor, dictionary: Dictionary) -> None:
        """kv: [layers, 2, kv_heads, tokens, head_dim], float32 or bfloat16, borrowed where it lies. Raises DataLoss for another one."""
        model = dictionary.model
        shape = (model.layers, 2, model.kv_heads, dictionary.prefix.tokens, model.head_dim)
        if tuple(kv.shape) != shape or kv.dtype not in DTYPES:
            raise DataLoss(f"prefix KV: {list(shape)} float32 or bfloat16 expected, the file holds {list(kv.shape)} {kv.dtype}")
        self._kv = kv

    @property
    def nbytes(self) -> int:
        """Bytes of the file that are mapped."""
        return self._kv.nbytes

    @property
    def tokens(self) -> int:
        """Tokens of the prefix."""
        return self._kv.shape[3]

    def blocks(self, dtype: torch.dtype, history: Mapping[int, int]) -> Iterator[KVBlock]:
        """The prefix as blocks that a sequence of this dtype begins with, COPY_TOKENS each.

        history: layer -> width of what the sequence keeps beside its KV: zeros, for the prefix was made without an Engram memory
        """
        for start in range(0, self.tokens, COPY_TOKENS):
            end = min(start + COPY_TOKENS, self.tokens)
            zeros = {layer: torch.zeros(end - start, width) for layer, width in history.items()}
            yield KVBlock(start, end, self._kv[:, :, :, start:end].to(dtype), zeros)
