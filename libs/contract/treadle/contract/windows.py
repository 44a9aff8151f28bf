"""The tokens of one step, with what came before them: the input of every Engram lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument

BEFORE_SEQUENCE = -1  # stands in a look-back where the sequence had not begun
TOKENS_MAX = 1 << 20  # tokens in one step: no scheduler makes a larger one, and it bounds what a request can allocate
LOOKBACK_MAX = 15  # columns of look-back: n-gram orders up to 16


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Tokens of a step, flat over its requests; arrays are borrowed, C-contiguous and never written.

    tokens:        [T] int64, raw token ids, >= 0
    starts:        [R+1] int32, request r owns tokens[starts[r]:starts[r+1]]; starts[0] = 0, starts[R] = T
    lookback:      [R, Nmax-1] int64, column 0 the nearest earlier token of request r, -1 = before the sequence
    dead:          [T] bool or None, True where a token takes part in no n-gram (an image span)
    lookback_dead: [R, Nmax-1] bool or None, the same for the look-back
    """

    tokens: NDArray[np.int64]
    starts: NDArray[np.int32]
    lookback: NDArray[np.int64]
    dead: NDArray[np.bool_] | None = None
    lookback_dead: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int64, 1)
        _check_array("starts", self.starts, np.int32, 1)
        _check_array("lookback", self.lookback, np.int64, 2)
        count, requests = self.tokens.shape[0], self.starts.shape[0] - 1
        if count > TOKENS_MAX:
            raise InvalidArgument(f"tokens: {count} in one step, the limit is {TOKENS_MAX}")
        if requests < 0 or self.starts[0] != 0 or self.starts[-1] != count or bool(np.any(self.starts[1:] < self.starts[:-1])):
            raise InvalidArgument(f"starts: must rise from 0 to the number of tokens ({count})")
        if self.lookback.shape[0] != requests or self.lookback.shape[1] > LOOKBACK_MAX:
            raise InvalidArgument(f"lookback: shape [{requests}, <= {LOOKBACK_MAX}] expected, got {list(self.lookback.shape)}")
        if count and int(self.tokens.min()) < 0:
            raise InvalidArgument(f"tokens: ids are >= 0, got {int(self.tokens.min())}")
        if self.lookback.size and int(self.lookback.min()) < BEFORE_SEQUENCE:
            raise InvalidArgument(f"lookback: ids are >= -1, got {int(self.lookback.min())}")
        _check_mask("dead", self.dead, self.tokens.shape)
        _check_mask("lookback_dead", self.lookback_dead, self.lookback.shape)

    @classmethod
    def of_sequences(cls, sequences: Sequence[tuple[Sequence[int], int]], depth: int) -> Windows:
        """Windows of whole sequences of which only the tail runs in this step.

        sequences: per request (all token ids so far, index of the first id that runs now)
        depth:     Nmax - 1, columns of look-back
        """
        tails = [np.asarray(ids[first:], dtype=np.int64) for ids, first in sequences]
        lookback = np.full((len(tails), depth), BEFORE_SEQUENCE, dtype=np.int64)
        for row, (ids, first) in enumerate(sequences):
            near = ids[max(0, first - depth) : first][::-1]
            lookback[row, : len(near)] = near
        starts = np.zeros(len(tails) + 1, dtype=np.int32)
        np.cumsum([tail.shape[0] for tail in tails], out=starts[1:])
        tokens = np.concatenate(tails) if tails else np.zeros(0, dtype=np.int64)
        return cls(tokens=tokens, starts=starts, lookback=lookback)

    @property
    def token_count(self) -> int:
        """T, the number of tokens of the step."""
        return int(self.tokens.shape[0])


def _check_array(name: str, array: object, dtype: type[np.generic], dimensions: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions:
        got = f"{array.dtype} with {array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidArgument(f"{name}: {np.dtype(dtype).name} with {dimensions} dimensions expected, got {got}")
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{name}: must be C-contiguous")


def _check_mask(name: str, mask: NDArray[np.bool_] | None, shape: tuple[int, ...]) -> None:
    if mask is None:
        return
    _check_array(name, mask, np.bool_, len(shape))
    if mask.shape != shape:
        raise InvalidArgument(f"{name}: shape {list(shape)} expected, got {list(mask.shape)}")
