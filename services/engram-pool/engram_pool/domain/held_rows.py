"""Which rows of a table a pool is to keep, where tables are spread over owners, and what it says to whom asks for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.storing import Ranges
from treadle.contract import EngramModel, RowOutOfRange
from treadle.contract.placement import Spread, held_by
from treadle.kernels.held import first_not_held


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one owner under a spread."""

    owner: str
    spread: Spread

    def held(self, model: EngramModel, row_counts: Mapping[int, int]) -> dict[int, Ranges | None]:
        """By layer, the rows to keep; `row_counts`: rows of each table, those behind the hashed ones included.

        Raises InvalidArgument for an owner that is none, or stretches beyond the limits.
        """
        held: dict[int, Ranges | None] = {}
        for layer, ranges in held_by(self.owner, model, self.spread).items():
            kept = [(int(first), int(last)) for first, last in ranges]
            if kept and kept[-1][1] == model.rows_hashed(layer):  # padding belongs to the last stretch
                kept[-1] = (kept[-1][0], row_counts[layer])
            held[layer] = tuple(kept)
        return held


def check_held(ids: NDArray[np.int64], held: Ranges | None, layer: int) -> None:
    """Raise RowOutOfRange, naming the first of `ids` that is not held here; None: all are."""
    if held is not None and (place := first_not_held(ids, held)) is not None:
        raise RowOutOfRange(
            f"rows[{place}] is {int(ids[place])}: this pool holds a part of layer {layer} only; ask the owner of that row's stretch"
        )
