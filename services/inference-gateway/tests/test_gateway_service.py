"""GatewayService: the same requests as by HTTP, typed, by the SDK."""

from __future__ import annotations

import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.client import Endpoint, Fabric
from treadle.client.gateway import AsyncGateway, Gateway
from treadle.contract.errors import AccessDenied, DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted
from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import worker_pb2

MODEL = "tiny-chat"
HI = [pb.ChatMessage(role="user", content="hi")]


@pytest.fixture
def both(worker: Any, start_gateway: Callable[..., Any]) -> Iterator[tuple[Any, Gateway]]:
    """A gateway by HTTP, and the same by the SDK."""
    served = start_gateway("--worker", worker.address, "--grpc-listen", "127.0.0.1:0")
    served.wait_ready()
    with Gateway(Endpoint(served.ready["grpc"])) as gateway:
        yield served, gateway


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, f"not within 10 s: {what}"
        time.sleep(0.01)


def chat(**options: Any) -> pb.ChatRequest:
    return pb.ChatRequest(model=MODEL, messages=HI, options=pb.GenerationOptions(**options))


def text_of(pieces: list[pb.AnswerPiece], choice: int = 0) -> str:
    return "".join(piece.text_delta for piece in pieces if piece.choice == choice)


def test_a_chat_is_answered_as_by_http(both: tuple[Any, Gateway], worker: Any) -> None:
    served, gateway = both
    fields: dict[str, Any] = {"seed": 5, "temperature": 0.25, "max_tokens": 7, "stop": ["zz"], "top_k": 3, "n": 2}
    by_http = served.chat(
        **fields, logit_bias={"5": 1.5}, treadle={"engram": "kjv", "prefix": "rules", "policy": {"late": "fail"}}
    ).json()
    asked_by_http = list(worker.requests)
    worker.requests.clear()
    policy = worker_pb2.MemoryPolicy(late=worker_pb2.LATE_POLICY_FAIL)
    pieces = list(gateway.chat(chat(**fields, logit_bias={5: 1.5}, engram="kjv", prefix="rules", memory_policy=policy)))
    by_seed = [
        sorted(asked, key=lambda each: each.sampling.seed) for asked in (worker.requests, asked_by_http)
    ]  # both come at once
    for ours, theirs in zip(*by_seed, strict=True):
        theirs.request_id = ours.request_id
        assert ours == theirs
    assert [text_of(pieces, choice) for choice in (0, 1)] == [choice["message"]["content"] for choice in by_http["choices"]]
    last = pieces[-1]
    assert last.end == pb.ANSWER_END_LENGTH
    assert last.usage.prompt_tokens == by_http["usage"]["prompt_tokens"]
    assert last.usage.completion_tokens == by_http["usage"]["completion_tokens"]
    told = [(report.name, report.lookups, report.prefix_tokens) for report in last.memory]
    assert told == [(report["name"], report["lookups"], report["prefix_tokens"]) for report in by_http["treadle"]["memory"]]
    assert told == [("kjv", 0, 0), ("rules", 800, 900)]
    assert [piece.end != pb.ANSWER_END_UNSPECIFIED for piece in pieces].count(True) == 2
    assert not any(piece.HasField("usage") for piece in pieces[:-1])


def test_texts_and_token_ids_are_continued_as_by_http(both: tuple[Any, Gateway], worker: Any) -> None:
    _, gateway = both
    texts = [pb.CompletionPrompt(text="abc"), pb.CompletionPrompt(text="de")]
    options = pb.GenerationOptions(top_logprobs=2)
    pieces = list(gateway.complete(pb.CompleteRequest(model=MODEL, prompts=texts, options=options)))
    assert [text_of(pieces, choice) for choice in (0, 1)] == ["Hé there"] * 2
    assert pieces[0].logprobs[0].top[1].logprob == -3.0
    assert worker.requests[-1].sampling.max_tokens == 16
    tokens = [pb.CompletionPrompt(tokens=pb.TokenIds(ids=[5, 6]))]
    list(gateway.complete(pb.CompleteRequest(model=MODEL, prompts=tokens)))
    assert list(worker.requests[-1].prompt_token_ids) == [5, 6]
    with pytest.raises(InvalidArgument, match="'prompts'"):
        list(gateway.complete(pb.CompleteRequest(model=MODEL, prompts=[*texts, *tokens])))


def test_vectors_models_and_status_are_those_of_http(both: tuple[Any, Gateway]) -> None:
    served, gateway = both
    inputs = [pb.CompletionPrompt(text="abc"), pb.CompletionPrompt(text="de")]
    answer = gateway.embed(pb.GatewayServiceEmbedRequest(model=MODEL, inputs=inputs))
    assert [struct.unpack("<2f", each.values)[0] for each in answer.embeddings] == [3.0, 2.0]
    assert answer.usage.prompt_tokens == 5
    listed = served.http.get("/v1/models").json()["data"]
    assert [(model.id, model.engram, model.default) for model in gateway.models()] == [
        (model["id"], model["treadle"]["engram"] or "", model["treadle"]["default"]) for model in listed
    ]
    status = gateway.status()
    assert (status.ready, status.reason, status.pid) == (True, "", served.ready["pid"])


@pytest.mark.parametrize(
    ("request_", "error", "told"),
    [
        (pb.ChatRequest(model=MODEL), InvalidArgument, "messages"),
        (pb.ChatRequest(model="another", messages=HI), NotFound, "another"),
        (chat(n=9), InvalidArgument, "'n'"),
        (chat(temperature=9), InvalidArgument, "'temperature'"),
        (chat(temperature=float("nan")), InvalidArgument, "'temperature'"),
        (chat(logit_bias={1: float("inf")}), InvalidArgument, "finite"),
        (chat(engram="nobody"), InvalidArgument, "treadle.engram"),
        (chat(prefix="nobody"), InvalidArgument, "treadle.prefix"),
        (pb.ChatRequest(model=MODEL, messages=HI, request_id="a b"), InvalidArgument, "'request_id'"),
        (pb.ChatRequest(model=MODEL, messages=HI, tools=[pb.ChatTool(name="f", parameters_json="{")]), InvalidArgument, "tools"),
        (
            pb.ChatRequest(model=MODEL, messages=HI, tools=[pb.ChatTool(name="f", parameters_json=r'{"a": "\ud800"}')]),
            InvalidArgument,
            "parameters_json",
        ),
        (pb.ChatRequest(model=MODEL, messages=HI, tools=[pb.ChatTool(name="f")]), InvalidArgument, "'tools'"),
    ],
)
def test_what_http_refuses_is_refused_by_the_same_name(
    both: tuple[Any, Gateway], request_: pb.ChatRequest, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        list(both[1].chat(request_))


def test_a_cancelled_answer_ends_with_what_there_was(both: tuple[Any, Gateway], worker: Any, scripts: Any) -> None:
    _, gateway = both
    worker.script = scripts["endless"]
    pieces = []
    for piece in gateway.chat(pb.ChatRequest(model=MODEL, messages=HI, request_id="mine")):
        pieces.append(piece)
        if len(pieces) == 3:
            gateway.cancel("mine")
    assert pieces[-1].end == pb.ANSWER_END_ABORT
    assert pieces[-1].usage.completion_tokens >= 3
    assert worker.cancelled.wait(5)
    with pytest.raises(NotFound):
        gateway.cancel("mine")


def test_who_stops_reading_and_whose_time_is_over_stop_the_worker(both: tuple[Any, Gateway], worker: Any, scripts: Any) -> None:
    _, gateway = both
    worker.script = scripts["endless"]
    answer: Any = gateway.chat(chat())
    next(answer)
    answer.close()
    assert worker.cancelled.wait(5)
    worker.cancelled.clear()
    with pytest.raises(DeadlineExceeded):
        list(gateway.chat(chat(), timeout_seconds=2.5))
    assert worker.cancelled.wait(5)


def test_it_says_that_it_is_going_as_soon_as_http_does(worker: Any, scripts: Any, start_gateway: Callable[..., Any]) -> None:
    flags = ("--drain-seconds", "20", "--drain-grace-seconds", "15")
    served = start_gateway("--worker", worker.address, "--grpc-listen", "127.0.0.1:0", *flags)
    served.wait_ready()
    with Gateway(Endpoint(served.ready["grpc"])) as gateway:
        assert gateway.status().ready
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not served.is_ready(), "HTTP says so")
        status, by_http = gateway.status(), served.http.get("/ready").json()
        assert (status.ready, status.reason) == (False, by_http["reason"])
        assert "stopping" in status.reason
        assert text_of(list(gateway.chat(chat()))) == "Hé there"  # a late one is still served
    served.process.send_signal(signal.SIGTERM)  # a second one does not wait
    assert served.process.wait(10) is not None


async def test_the_async_face_says_the_same(both: tuple[Any, Gateway]) -> None:
    served, _ = both
    async with AsyncGateway(Endpoint(served.ready["grpc"])) as gateway:
        pieces = [piece async for piece in gateway.chat(chat())]
        assert text_of(pieces) == "Hé there"
        assert (await gateway.status()).ready
        assert (await gateway.models())[0].id == MODEL
        prompts = [pb.CompletionPrompt(text="x")]
        assert text_of([piece async for piece in gateway.complete(pb.CompleteRequest(model=MODEL, prompts=prompts))]) == "Hé there"
        assert (await gateway.embed(pb.GatewayServiceEmbedRequest(model=MODEL, inputs=prompts))).usage.prompt_tokens == 1
        with pytest.raises(NotFound):
            await gateway.cancel("nobody")


def test_the_same_keys_open_it(worker: Any, start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one-key-of-sixteen-letters engram=kjv\n")
    keys.chmod(0o600)
    served = start_gateway("--worker", worker.address, "--grpc-listen", "127.0.0.1:0", "--api-key-file", str(keys))
    served.wait_ready()
    with Fabric(gateway=served.ready["grpc"]) as fabric, pytest.raises(AccessDenied):
        fabric.gateway.models()
    with Fabric(gateway=served.ready["grpc"], key="one-key-of-sixteen-letters") as fabric:
        assert text_of(list(fabric.gateway.chat(chat()))) == "Hé there"
    assert worker.requests[-1].engram.model == "kjv"
    assert served.terminate() == 0


def test_the_limits_of_a_key_hold_for_both_doors_together(worker: Any, start_gateway: Callable[..., Any], tmp_path: Path) -> None:
    keys, key = tmp_path / "keys", "one-key-of-sixteen-letters"
    keys.write_text(f"{key} tokens_per_minute=200\n")
    keys.chmod(0o600)
    served = start_gateway("--worker", worker.address, "--grpc-listen", "127.0.0.1:0", "--api-key-file", str(keys))
    served.wait_ready()
    request = pb.GatewayServiceEmbedRequest(model=MODEL, inputs=[pb.CompletionPrompt(text="x" * 150)])
    with Gateway(Endpoint(served.ready["grpc"], key)) as gateway:
        assert gateway.embed(request).usage.prompt_tokens == 150
        body, shown = {"model": MODEL, "input": "x" * 150}, {"authorization": f"Bearer {key}"}
        assert served.http.post("/v1/embeddings", json=body, headers=shown).status_code == 429
        with pytest.raises(ResourceExhausted, match="tokens") as refused:
            gateway.embed(request)
    assert (refused.value.retry_after_seconds or 0) > 1
    assert served.figure("treadle_gateway_requests_total", route="rpc/Embed", outcome="limited") == 1
