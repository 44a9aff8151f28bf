"""A step cut into pieces of consecutive tokens that hash to the same rows: for answers that are bounded in size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Windows

Item = TypeVar("Item", np.int64, np.bool_)


def token_pieces(windows: Windows, tokens_max: int) -> Iterator[tuple[int, Windows]]:
    """(first token, windows of at most `tokens_max` tokens from there on), in order; none for a step without tokens."""
    if windows.token_count <= tokens_max:
        if windows.token_count:
            yield 0, windows
        return
    for first in range(0, windows.token_count, tokens_max):
        yield first, _piece(windows, first, min(first + tokens_max, windows.token_count))


def _piece(windows: Windows, first: int, last: int) -> Windows:
    """Tokens [first, last): the request that `first` lies in begins there, and looks back on what it had before."""
    starts = windows.starts
    begin = int(np.searchsorted(starts[1:], first, side="right"))  # the request of token `first`
    end = int(np.searchsorted(starts[:-1], last, side="left"))
    kept = np.clip(starts[begin : end + 1], first, last) - first
    lookback = windows.lookback[begin:end].copy()
    before = windows.tokens[int(starts[begin]) : first][::-1]
    lookback[0] = _pushed(before, lookback[0])
    dead_before = None if windows.lookback_dead is None else windows.lookback_dead[begin:end].copy()
    if windows.dead is not None or dead_before is not None:
        if dead_before is None:
            dead_before = np.zeros(lookback.shape, dtype=np.bool_)
        flags = np.zeros(before.shape, dtype=np.bool_) if windows.dead is None else windows.dead[int(starts[begin]) : first][::-1]
        dead_before[0] = _pushed(flags, dead_before[0])
    return Windows(
        tokens=windows.tokens[first:last], starts=kept.astype(np.int32), lookback=lookback,
        dead=None if windows.dead is None else windows.dead[first:last], lookback_dead=dead_before,
    )  # fmt: skip


def _pushed(nearest: NDArray[Item], further: NDArray[Item]) -> NDArray[Item]:
    """What lies before a token, nearest first: `nearest`, then `further`, cut to the length of the latter."""
    pushed: NDArray[Item] = np.concatenate([nearest, further])[: further.shape[0]]
    return pushed
