"""Requests that cannot be run are refused, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from inference_worker.domain.request import Piece, Request, Sampling, total
from treadle.contract.errors import InvalidArgument


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop": ("x" * 257,)}, "stop"),
        ({"stop_token_ids": frozenset(range(257))}, "stop_token_ids"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {1: 100.5}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
    ],
)
def test_sampling_out_of_range_is_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}:"):
        Sampling(**fields)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(()), "prompt_token_ids"),
        (Request((1,) * 16), "prompt_token_ids"),
        (Request((1, 100)), "prompt_token_ids"),
        (Request((-1,)), "prompt_token_ids"),
        (Request((1,), Sampling(logit_bias={100: 1.0})), "logit_bias"),
        (Request((1,), cache_salt="x" * 257), "cache_salt"),
        (Request((1,), request_id="x" * 257), "request_id"),
    ],
)
def test_a_request_that_the_model_cannot_run_is_refused(request_: Request, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}:"):
        request_.check(vocabulary=100, context_tokens_max=16)


def test_an_answer_is_bounded_by_max_tokens_and_by_the_context() -> None:
    assert Request((1,) * 10, Sampling(max_tokens=3)).tokens_max(16) == 13
    assert Request((1,) * 10, Sampling(max_tokens=30)).tokens_max(16) == 16
    assert Request((1,) * 10).tokens_max(16) == 16


def test_pieces_add_up() -> None:
    whole = total([Piece([1], "a"), Piece([2], "b", degraded=True), Piece([3], "c")])
    assert whole == Piece([1, 2, 3], "abc", degraded=True)
