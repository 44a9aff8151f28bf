"""The stock OpenAI SDK against a real gateway process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

MODEL = "tiny-chat"
HI: Any = [{"role": "user", "content": "hi"}]
RENDERED_HI = len("user\nhi\nassistant\n") + 3  # a token a byte, and three special ones


@pytest.fixture
def client(gateway: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def async_client(gateway: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def test_a_chat_is_answered_with_text_usage_and_what_memory_did(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "Hé there"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == RENDERED_HI
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == RENDERED_HI + 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    extra = answer.model_extra or {}
    assert extra["treadle"]["degraded"] is False
    assert extra["treadle"]["memory"] == [
        {
            "kind": "engram", "name": "smollm2-demo", "version": "ab" * 32, "transport": "mapped",
            "tickets": 6, "tickets_in_time": 5, "rows_missing": 0, "shadowed": True, "missing_because": "",
            "lookups": 0, "lookups_outside": 0, "fell_back": False, "prefix_tokens": 0,
        }
    ]  # fmt: skip


def test_what_was_asked_for_reaches_the_worker(client: openai.OpenAI, worker: Any) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=5, temperature=0.25, top_p=0.5, seed=-1, stop=["a", "b"],
        extra_body={"treadle": {"engram": "default", "policy": {"wait_seconds_max": 0.5, "late": "fail"}}, "ignore_eos": True},
    )  # fmt: skip
    request = worker.requests[-1]
    assert request.sampling.max_tokens == 5
    assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)
    assert request.sampling.seed == 2**64 - 1
    assert list(request.sampling.stop) == ["a", "b"]
    assert request.sampling.ignore_eos
    assert not request.sampling.HasField("top_logprobs")
    assert request.memory_policy.wait_seconds_max == 0.5
    assert request.memory_policy.late == 2  # LATE_POLICY_FAIL
    assert 590 < worker.timeouts[-1] < 602  # gRPC rounds it up


def test_what_was_not_asked_for_is_left_to_the_worker(client: openai.OpenAI, worker: Any) -> None:
    client.chat.completions.create(model=MODEL, messages=HI)
    request = worker.requests[-1]
    assert request.sampling.max_tokens == 0
    assert not request.sampling.HasField("seed")
    assert request.sampling.temperature == 1.0
    assert request.memory_policy.wait_seconds_max == 0
    assert request.memory_policy.late == 0


def test_no_wait_for_memory_is_not_mistaken_for_the_workers_setting(client: openai.OpenAI, worker: Any) -> None:
    client.chat.completions.create(model=MODEL, messages=HI, extra_body={"treadle": {"policy": {"wait_seconds_max": 0}}})
    assert 0 < worker.requests[-1].memory_policy.wait_seconds_max < 1e-3


def test_a_streamed_chat_comes_in_chunks_that_make_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hé there"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].model_extra or {})["treadle"]["memory"][0]["tickets_in_time"] == 5
    assert all("treadle" not in (chunk.model_extra or {}) for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_if_asked_for(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}))
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert (chunks[-1].model_extra or {})["treadle"]["degraded"] is False


async def test_the_async_client_streams_too(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hé there"


def test_max_tokens_ends_an_answer_by_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("H", "length")


def test_chat_logprobs_give_each_token_with_its_bytes_and_rivals(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.token for item in logprobs.content[:3]] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.content[1].bytes == [0xC3]
    assert logprobs.content[0].logprob == -0.5
    assert [rival.token for rival in logprobs.content[0].top_logprobs] == ["A", "B"]


def test_streamed_chat_logprobs_lose_no_token(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, stream=True, logprobs=True))
    items = [item for chunk in chunks for item in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])]
    assert bytes(byte for item in items for byte in item.bytes or []).decode() == "Hé there"


def test_a_completion_continues_a_text_by_sixteen_tokens_unless_told(client: openai.OpenAI, worker: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc")
    assert answer.choices[0].text == "Hé there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("cmpl-")
    assert worker.requests[-1].sampling.max_tokens == 16
    assert len(worker.requests[-1].prompt_token_ids) == 3


def test_a_completion_takes_token_ids_as_they_are(client: openai.OpenAI, worker: Any) -> None:
    client.completions.create(model=MODEL, prompt=[5, 6, 7])
    assert list(worker.requests[-1].prompt_token_ids) == [5, 6, 7]
    client.completions.create(model=MODEL, prompt=[[8, 9]])
    assert list(worker.requests[-1].prompt_token_ids) == [8, 9]


def test_a_streamed_completion_ends_with_its_reason_and_usage(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="abc", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hé there"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_count_characters_not_bytes(client: openai.OpenAI, stream: bool) -> None:
    made: Any = client.completions.create(model=MODEL, prompt="abc", logprobs=1, stream=stream)
    parts = [answer.choices[0].logprobs for answer in (made if stream else [made]) if answer.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens][:4] == ["H", "bytes:\\xc3", "bytes:\\xa9", " "]
    assert [offset for part in parts for offset in part.text_offset][:5] == [0, 1, 1, 2, 3]
    assert parts[0].top_logprobs[0] == {"A": -2.0}
    assert parts[0].token_logprobs[0] == -0.5


def test_the_model_is_listed_and_found_by_its_name(client: openai.OpenAI) -> None:
    assert next(iter(client.models.list())).id == MODEL
    model = client.models.retrieve(MODEL)
    assert (model.model_extra or {})["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="another", messages=HI)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_refusal_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HI, n=9)
    assert refused.value.param == "n"


def test_an_error_in_the_middle_of_a_stream_reaches_the_client(client: openai.OpenAI, worker: Any, scripts: Any) -> None:
    worker.script = scripts["broken"]
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(3)] == ["", "H", "é"]
    with pytest.raises(openai.APIError) as failed:
        next(stream)
    assert failed.value.code == "unavailable"
