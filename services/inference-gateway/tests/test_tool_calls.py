"""Tools: given to templates that know them, and their calls read out of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inference_gateway.domain.tool_calls import CallReader, ToolCall
from treadle.inference.v1 import worker_pb2

MODEL = "tiny-chat"
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HERMES = (
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools> answer in <tool_call></tool_call>' }}{% endif %}"
    "{% for message in messages %}{{ message.role + ':' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '[' + call.function.name + (call.function.arguments | tojson) + ']' }}{% endfor %}"
    "{{ '(' + message.tool_call_id + ')' if message.tool_call_id else '' }}{{ ';' }}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def says(text: str, reason: Any = worker_pb2.FINISH_REASON_STOP) -> Callable[..., AsyncIterator[worker_pb2.GenerateResponse]]:
    async def say(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        for letter in text:
            yield worker_pb2.GenerateResponse(token_ids=[1], text_delta=letter)
        usage = worker_pb2.Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(text))
        yield worker_pb2.GenerateResponse(finish_reason=reason, usage=usage)

    return say


@pytest.fixture(scope="session")
def tool_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer with a template that knows tools, in Hermes's form."""
    folder = tmp_path_factory.mktemp("tool-model")
    (folder / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(HERMES)
    return folder


@pytest.fixture
def client(worker: Any, start_gateway: Callable[..., Any], tool_model_dir: Path) -> Iterator[openai.OpenAI]:
    worker.status["context_tokens_max"] = 2048
    gateway = start_gateway("--worker", worker.address, "--tokenizer-dir", str(tool_model_dir))
    gateway.wait_ready()
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def prompt_of(worker: Any) -> str:
    return bytes_of(worker.requests[-1].prompt_token_ids)


def bytes_of(token_ids: Any) -> str:
    """The text of byte-level tokens, in the order of the tiny tokenizer's alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    of = {alphabet.index(chr(byte)): byte for byte in printable} | {
        alphabet.index(chr(256 + place)): byte for place, byte in enumerate(hidden)
    }
    return bytes(of[token] for token in token_ids).decode()


def test_tools_and_earlier_calls_are_given_to_the_template(client: openai.OpenAI, worker: Any) -> None:
    messages: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert prompt_of(worker) == (
        f"<tools>{json.dumps([TOOL])}</tools> answer in <tool_call></tool_call>"
        'user:hi;assistant:[weather{"city": "Bern"}];tool:rain(c1);'
    )


def test_a_call_in_the_answer_is_read(client: openai.OpenAI, worker: Any) -> None:
    worker.script = says(f"I look.\n{CALL}\n{CALL.replace('Zürich', 'Bern')}")
    choice = client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls: Any = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Zürich"}, {"city": "Bern"}]
    assert {call.function.name for call in calls} == {"weather"}
    assert len({call.id for call in calls}) == 2


def test_a_streamed_call_comes_as_a_delta_and_none_of_its_text_as_content(client: openai.OpenAI, worker: Any) -> None:
    worker.script = says(f"So: {CALL}{CALL}")
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "So:"
    calls: Any = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "weather")]
    assert json.loads(calls[0].function.arguments) == {"city": "Zürich"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_only_calls_leave_no_content(client: openai.OpenAI, worker: Any) -> None:
    worker.script = says(CALL)
    assert client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL]).choices[0].message.content is None


def test_one_call_at_a_time_stops_the_worker_after_the_first(client: openai.OpenAI, worker: Any) -> None:
    worker.script = says(CALL.removesuffix("</tool_call>"))  # the worker takes a stop string away
    choice = client.chat.completions.create(model=MODEL, messages=HI, tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert list(worker.requests[-1].sampling.stop) == ["</tool_call>"]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or []) == 1


def test_without_tools_or_with_none_to_choose_text_stays_text(client: openai.OpenAI, worker: Any) -> None:
    worker.script = says(CALL)
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = client.chat.completions.create(model=MODEL, messages=HI, **more).choices[0]  # type: ignore[call-overload]
        assert choice.message.content == CALL
        assert choice.finish_reason == "stop"
        assert prompt_of(worker) == "user:hi;"


def pieces(reader: CallReader, text: str, size: int, *, stopped: bool = True) -> tuple[str, list[ToolCall]]:
    found = [part for start in range(0, len(text), size) for part in reader.push(text[start : start + size])]
    found += reader.finish(stopped=stopped)
    return "".join(part for part in found if isinstance(part, str)), [part for part in found if isinstance(part, ToolCall)]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "plain <b>text</b>, a < b and <tool_ calls",
        "<tool_call>not json</tool_call> and on",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        r'<tool_call>{"name": "weather", "arguments": {"city": "\ud800"}}</tool_call>',
        r'<tool_call>{"name": "\ud800"}</tool_call>',
        "ends with space \n",
        "<tool_call",
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(text: str, size: int) -> None:
    assert pieces(CallReader(), text, size) == (text, [])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_text_and_calls_are_told_apart_wherever_the_pieces_end(size: int) -> None:
    text, calls = pieces(CallReader(), f"first {CALL}\n then  {CALL}\n", size)
    assert text == "first\n then"
    assert [call.arguments for call in calls] == ['{"city": "Zürich"}'] * 2


def test_a_call_that_the_length_cut_off_is_text() -> None:
    assert pieces(CallReader(), '<tool_call>{"name": "weather"', 4, stopped=False) == ('<tool_call>{"name": "weather"', [])
