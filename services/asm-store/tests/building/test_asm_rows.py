"""Rows at rest."""

from __future__ import annotations

import numpy as np
import pytest

from asm_store.building.rows import stored
from treadle.contract.dictionary import RowDtype
from treadle.contract.errors import InvalidArgument
from treadle.kernels import as_numbers


@pytest.mark.parametrize(("dtype", "error"), [(RowDtype.F32, 0.0), (RowDtype.BF16, 2**-8), (RowDtype.I8, 0.6 / 127)])
@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0, 3e4])
def test_rows_come_back_within_their_rounding(dtype: RowDtype, error: float, size: float) -> None:
    rows = (np.random.default_rng(1).standard_normal((5, 7, 16)) * size).astype(np.float32)
    (name, numbers), scales = stored(rows, dtype)
    back = as_numbers(numbers, None if scales is None else scales[1])
    assert name == str(dtype)
    assert float(np.abs(back - rows).max()) <= error * float(np.abs(rows).max()) + 2**-24  # below that fp16 scales end


def test_rows_of_zeros_stay_zeros() -> None:
    (_, numbers), scales = stored(np.zeros((3, 4), np.float32), RowDtype.I8)
    assert scales is not None
    assert not as_numbers(numbers, scales[1]).any()


def test_numbers_beyond_the_scales_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="--dtype BF16"):
        stored(np.full((1, 4), 1e8, np.float32), RowDtype.I8)
