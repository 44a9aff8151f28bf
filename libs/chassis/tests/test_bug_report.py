"""What a log says of a bug where its words may be somebody's text."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from treadle.chassis.interceptors import CallGuard, RpcMetrics

CANARY = "canary-5c21"


class Context:
    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, *details: Any) -> None:
        self.code, self.details = code, details
        raise grpc.aio.AbortError


@pytest.mark.parametrize("words", [True, False])
async def test_a_bug_is_told_with_its_words_or_by_class_and_place_alone(words: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def stumble(request: Any, context: Any) -> None:
        raise LookupError(f"in {CANARY}")

    metrics = RpcMetrics(CollectorRegistry(), "test")
    guard = CallGuard(status={}, keys=frozenset(), calls_max=1, metrics=metrics, words_in_logs=words)
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await guard._unary("/a.b/C", stumble, None)(None, context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert CANARY not in str(context.details)
    (line,) = caplog.records
    assert (CANARY in logging.Formatter().format(line) + str(vars(line))) is words
    if not words:
        assert vars(line)["bug"].startswith("LookupError at ")
        assert "stumble" in vars(line)["bug"]
