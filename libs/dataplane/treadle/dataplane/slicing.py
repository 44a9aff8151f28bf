"""Windows of some tokens alone: how the Python queue cuts a lookup into pieces."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Windows

_T = TypeVar("_T", bound=np.generic)


def slice_windows(windows: Windows, first: int, last: int) -> Windows:
    """Windows of tokens [first, last) alone: what came before `first` in its request moves into the look-back."""
    starts = windows.starts.astype(np.int64)
    begin = int(np.searchsorted(starts[1:], first, side="right"))  # the request that owns token `first`
    end = max(begin + 1, int(np.searchsorted(starts[:-1], last, side="left")))
    lookback = windows.lookback[begin:end].copy()
    before = np.arange(first - 1, starts[begin] - 1, -1)[: lookback.shape[1]]  # nearest first
    lookback[0] = _shifted(windows.tokens[before], windows.lookback[begin])
    dead, lookback_dead = windows.dead, windows.lookback_dead
    if dead is not None or lookback_dead is not None:
        whole = np.zeros(windows.lookback.shape, np.bool_) if lookback_dead is None else lookback_dead
        near = np.zeros(len(before), np.bool_) if dead is None else dead[before]
        lookback_dead = whole[begin:end].copy()
        lookback_dead[0] = _shifted(near, whole[begin])
    return Windows(
        tokens=windows.tokens[first:last],
        starts=(np.clip(starts[begin : end + 1], first, last) - first).astype(np.int32),
        lookback=lookback,
        dead=None if dead is None else dead[first:last],
        lookback_dead=lookback_dead,
    )


def _shifted(near: NDArray[_T], far: NDArray[_T]) -> NDArray[_T]:
    shifted: NDArray[_T] = np.concatenate([near, far])[: far.shape[0]]
    return shifted
