"""A few of a prefix's own keys, with values and biases fitted so that attention over them stands for attention over all of it.

Owns the attention state over them, which a dictionary's entries correct (docs/decisions/0039). Does not choose or fit them
(`asm_store.building.matching`). Source: Attention Matching, arXiv 2602.16284.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.kernels import as_numbers, attend_keys

MATCHED_PARTS = ("matched_keys", "matched_values", "matched_biases")  # tensors of a layer, as `at_rest` takes them
ROWS_BY_TOKEN = 32  # up to here a native call that reads all keys for each query beats matrix products with their ten operations
ROWS_AT_ONCE = 512  # of queries: scores of 512 rows, 9 heads and 128 keys take 2.4 MB
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, eq=False)
class MatchedKeys:
    """Of one layer, fp32. keys (rotated), values: [KV, n, head_dim]; biases: [KV, n], added to the scaled score.

    -inf as a bias would be no key; those of a dictionary are finite, and `check_numbers` refuses others.
    """

    keys: Tensor
    values: Tensor
    biases: Tensor

    @classmethod
    def at_rest(cls, keys: NDArray[Any], values: NDArray[Any], biases: NDArray[np.float32]) -> MatchedKeys:
        """From a dictionary's tensors, fp32 or bf16 bits; copied, for there are few."""
        wide, wide_values = (torch.from_numpy(as_numbers(rows, None)) for rows in (keys, values))
        return cls(wide, wide_values, torch.from_numpy(np.array(biases)))

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self.keys.nbytes + self.values.nbytes + self.biases.nbytes

    def state(self, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """(a fp32 [T, H, head_dim], log_z fp32 [T, H]) of queries [T, H, head_dim] after RoPE; a = 0, log_z = -inf for a head without keys."""
        if len(rotated) <= ROWS_BY_TOKEN and rotated.dtype == torch.float32 and self.keys.numel():
            a, log_z = attend_keys(rotated.contiguous().numpy(), None, self.keys.numpy(), self.values.numpy(), self.biases.numpy())
            return torch.from_numpy(a), torch.from_numpy(log_z)
        if not self.keys.numel():
            return torch.zeros(rotated.shape), torch.full(rotated.shape[:2], -torch.inf)
        parts = [self._state(rows) for rows in torch.split(rotated.to(torch.float32), ROWS_AT_ONCE)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([a for a, _ in parts]), torch.cat([log_z for _, log_z in parts])

    def _state(self, rotated: Tensor) -> tuple[Tensor, Tensor]:
        rows, heads, dim = rotated.shape
        kv_heads = len(self.keys)
        folded = rotated.reshape(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [KV, G T, D]
        scores = torch.baddbmm(self.biases.unsqueeze(1), folded, self.keys.transpose(1, 2), alpha=1 / math.sqrt(dim))
        peak = scores.amax(-1, keepdim=True)
        peak.masked_fill_(peak.isneginf(), 0.0)  # a head that keeps nothing: weights of 0, not of NaN
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        a = torch.bmm(weights, self.values).div_(total.clamp_min(_SMALLEST))
        log_z = total.log_().add_(peak)
        states = a.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
        return states, log_z.view(kv_heads, -1, rows).permute(2, 0, 1).reshape(rows, heads)
