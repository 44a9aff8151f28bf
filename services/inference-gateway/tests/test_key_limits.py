"""What one key may ask for: requests and tokens a minute, and requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from inference_gateway.adapters.metrics import PrometheusFigures
from inference_gateway.domain.api_keys import Caller
from inference_gateway.domain.errors import RateLimited, WorkerLost, WorkerStalled
from inference_gateway.domain.limits import Allowance, Bucket, KeyUse
from inference_gateway.domain.tally import prompt_charged
from inference_gateway.metered_routes import duration
from treadle.client import Endpoint
from treadle.client.gateway import Gateway
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from treadle.inference.v1 import gateway_pb2

MODEL = "tiny-chat"


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def use_of(clock: Clock, **allowed: int) -> KeyUse:
    return KeyUse(Allowance(**allowed), clock)


def test_a_minutes_worth_may_come_at_once_and_then_flows_back_evenly() -> None:
    clock = Clock()
    use = use_of(clock, requests_per_minute=3)
    for _ in range(3):
        use.begin()
    with pytest.raises(RateLimited, match="3 requests a minute") as refused:
        use.begin()
    assert refused.value.retry_after_seconds == pytest.approx(20)
    clock.seconds += 19.9
    with pytest.raises(RateLimited):
        use.begin()
    clock.seconds += 0.2
    use.begin()


def test_a_refused_request_takes_nothing() -> None:
    clock = Clock()
    use = use_of(clock, requests_per_minute=1, calls_max=1)
    use.begin()
    for _ in range(5):
        with pytest.raises(RateLimited):
            use.begin()
    clock.seconds += 60
    with pytest.raises(RateLimited, match="1 requests at once") as refused:
        use.begin()
    assert refused.value.limit == "calls"
    use.end()
    use.begin()


def test_tokens_that_came_are_paid_back_before_the_next_prompt() -> None:
    clock = Clock()
    use = use_of(clock, tokens_per_minute=600)
    use.charge_prompt(100)
    use.charge(800)  # nobody knew how many would come
    assert use.standings()[0].remaining == 0
    with pytest.raises(RateLimited) as refused:
        use.charge_prompt(50)
    assert refused.value.limit == "tokens"
    assert refused.value.retry_after_seconds == pytest.approx(35)  # 300 of debt and 50, ten a second
    clock.seconds += 35
    use.charge_prompt(50)


def test_a_prompt_above_a_minutes_worth_waits_for_a_full_minute_and_is_charged_whole() -> None:
    clock = Clock()
    use = use_of(clock, tokens_per_minute=100)
    use.charge_prompt(250)
    with pytest.raises(RateLimited) as refused:
        use.charge_prompt(250)
    assert refused.value.retry_after_seconds == pytest.approx(150)
    clock.seconds += 150
    use.charge_prompt(250)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), max_size=60), st.integers(1, 1000))
def test_no_more_than_the_rate_and_one_minutes_worth_is_ever_admitted(asked: list[tuple[float, int]], per_minute: int) -> None:
    clock = Clock()
    bucket, admitted, largest = Bucket(per_minute, clock), 0, 0
    for pause, amount in asked:
        clock.seconds += pause
        if bucket.wait_seconds(amount) == 0:
            bucket.take(amount)
            admitted, largest = admitted + amount, max(largest, amount)
    flowed = (clock.seconds - 1000.0) / 60 * per_minute
    assert admitted <= flowed + per_minute + max(0, largest - per_minute) + 1e-6


@settings(deadline=None)
@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 2000))
def test_a_limit_that_changes_forgets_nothing_that_was_used(before: int, after: int, used: int) -> None:
    clock = Clock()
    use = use_of(clock, tokens_per_minute=before)
    use.charge(used)
    use.allow(Allowance(tokens_per_minute=after))
    assert use.standings()[0].remaining == max(0, after - used)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0ms"), (0.2501, "251ms"), (1, "1s"), (6.5, "6.5s"), (60, "1m0s"), (61.25, "1m1.25s")]
)
def test_a_reset_is_told_as_openai_tells_it(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.fixture
def limited(start_gateway: Any, session_worker: Any, worker: Any, tmp_path: Path) -> Callable[..., Any]:
    def start(options: str, *flags: str) -> Any:
        keys = tmp_path / "keys"
        keys.touch(0o600)
        keys.write_text(f"first-key tenant=first {options}\nother-key\n")
        gateway = start_gateway("--worker", session_worker.address, "--api-key-file", str(keys), *flags)
        gateway.http.headers["authorization"] = "Bearer first-key"
        gateway.wait_ready()
        return gateway

    return start


def test_the_request_beyond_its_minute_is_refused_with_the_time_to_come_again(limited: Any) -> None:
    gateway = limited("requests_per_minute=2")
    first = gateway.chat()
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert 10 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert gateway.http.get("/v1/models").status_code == 200  # looking is free
    assert gateway.chat().status_code == 200
    refused = gateway.chat()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    gateway.http.headers["authorization"] = "Bearer other-key"
    assert gateway.chat().status_code == 200  # its minute is its own
    assert gateway.figure("treadle_gateway_limited_total", limit="requests", tenant="first") == 1
    assert gateway.figure("treadle_gateway_requests_total", route="/v1/chat/completions", outcome="limited") == 1


def flowed_back(begun: float) -> int:
    """Tokens of 600 a minute that may have flowed back since then, at most."""
    return math.ceil((time.monotonic() - begun) * 600 / 60)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_charged_as_they_were_used(limited: Any, worker: Any, stream: bool) -> None:
    gateway = limited("tokens_per_minute=600")
    begun = time.monotonic()
    answer = gateway.chat(stream=stream, max_tokens=5)
    assert answer.headers["x-ratelimit-limit-tokens"] == "600"
    prompt = len(worker.requests[-1].prompt_token_ids)
    used = prompt + (1 if stream else 5)  # the head of a stream leaves with its first token
    assert 600 - used <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 600 - used + flowed_back(begun)
    assert gateway.figure("treadle_gateway_tenant_tokens_total", tenant="first", kind="prompt") == prompt
    assert gateway.figure("treadle_gateway_tenant_tokens_total", tenant="first", kind="completion") == 5


def test_a_key_without_tokens_left_is_refused_before_its_stream_begins(limited: Any, worker: Any) -> None:
    gateway = limited("tokens_per_minute=30")
    assert gateway.chat(max_tokens=5).status_code == 200
    asked = len(worker.requests)
    refused = gateway.chat(stream=True)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert len(worker.requests) == asked
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="first-key", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    client.close()


def test_a_prompt_that_the_worker_refused_is_given_back(limited: Any, worker: Any, scripts: Any) -> None:
    import grpc

    gateway = limited("tokens_per_minute=100000")
    worker.script = scripts["refuse_with"](grpc.StatusCode.INVALID_ARGUMENT)
    refused = gateway.chat()
    assert refused.status_code == 400
    assert refused.headers["x-ratelimit-remaining-tokens"] == "100000"


def test_a_prompt_whose_caller_does_not_wait_for_its_answer_is_charged(limited: Any, worker: Any, scripts: Any) -> None:
    gateway = limited("tokens_per_minute=200")
    worker.script = scripts["wait_first"](30)
    body = {"model": MODEL, "prompt": "x" * 100}
    leave_once(lambda: len(worker.requests) == 1, gateway, body)
    assert gateway.http.post("/v1/completions", json=body, headers={"x-request-timeout": "2.5"}).status_code == 504
    asked = len(worker.requests)
    assert asked == 2
    refused = gateway.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(worker.requests) == asked
    assert gateway.figure("treadle_gateway_tenant_tokens_total", tenant="first", kind="prompt") == 200


def leave_once(holds: Callable[[], bool], gateway: Any, body: dict[str, Any]) -> None:
    """Ask for a completion, and leave without its answer once something holds."""
    host, port = gateway.ready["listen"].split(":")
    text = json.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer first-key\r\ncontent-length: {len(text)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall((head + text).encode())
        end = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < end, "nobody is asked"
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("ended_by", "left"),
    [
        (None, 40),
        (asyncio.CancelledError(), 40),
        (DeadlineExceeded("late"), 40),
        (WorkerStalled("silent"), 40),
        (InvalidArgument("refused"), 100),
        (ResourceExhausted("busy"), 100),
        (WorkerLost("gone"), 100),
    ],
)
def test_prompts_are_given_back_where_nobody_computed_them(ended_by: Any, left: int) -> None:
    use = use_of(Clock(), tokens_per_minute=100)
    figures = PrometheusFigures(CollectorRegistry())
    with contextlib.suppress(type(ended_by)), prompt_charged(Caller("tenant", use=use), figures, 60):
        if ended_by is not None:
            raise ended_by
    assert use.standings()[0].remaining == left


@pytest.mark.parametrize("more", [{"prompt": "x" * 150, "n": 2}, {"prompt": ["x" * 80, "y" * 80]}])
def test_prompts_above_a_minutes_worth_are_paid_together_by_a_full_minute(limited: Any, worker: Any, more: dict[str, Any]) -> None:
    gateway = limited("tokens_per_minute=100")
    body = {"model": MODEL, "max_tokens": 1} | more
    assert gateway.http.post("/v1/completions", json=body).status_code == 200
    assert len(worker.requests) == 2
    refused = gateway.http.post("/v1/completions", json=body)
    assert refused.status_code == 429
    assert 85 <= int(refused.headers["retry-after"]) <= 100  # 50 or 60 of debt and 2, and the whole minute's worth
    assert len(worker.requests) == 2


def test_a_key_has_so_many_requests_at_once(limited: Any, worker: Any, scripts: Any) -> None:
    gateway = limited("calls_max=1")
    release = threading.Event()

    async def wait_for_the_test(request: Any, context: Any) -> Any:
        async for response in scripts["hello"](request, context):
            yield response
            await asyncio.to_thread(release.wait, 10)

    worker.script = wait_for_the_test
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with gateway.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        with httpx.Client(base_url=gateway.url, timeout=20, trust_env=False) as second:
            refused = second.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer first-key"})
            assert refused.status_code == 429
            assert "at once" in refused.json()["error"]["message"]
            release.set()
            with second.stream("POST", "/v1/chat/completions", json=body, headers={"authorization": "Bearer other-key"}) as other:
                assert other.status_code == 200
        assert list(lines)[-2] == "data: [DONE]"
    end = time.monotonic() + 10
    while gateway.chat().status_code != 200:
        assert time.monotonic() < end, "the place is free again"


def test_several_choices_pay_their_prompt_once_and_all_their_tokens(limited: Any, worker: Any) -> None:
    gateway = limited("tokens_per_minute=600")
    begun = time.monotonic()
    answer = gateway.chat(n=3, max_tokens=4)
    assert answer.status_code == 200
    used = len(worker.requests[-1].prompt_token_ids) + 3 * 4
    assert 600 - used <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 600 - used + flowed_back(begun)


def test_vectors_pay_for_their_inputs(limited: Any) -> None:
    gateway = limited("tokens_per_minute=600 requests_per_minute=2")
    body = {"model": MODEL, "input": ["one", "three"]}
    begun = time.monotonic()
    answer = gateway.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200
    assert 592 <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 592 + flowed_back(begun)
    assert gateway.figure("treadle_gateway_tenant_tokens_total", tenant="first", kind="prompt") == 8
    assert gateway.http.post("/v1/embeddings", json=body).status_code == 200
    assert gateway.http.post("/v1/embeddings", json=body).status_code == 429


def test_the_limits_of_a_key_are_the_same_by_grpc(limited: Any) -> None:
    gateway = limited("requests_per_minute=2", "--grpc-listen", "127.0.0.1:0")
    request = gateway_pb2.ChatRequest(model=MODEL, messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
    with Gateway(Endpoint(gateway.ready["grpc"], "first-key")) as typed:
        assert list(typed.chat(request))
        assert gateway.chat().status_code == 200
        with pytest.raises(ResourceExhausted, match="2 requests a minute") as refused:
            list(typed.chat(request))
        assert 1 < (refused.value.retry_after_seconds or 0) <= 30
        inputs = [gateway_pb2.CompletionPrompt(text="x")]
        with pytest.raises(ResourceExhausted):
            typed.embed(gateway_pb2.GatewayServiceEmbedRequest(model=MODEL, inputs=inputs))
    assert gateway.figure("treadle_gateway_limited_total", limit="requests", tenant="first") == 2
