"""One matrix product of fp32 rows with a fixed weight whose values have 16 bits, read from memory as 16 bits.

Where few rows are multiplied the weight's bytes are the cost: a model's own weights while it decodes (`linear`), and those of Engram
memories in a batch that mixes them (512 x 1,152, 32 different weights, one row each, 1 core: 2.2 ms instead of the 5.3 ms of weights
packed in fp32).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_ROWS = 6  # of FBGEMM's kernel for AVX2; what is left of a batch beyond whole blocks of these goes to smaller kernels
ROUNDED_MAX = 2.0**-25  # of one weight: what fp16 loses of a number below its normal range, and fp32 sums do not feel
ROWS_AT_ONCE = 64  # of a weight that is checked: copies of a whole one would leave holes in the heap that nobody fills


class HalfLinear:
    """x W^T + b for fp32 x [T, inputs], summed in fp32. Made only where `fits` says so."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], packed here and not kept; bias: [outputs] or None."""
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.to(torch.float32).contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs] fp32, C-contiguous; returns a new tensor [T, outputs] fp32. With AVX2 a row's product is the same in any batch."""
        rows = len(x)
        if rows % BLOCK_ROWS in (1, 2):  # the kernels for one and two rows add up in another order than all others
            x = pad(x, (0, 0, 0, 3 - rows % BLOCK_ROWS))
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out[:rows]

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """True where this processor has the kernel and fp16 holds every weight, as it does those of a bf16 file of usual size."""
        if weight.device.type != "cpu" or torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return False
        return all(_rounds(weight[first : first + ROWS_AT_ONCE]) for first in range(0, len(weight), ROWS_AT_ONCE))


def _rounds(weight: Tensor) -> bool:
    exact = weight.to(torch.float32)
    return bool(((weight.to(torch.float16).to(torch.float32) - exact).abs() <= ROUNDED_MAX).all())  # False for NaN and infinity
