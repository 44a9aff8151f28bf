"""Windows of a step from the runner's arrays, on both runners, and the history beside paged KV."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.contract import InvalidArgument
from treadle.contract.windows import LOOKBACK_MAX, Windows
from treadle.vllm import fuse_op
from treadle.vllm.history import HistoryPages
from treadle.vllm.windows import Span, windows_of

POSITIONS, DEPTH = 40, 3


def a_step(seed: int) -> tuple[np.ndarray, list[Span]]:
    """Token ids of five requests and their spans in a step: chunks, decodes and beginnings, in any order."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 1000, (5, POSITIONS)).astype(np.int32)
    spans, place = [], 0
    for row in range(5):
        first = int(generator.integers(0, 20)) if row else 0
        count = int(generator.integers(1, POSITIONS - first)) if row % 2 else 1
        spans.append(Span(row, first, count, place))
        place += count
    return ids, spans


def same(one: Windows, two: Windows) -> None:
    for name in ("tokens", "starts", "lookback"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.dead is None
    assert one.lookback_dead is None


@pytest.mark.parametrize("seed", range(8))
def test_windows_are_those_of_the_whole_sequences_on_both_runners(seed: int) -> None:
    from treadle.vllm.model_state import lookback_of, windows_on_host

    ids, spans = a_step(seed)
    chosen = [spans[place] for place in np.random.default_rng(seed).permutation(5)[:3]]
    whole = Windows.of_sequences([(ids[span.row, : span.first + span.count].tolist(), span.first) for span in chosen], DEPTH)
    same(windows_of(ids, None, chosen, DEPTH), whole)
    same(windows_of(ids, np.ones_like(ids, dtype=bool), chosen, DEPTH), whole)

    kept = np.random.default_rng(seed).permutation(7)[:5]  # rows where the second runner keeps these five requests
    all_ids = torch.full((7, POSITIONS), 77, dtype=torch.int32)
    all_ids[kept] = torch.from_numpy(ids)
    firsts = torch.tensor([span.first for span in spans], dtype=torch.int32)
    lookback = lookback_of(all_ids, torch.from_numpy(kept), firsts, LOOKBACK_MAX).numpy()
    flat = np.concatenate([ids[span.row, span.first : span.first + span.count] for span in spans])
    same(windows_on_host(flat, lookback, chosen, DEPTH), whole)


def test_a_position_that_came_as_a_vector_is_dead_here_and_in_the_look_back() -> None:
    ids = np.arange(100, 110, dtype=np.int32)[np.newaxis]
    ids[0, 4:6] = -9  # whatever the runner left there
    known = np.ones((1, 10), dtype=bool)
    known[0, 4:6] = False
    windows = windows_of(ids, known, [Span(0, 5, 3, 0)], 2)
    assert windows.tokens.tolist() == [0, 106, 107]
    assert windows.lookback.tolist() == [[0, 103]]
    assert windows.dead is not None
    assert windows.lookback_dead is not None
    assert (windows.dead.tolist(), windows.lookback_dead.tolist()) == ([True, False, False], [[True, False]])


def test_history_lies_with_the_blocks_and_is_found_through_any_request_that_shares_them() -> None:
    pages, width, reach = HistoryPages(slots=64, block_tokens=4), 2, 5
    values = torch.arange(22.0).view(11, 2)
    writer = pages.of(Span(0, 0, 11, 0), np.array([3, 9, 5, 0], dtype=np.int32), reach, width)
    assert writer.history(1, 3).tolist() == [[0, 0]] * 3  # before the sequence
    writer.append_history(1, values)
    decode = pages.of(Span(0, 11, 1, 0), np.array([3, 9, 5, 0], dtype=np.int32), reach, width)
    assert torch.equal(decode.history(1, 5), values[6:])
    sharing = pages.of(Span(2, 8, 2, 4), np.array([3, 9, 7], dtype=np.int32), reach, width)
    assert torch.equal(sharing.history(1, 5), values[3:8])
    early = pages.of(Span(2, 2, 2, 4), np.array([3], dtype=np.int32), reach, width)
    assert early.history(1, 5).tolist() == [[0, 0]] * 3 + values[:2].tolist()
    with pytest.raises(InvalidArgument, match="vectors of 2, not 3"):
        pages.page(1, 3)


def test_the_operator_does_nothing_in_runs_without_requests_and_passes_torchs_own_check() -> None:
    hidden, residual = torch.randn(3, 4), torch.randn(3, 4)
    out = torch.ops.treadle.engram_fuse(hidden, residual, 1)
    assert torch.equal(out, hidden)
    assert out.data_ptr() != hidden.data_ptr()
    assert not fuse_op.is_wanted(1)
    torch.library.opcheck(torch.ops.treadle.engram_fuse.default, (hidden, residual, 1))
    torch.library.opcheck(torch.ops.treadle.engram_fuse.default, (hidden, None, 1))
