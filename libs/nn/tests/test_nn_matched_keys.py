"""Attention over matched keys: rows by the hundred are matrix products, a few rows one native call."""

from __future__ import annotations

import torch

from treadle.nn.matched_keys import ROWS_BY_TOKEN, MatchedKeys


def test_many_rows_see_what_each_sees_alone_and_a_head_without_keys_sees_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values, biases = (torch.randn(3, 20, width, generator=draw) for width in (8, 8, 1))
    biases = biases.squeeze(-1)
    biases[1], biases[2, 5:] = -torch.inf, -torch.inf
    matched, rows = MatchedKeys(keys, values, biases), 4 * torch.randn(ROWS_BY_TOKEN + 3, 6, 8, generator=draw)
    a, log_z = matched.state(rows)
    few = [matched.state(row.unsqueeze(0)) for row in rows]
    torch.testing.assert_close(a, torch.cat([each for each, _ in few]), rtol=0, atol=1e-5)
    torch.testing.assert_close(log_z, torch.cat([each for _, each in few]), rtol=0, atol=1e-5)
    assert not a[:, 2:4].any()
    assert bool(log_z[:, 2:4].isneginf().all())


def test_no_keys_at_all_are_an_empty_state() -> None:
    a, log_z = MatchedKeys(torch.empty(3, 0, 8), torch.empty(3, 0, 8), torch.empty(3, 0)).state(torch.ones(40, 6, 8))
    assert torch.equal(a, torch.zeros(40, 6, 8))
    assert torch.equal(log_z, torch.full((40, 6), -torch.inf))
