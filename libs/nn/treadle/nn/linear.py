"""One matrix product with a fixed weight, kept in the form that the CPU multiplies with fastest.

Decoding multiplies a few rows by every weight, so that reading the weights is most of the work. A weight whose values 16 bits hold,
as they do those of a bf16 file, is kept in 16 bits (`half_linear`); another as oneDNN lays it out, since torch's plain product reaches
half that speed (docs/decisions/0040). SmolLM2's layer of 3,072 x 576 on one core with AVX2: 618 us for one row laid out in fp32, 221 in 16 bits; for 512
rows 22.2 ms and 18.9.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from treadle.nn.half_linear import HalfLinear

ROWS_MIN = 4  # oneDNN's fp32 kernels take less time for 4 rows than for 1 to 3, so fewer are padded with zeros


class Linear:
    """x W^T + b for x [T, inputs] in the weight's dtype, summed in fp32; the weight is not kept in its plain form where it could be packed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs], bias: [outputs] or None, both of the dtype that x will have."""
        self._product = _product(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, inputs]; returns a new tensor [T, outputs]."""
        return self._product(x)


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if weight.dtype == torch.float32 and HalfLinear.fits(weight):
        return HalfLinear(weight, bias)
    if _packs(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return partial(_packed, packed, bias, ROWS_MIN if weight.dtype == torch.float32 else 1)
    return partial(linear, weight=weight, bias=bias)


def _packed(weight: Tensor, bias: Tensor | None, rows_min: int, x: Tensor) -> Tensor:
    rows = x.shape[0]
    if rows < rows_min:
        x = pad(x, (0, 0, 0, rows_min - rows))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[:rows]


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # These two operators are what torch.compile emits for a frozen linear layer; torch does not promise them, hence the question.
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
