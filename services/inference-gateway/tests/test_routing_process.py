"""A gateway before several workers: who answers, who is left out, and what it says of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from treadle.client import Endpoint
from treadle.client.gateway import Gateway as GatewayClient
from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import worker_pb2

HI = [{"role": "user", "content": "hi"}]


def both(worker: Any, other_worker: Any) -> str:
    other_worker.start()
    return f"a={worker.address},b={other_worker.address}"


def state_of(gateway: Any, name: str) -> dict[str, Any]:
    workers: list[dict[str, Any]] = gateway.http.get("/ready").json()["workers"]
    return next(worker for worker in workers if worker["name"] == name)


def wait_state(gateway: Any, name: str, state: str) -> None:
    end = time.monotonic() + 15
    while state_of(gateway, name)["state"] != state:
        assert time.monotonic() < end, f"{name} is {state_of(gateway, name)}, not {state}"
        time.sleep(0.02)


def wait_figure(gateway: Any, name: str, value: float, **labels: str) -> None:
    end = time.monotonic() + 15
    while (found := gateway.figure(name, **labels)) != value:
        assert time.monotonic() < end, f"{name}{labels} is {found}, not {value}"
        time.sleep(0.02)


def test_answers_name_their_worker_whole_and_as_a_stream(start_gateway: Callable[..., Any], worker: Any, other_worker: Any) -> None:
    gateway = start_gateway("--worker", both(worker, other_worker), "--routing", "least-loaded")
    for name in "ab":
        wait_state(gateway, name, "ready")
    seen = {gateway.chat().headers["x-treadle-worker"] for _ in range(2)}
    assert seen == {"a", "b"}
    with gateway.http.stream("POST", "/v1/chat/completions", json={"model": "tiny-chat", "messages": HI, "stream": True}) as answer:
        assert answer.headers["x-treadle-worker"] in "ab"
        answer.read()
    assert "x-treadle-worker" not in gateway.http.get("/v1/models").headers
    assert gateway.figure("treadle_gateway_routed_total", by="load") == 3
    assert (len(worker.requests), len(other_worker.requests)) in {(2, 1), (1, 2)}


def test_a_prompt_goes_to_the_worker_that_says_it_holds_it(
    start_gateway: Callable[..., Any], worker: Any, other_worker: Any
) -> None:
    prompt = list(range(100))
    stored = [
        worker_pb2.CachedBlock(name=b"%d" % end, parent=b"%d" % (end - 16) if end > 16 else b"", token_ids=prompt[end - 16 : end])
        for end in range(16, 96, 16)
    ]
    for each, blocks in ((worker, stored[:2]), (other_worker, stored)):
        each.status |= {"block_tokens": 16, "engram_models": [], "engram_model": ""}
        each.blocks = blocks
    gateway = start_gateway("--worker", both(worker, other_worker))
    wait_figure(gateway, "treadle_gateway_index_blocks", 2, worker="a")
    wait_figure(gateway, "treadle_gateway_index_blocks", 5, worker="b")
    body = {"model": "tiny-chat", "prompt": prompt}
    seen = [gateway.http.post("/v1/completions", json=body).headers["x-treadle-worker"] for _ in range(4)]
    assert seen == ["b"] * 4
    assert gateway.figure("treadle_gateway_routed_total", by="hit") == 4
    assert gateway.figure("treadle_gateway_routed_prompt_tokens_total", kind="possible") == 4 * 80
    other_worker.stop()  # what it held is gone at once
    wait_figure(gateway, "treadle_gateway_index_blocks", 0, worker="b")
    assert gateway.http.post("/v1/completions", json=body).headers["x-treadle-worker"] == "a"
    assert gateway.figure("treadle_gateway_routed_prompt_tokens_total", kind="cached") == 4 * 80 + 32
    other_worker.start()
    wait_figure(gateway, "treadle_gateway_index_blocks", 5, worker="b")


def test_a_session_meets_its_worker_by_header_or_field_until_that_worker_leaves(
    start_gateway: Callable[..., Any], worker: Any, other_worker: Any
) -> None:
    gateway = start_gateway("--worker", both(worker, other_worker), "--routing", "session")
    for name in "ab":
        wait_state(gateway, name, "ready")

    def asked(session: str, **fields: Any) -> str:
        headers = {"x-session-id": session} if session else {}
        body = {"model": "tiny-chat", "messages": HI, **fields}
        return str(gateway.http.post("/v1/chat/completions", json=body, headers=headers).headers["x-treadle-worker"])

    homes = {f"s{number}": asked(f"s{number}") for number in range(16)}
    assert set(homes.values()) == {"a", "b"}
    for session, home in homes.items():
        assert home == asked(session) == asked("", prompt_cache_key=session) == asked("", user=session)
        assert home == asked(session, user="somebody else", prompt_cache_key="something else")
    assert gateway.figure("treadle_gateway_routed_total", by="affinity") == 16 * 5
    other_worker.status = {**other_worker.status, "draining": True}
    wait_state(gateway, "b", "draining")
    assert {asked(session) for session in homes} == {"a"}


def test_a_session_is_the_same_by_both_doors(start_gateway: Callable[..., Any], worker: Any, other_worker: Any) -> None:
    gateway = start_gateway("--worker", both(worker, other_worker), "--routing", "session", "--grpc-listen", "127.0.0.1:0")
    for name in "ab":
        wait_state(gateway, name, "ready")
    sessions = [f"s{number}" for number in range(8)]

    def homes() -> list[str]:
        seen = [(request.request_id, name) for name, each in (("a", worker), ("b", other_worker)) for request in each.requests]
        worker.requests.clear()
        other_worker.requests.clear()
        return [name for _, name in sorted(seen)]

    with GatewayClient(Endpoint(gateway.ready["grpc"])) as client:
        for session in sessions:
            options = pb.GenerationOptions(session=session)
            hi = [pb.ChatMessage(role="user", content="hi")]
            list(client.chat(pb.ChatRequest(model="tiny-chat", request_id=session, messages=hi, options=options)))
    by_grpc = homes()
    for session in sessions:
        gateway.http.post(
            "/v1/chat/completions",
            json={"model": "tiny-chat", "messages": HI},
            headers={"x-session-id": session, "x-request-id": session},
        )
    assert by_grpc == homes()
    assert set(by_grpc) == {"a", "b"}
    assert gateway.figure("treadle_gateway_routed_total", by="affinity") == 16


def test_a_worker_that_differs_is_left_out_and_ready_names_the_field(
    start_gateway: Callable[..., Any], worker: Any, other_worker: Any
) -> None:
    other_worker.status["context_tokens_max"] = 100
    gateway = start_gateway("--worker", both(worker, other_worker))
    wait_state(gateway, "a", "ready")
    wait_state(gateway, "b", "differs")
    assert "another context_tokens_max" in state_of(gateway, "b")["reason"]
    assert "left out" in gateway.log
    assert {gateway.chat().headers["x-treadle-worker"] for _ in range(4)} == {"a"}
    assert gateway.figure("treadle_gateway_worker_state", state="differs", worker="b") == 1


def test_two_models_are_listed_and_each_is_answered_by_its_own_worker(
    start_gateway: Callable[..., Any], worker: Any, other_worker: Any
) -> None:
    other_worker.status["model"] = "second"
    gateway = start_gateway("--worker", both(worker, other_worker))
    for name in "ab":
        wait_state(gateway, name, "ready")
    names = [entry["id"] for entry in gateway.http.get("/v1/models").json()["data"]]
    assert {"tiny-chat", "second", "second+kjv"} <= set(names)
    assert gateway.http.get("/v1/models/second+kjv").json()["id"] == "second+kjv"
    for model, name in (("tiny-chat", "a"), ("second+kjv", "b")):
        answer = gateway.http.post("/v1/chat/completions", json={"model": model, "messages": HI})
        assert (answer.headers["x-treadle-worker"], answer.json()["model"]) == (name, model)
    unknown = gateway.http.post("/v1/chat/completions", json={"model": "third", "messages": HI})
    assert unknown.status_code == 404
    assert "'second', 'tiny-chat' are" in unknown.json()["error"]["message"]
    other_worker.stop()
    wait_state(gateway, "b", "away")
    assert gateway.http.post("/v1/chat/completions", json={"model": "second", "messages": HI}).status_code == 503
    assert gateway.chat().status_code == 200
