"""Pieces of a step hash to the rows of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from treadle.client.engram.windows_pieces import token_pieces
from treadle.contract import Windows
from treadle.kernels import HashPlan, row_ids

if TYPE_CHECKING:
    from tests.conftest import SmallEngram


def step(depth: int, masks: tuple[bool, bool], seed: int) -> Windows:
    """Requests of 0 to 9 tokens, some of which had something before."""
    chance = np.random.default_rng(seed)
    sequences = [
        (chance.integers(0, 500, before + now).tolist(), before) for before, now in chance.integers(0, 10, (7, 2)).tolist()
    ]
    windows = Windows.of_sequences(sequences, depth)
    dead = chance.random(windows.token_count) < 0.3 if masks[0] else None
    lookback_dead = chance.random(windows.lookback.shape) < 0.3 if masks[1] else None
    return replace(windows, dead=dead, lookback_dead=lookback_dead)


@pytest.mark.parametrize("masks", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("tokens_max", [1, 2, 5, 1_000])
def test_pieces_hash_to_the_rows_of_the_whole(small: SmallEngram, tokens_max: int, masks: tuple[bool, bool]) -> None:
    plan = HashPlan.from_model(small.model, 1, small.token_map)
    for seed in range(12):
        windows = step(small.model.order_max - 1, masks, seed)
        whole = row_ids(plan, windows)
        done = 0
        for first, piece in token_pieces(windows, tokens_max):
            assert first == done
            assert piece.token_count <= tokens_max
            assert np.array_equal(row_ids(plan, piece), whole[first : first + piece.token_count])
            done += piece.token_count
        assert done == windows.token_count
