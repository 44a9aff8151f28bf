"""The attention of one forward step's rows over the keys of their own requests, which it appends to.

Owns who goes on by one token, and is served with all like it by one native call a layer, and who by several. Does not own the
mathematics (`attention`, `treadle.kernels.DecodeStep`), or what stands before a request's own keys (`prefix_step`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from treadle.kernels import DecodeStep
from treadle.nn.attention import attention, causal_mask
from treadle.nn.config import ModelConfig
from treadle.nn.kv import SequenceKV


class OwnKeys:
    """One step. What `attend` returns is written again in the next layer."""

    def __init__(self, config: ModelConfig, starts: Sequence[int], kv: Sequence[SequenceKV], dtype: torch.dtype) -> None:
        """starts, kv: as for `CausalLM.forward`, with room reserved for the step; dtype: of keys and values. bf16 takes torch's kernels."""
        self._starts, self._kv = starts, kv
        self.out = torch.empty(starts[-1], config.heads, config.head_dim)
        self.log_z = torch.empty(starts[-1], config.heads)
        counts = [end - first for first, end in pairwise(starts)]
        single = [request for request, count in enumerate(counts) if count == 1] if dtype == torch.float32 else []
        self._several = [request for request, count in enumerate(counts) if count and request not in set(single)]
        self._masks = {request: _mask(counts[request], kv[request].length) for request in self._several}
        self._decode: DecodeStep | None = None
        if single:
            lengths = np.array([kv[request].length for request in single], dtype=np.int64)
            rows = np.array([starts[request] for request in single], dtype=np.int64)
            self._decode = DecodeStep([kv[request].as_array() for request in single], lengths, rows, config.heads)
        self._written = self.out.numpy(), self.log_z.numpy()

    def attend(self, layer: int, rotated: Tensor, new: Tensor, with_state: Container[int]) -> tuple[Tensor, Tensor]:
        """The states of all rows in one layer: (a fp32 [T, H, head_dim], log_z fp32 [T, H]).

        rotated:    [T, H, head_dim] after RoPE; new: [T, 2, kv_heads, head_dim], appended to the sequences
        with_state: requests whose log_z is wanted; of others it may hold anything
        """
        if self._decode is not None:
            self._decode.attend(layer, rotated.numpy(), new.numpy(), *self._written)
        for request in self._several:
            rows = slice(self._starts[request], self._starts[request + 1])
            keys, values = self._kv[request].append(layer, new[rows])
            if request in with_state:
                self.out[rows], self.log_z[rows] = attention(rotated[rows], keys, values, with_state=True)
            else:
                self.out[rows] = attention(rotated[rows], keys, values, self._masks[request])
        return self.out, self.log_z


def _mask(rows: int, before: int) -> Tensor | None:
    """The mask of a chunk that continues a sequence, made once for all layers; the other cases need none."""
    return causal_mask(rows, before + rows) if rows > 1 and before else None
