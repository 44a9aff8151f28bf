"""A request whose prefix could not be had, and that goes on without it, says so whatever runs the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inference_worker.adapters.vllm_answer import VllmAnswer
from inference_worker.domain.prefix_run import missing_report
from inference_worker.domain.request import Request
from inference_worker.domain.text import Vocabulary


def test_an_answer_without_its_prefix_is_degraded_from_its_first_piece() -> None:
    missing = missing_report("rules", "")
    answer = VllmAnswer(Request((1, 2), missing=(missing,)), Vocabulary((b"a", b"b", b"c")), frozenset())
    outputs = [_output([1], None), _output([2], "length")]
    first, last = (answer.take(output) for output in outputs)
    assert (first.degraded, last.degraded) == (True, True)
    assert last.finish is not None
    assert last.finish.memory == (missing,)


def _output(tokens: list[int], finish: str | None) -> Any:
    completion = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason=finish)
    return SimpleNamespace(
        outputs=[completion], finished=finish is not None, num_cached_tokens=0, prompt_logprobs=None, kv_transfer_params=None
    )
