"""Which error a caller hears of where a memory failed its request."""

from __future__ import annotations

import pytest

from inference_worker.adapters.vllm_answer import error_of
from treadle.contract.errors import AccessDenied, DeadlineExceeded, InvalidArgument, TreadleError, Unavailable
from treadle.vllm.outcomes import Failure, RequestOutcome


@pytest.mark.parametrize("cause", [AccessDenied("key"), InvalidArgument("rows")])
def test_what_the_pool_refuses_for_good_is_told_as_what_it_is(cause: TreadleError) -> None:
    assert type(error_of(RequestOutcome(degraded=True, error=Failure.of(cause)))) is type(cause)


@pytest.mark.parametrize("cause", [Unavailable("gone"), DeadlineExceeded("slow")])
def test_rows_that_do_not_come_are_a_memory_that_is_missing(cause: TreadleError) -> None:
    assert type(error_of(RequestOutcome(degraded=True, error=Failure.of(cause)))).__name__ == "MemoryMissing"
