"""One matrix product with a fixed weight, packed once for the CPU.

Decoding multiplies a few rows by every weight. torch's plain product repacks nothing and reaches half the speed that oneDNN
reaches on a weight it laid out beforehand (fp32, 16 rows, 1 core: 38 ms instead of 67 ms for SmolLM2's layers).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

ROWS_MIN = 4  # oneDNN's fp32 kernels take less time for 4 rows than for 1 to 3, so fewer are padded with zeros


class Linear:
    """x W^T + b for x [T, inputs]; the weight is not kept in its plain form where it could be packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], bias: [outputs] or None, both of the dtype that x will have."""
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self.packed = _packs(weight)
        self.rows_min = ROWS_MIN if self.packed and weight.dtype == torch.float32 else 1
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs]; returns a new tensor [T, outputs]."""
        rows = x.shape[0]
        if not self.packed:
            return linear(x, self.weight, self.bias)
        if rows < self.rows_min:
            x = pad(x, (0, 0, 0, self.rows_min - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out[:rows]


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # These two operators are what torch.compile emits for a frozen linear layer; torch does not promise them, hence the question.
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
