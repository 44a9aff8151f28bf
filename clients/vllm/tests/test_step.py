"""One step by itself: what the absence of rows, and its cause, means for each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from treadle.client.engram import EngramHandle, StepPrefetcher, fake_handle
from treadle.contract import Fusion, RowLayout
from treadle.contract.errors import AccessDenied, TreadleError, Unavailable
from treadle.contract.families import demo_model
from treadle.contract.policy import Late, WaitPolicy
from treadle.contract.windows import Windows
from treadle.nn.fusion import EngramFusion
from treadle.nn.token_map import token_map_digest
from treadle.vllm.memories import Memory
from treadle.vllm.outcomes import TicketReport
from treadle.vllm.step import EngramStep, RunningRequest, StepGroup
from treadle.vllm.windows import Span

HIDDEN, TOKENS = 16, 5


@pytest.fixture
def handle() -> EngramHandle:
    token_map = np.arange(50, dtype=np.int32)
    model = demo_model(
        "m", layers=(1,), token_map=token_map_digest(token_map), compressed_vocab_size=50, pad_id=0, prime_base=101, heads=2, row=RowLayout(32, 16, "bf16"),
        fusion=Fusion("v4.1"),
    )  # fmt: skip
    generator = np.random.default_rng(1)
    values = generator.standard_normal((model.rows_hashed(1), 16), dtype=np.float32)
    rows = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return fake_handle(model, token_map, {1: rows})


def a_step(handle: EngramHandle, requests: list[RunningRequest], dead: Any = None) -> tuple[EngramStep, list[TicketReport]]:
    """A step in which the second request stands first, from position 7 on, and a token of nobody's lies between them."""
    memory, told = Memory(handle, EngramFusion.build(handle.model, HIDDEN, delta_rms=1.0), fused=True), list[TicketReport]()
    spans = [Span(1, 0, 2, 3), Span(0, 7, 2, 0)]
    windows = Windows(np.array([1, 2, 3, 4]), np.array([0, 2, 4], dtype=np.int32), np.full((2, 2), -1), dead)
    return EngramStep(StepPrefetcher(), [StepGroup(memory, requests, spans, windows, [])], TOKENS, 5.0, told.append), told


def running(late: Late = Late.MASK) -> RunningRequest:
    return RunningRequest(None, WaitPolicy(5.0, late))


def test_rows_go_to_their_own_tokens_and_to_no_others(handle: EngramHandle) -> None:
    requests = [running(), running()]
    step, told = a_step(handle, requests)
    hidden, residual = torch.randn(TOKENS + 3, HIDDEN), torch.randn(TOKENS + 3, HIDDEN)  # three of padding
    assert not step.wants(0)
    out = step.before_layer(1, hidden, residual)
    step.finish()
    changed = (out != hidden).any(dim=1).tolist()
    assert changed == [True, True, False, True, True, False, False, False]
    fusion = EngramFusion.build(handle.model, HIDDEN, delta_rms=1.0)
    rows = handle.lookup(Windows(np.array([3, 4]), np.array([0, 2], dtype=np.int32), np.full((1, 2), -1)))[1]
    expected = fusion.forward(1, (hidden + residual)[:2], torch.from_numpy(rows))
    torch.testing.assert_close(out[:2] - hidden[:2], expected, atol=1e-5, rtol=1e-4)
    assert [(ticket.rows, ticket.rows_missing) for ticket in told] == [(4 * handle.model.columns, 0)]
    assert all(request.verdict().dirty_from is None and request.tickets == 1 for request in requests)


@pytest.mark.parametrize(
    ("cause", "late", "kind"),
    [(Unavailable("gone"), Late.MASK, None), (Unavailable("gone"), Late.FAIL, "Unavailable"), (AccessDenied("no"), Late.MASK, "AccessDenied")],
)  # fmt: skip
def test_a_lookup_that_ends_in_an_error_ends_requests_or_degrades_them_and_never_the_step(
    handle: EngramHandle, monkeypatch: pytest.MonkeyPatch, cause: TreadleError, late: Late, kind: str | None
) -> None:
    def refused(*_: Any) -> None:
        raise cause

    monkeypatch.setattr(handle, "prefetch", refused)
    requests = [running(late), running(late)]
    step, told = a_step(handle, requests)
    hidden = torch.randn(TOKENS, HIDDEN)
    assert torch.equal(step.before_layer(1, hidden, None), hidden)
    step.finish()
    assert [(ticket.in_time, ticket.rows, ticket.slack_seconds) for ticket in told] == [(False, 0, None)]
    for request, first in zip(requests, (0, 7), strict=True):
        verdict = request.verdict()
        assert (verdict.dirty_from, verdict.outcome.degraded, verdict.outcome.rows_missing) == (
            first,
            True,
            2 * handle.model.columns,
        )
        assert (verdict.outcome.error.kind if verdict.outcome.error else None) == kind
        assert request.verdict().dirty_from is None  # the next step begins clean


def test_rows_of_a_token_that_takes_part_in_no_n_gram_are_missed_by_nobody(
    handle: EngramHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(handle, "prefetch", refused)
    requests = [running(), running()]
    step, _ = a_step(handle, requests, np.array([True, True, True, False]))
    step.before_layer(1, torch.randn(TOKENS, HIDDEN), None)
    assert [(request.degraded, request.verdict().dirty_from) for request in requests] == [(False, None), (True, 8)]
