"""The exact windows of a step, from the token ids that the runner keeps for each request.

Exact whatever the step is: a chunk of a prompt, a decode, what follows a prefix-cache hit, or positions that came as vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract.windows import BEFORE_SEQUENCE, Windows


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one request that run in a step.

    row:   of the request in the runner's arrays
    first: position of the first of them in the request
    count: how many
    place: of the first of them in the step's flat batch
    """

    row: int
    first: int
    count: int
    place: int


def windows_of(token_ids: NDArray[np.int32], is_token_id: NDArray[np.bool_] | None, spans: Sequence[Span], depth: int) -> Windows:
    """The windows of some spans, one after the other.

    token_ids:   [rows, positions_max], ids of every position up to the end of each span
    is_token_id: [rows, positions_max] or None, False where a position came as a vector: it takes part in no n-gram
    depth:       columns of look-back
    """
    starts = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum([span.count for span in spans], out=starts[1:])
    tokens = np.empty(int(starts[-1]), dtype=np.int64)
    lookback = np.full((len(spans), depth), BEFORE_SEQUENCE, dtype=np.int64)
    dead = np.zeros(tokens.shape, dtype=np.bool_)
    lookback_dead = np.zeros(lookback.shape, dtype=np.bool_)
    for index, span in enumerate(spans):
        end, near = span.first + span.count, max(0, span.first - depth)
        before, own = slice(near, span.first), slice(int(starts[index]), int(starts[index + 1]))
        reach = span.first - near
        tokens[own] = token_ids[span.row, span.first : end]
        lookback[index, :reach] = token_ids[span.row, before][::-1]
        if is_token_id is not None:
            dead[own] = ~is_token_id[span.row, span.first : end]
            lookback_dead[index, :reach] = ~is_token_id[span.row, before][::-1]
    if not dead.any() and not lookback_dead.any():
        return Windows(tokens, starts, lookback)
    tokens[dead], lookback[lookback_dead] = 0, 0  # what stands there is no id
    return Windows(tokens, starts, lookback, dead, lookback_dead)
