"""Several answers to one prompt, and several prompts in one request, by the stock OpenAI SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from inference_gateway.domain.generation import FinishReason, MemoryReport, Piece, Usage
from inference_gateway.domain.several import Ends, interleaved
from treadle.contract.errors import Unavailable
from treadle.inference.v1 import worker_pb2

MODEL = "tiny-chat"
HI: Any = [{"role": "user", "content": "hi"}]
RENDERED_HI = len("user\nhi\nassistant\n") + 3


@pytest.fixture
def client(gateway: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


async def say_seed(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
    """Its seed, a digit a token, with the prompt's first token before it."""
    said = f"{request.prompt_token_ids[0]}:{request.sampling.seed}"
    for letter in said:
        yield worker_pb2.GenerateResponse(token_ids=letter.encode(), text_delta=letter)
    usage = worker_pb2.Usage(prompt_tokens=len(request.prompt_token_ids), cached_tokens=2, completion_tokens=len(said))
    memory = [
        worker_pb2.MemoryReport(kind="engram", name="kjv", version="1b" * 32, transport="mapped", tickets=2, tickets_in_time=1)
    ]
    yield worker_pb2.GenerateResponse(finish_reason=worker_pb2.FINISH_REASON_STOP, usage=usage, memory=memory)


def test_each_choice_has_an_index_a_seed_of_its_own_and_the_prompt_is_counted_once(client: openai.OpenAI, worker: Any) -> None:
    worker.script = say_seed
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [(choice.message.content or "").split(":")[1] for choice in answer.choices] == ["7", "8", "9"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == RENDERED_HI
    assert answer.usage.completion_tokens == sum(len(choice.message.content or "") for choice in answer.choices)
    (memory,) = (answer.model_extra or {})["treadle"]["memory"]
    assert (memory["tickets"], memory["tickets_in_time"]) == (6, 3)
    assert len({request.request_id for request in worker.requests[-3:]}) == 3


def test_choices_come_interleaved_in_a_stream_that_ends_once(client: openai.OpenAI, worker: Any) -> None:
    worker.script = say_seed
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, n=2, seed=1, stream=True, stream_options=options))
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [text.split(":")[1] for text in texts.values()] == ["1", "2"]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert reasons == ["stop", "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == RENDERED_HI
    assert sum("treadle" in (chunk.model_extra or {}) for chunk in chunks) == 1


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: openai.OpenAI, worker: Any) -> None:
    worker.script = say_seed
    answer = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [9]], n=2, best_of=2, seed=3)
    assert [choice.text for choice in answer.choices] == ["5:3", "5:4", "9:3", "9:4"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    texts = client.completions.create(model=MODEL, prompt=["abc", "de"]).choices
    assert [len(request.prompt_token_ids) for request in worker.requests[-2:]] in ([3, 2], [2, 3])
    assert [choice.index for choice in texts] == [0, 1]


def test_one_prompt_of_several_that_is_wrong_refuses_them_all(client: openai.OpenAI, worker: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=["abc", "x" * 300])
    assert refused.value.code == "context_length_exceeded"
    assert not worker.requests


def test_a_worker_that_fails_one_choice_fails_the_request(client: openai.OpenAI, worker: Any, scripts: Any) -> None:
    worker.script = scripts["broken"]
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=HI, n=2)


def test_how_tokens_are_chosen_reaches_the_worker(client: openai.OpenAI, worker: Any) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HI, logit_bias={"5": -100, "6": 1}, presence_penalty=0.5, frequency_penalty=-0.5,
        extra_body={"top_k": 40, "min_p": 0.25, "repetition_penalty": 1.5},
    )  # fmt: skip
    sampling = worker.requests[-1].sampling
    assert dict(sampling.logit_bias) == {5: -100.0, 6: 1.0}
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.top_k, sampling.min_p) == (40, 0.25)
    client.chat.completions.create(model=MODEL, messages=HI, extra_body={"top_k": -1})
    assert worker.requests[-1].sampling.top_k == 0
    assert worker.requests[-1].sampling.repetition_penalty == 1


async def test_an_error_of_one_part_ends_the_others_and_closing_ends_all() -> None:
    ended = []

    async def endless(name: str) -> Any:
        try:
            while True:
                yield Piece(text=name)
        finally:
            ended.append(name)

    async def fails() -> Any:
        yield Piece(text="f")
        raise Unavailable("gone")

    with pytest.raises(Unavailable):
        async for _ in interleaved([endless("a"), fails()]):
            pass
    assert ended == ["a"]
    both = interleaved([endless("b"), endless("c")])
    await anext(both)
    await both.aclose()
    assert sorted(ended) == ["a", "b", "c"]


def test_what_was_cut_off_is_counted_as_far_as_it_came() -> None:
    ends = Ends([10, 0])
    report = MemoryReport("engram", "kjv", "1b", "mapped", 2, 1, 3, False, "late")
    ends.saw(Piece(token_ids=(1, 2), choice=1))
    ends.saw(Piece(finish_reason=FinishReason.STOP, usage=Usage(10, 4, 6), memory=(report,), degraded=True))
    (cut,) = ends.cut()
    assert (cut.choice, cut.finish_reason, cut.usage) == (1, FinishReason.ABORT, Usage(0, 0, 2))
    assert not ends.complete
    ends.saw(cut)
    assert ends.complete
    assert ends.usage == Usage(10, 4, 8)
    assert (ends.degraded, ends.memory) == (True, (report,))
