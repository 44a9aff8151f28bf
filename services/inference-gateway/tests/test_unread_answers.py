"""Requests that are ended while their caller reads nothing: nobody waits for it, and it is told once it reads."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import gateway_pb2_grpc as pb_grpc

MODEL = "tiny-chat"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
KEY = "one-key-of-sixteen-letters"


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def flooded(worker: Any, start_gateway: Callable[..., Any], scripts: Any) -> Iterator[Callable[..., Any]]:
    """Starts a gateway by both doors, before a worker that sends more than the buffers on the way hold."""

    def start(*flags: str) -> tuple[Any, pb_grpc.GatewayServiceStub]:
        gateway = start_gateway("--worker", worker.address, "--grpc-listen", "127.0.0.1:0", *flags)
        gateway.http.headers["authorization"] = f"Bearer {KEY}"
        gateway.wait_ready()
        worker.script = scripts["flood"]
        channels.append(grpc.insecure_channel(gateway.ready["grpc"]))
        return gateway, pb_grpc.GatewayServiceStub(channels[-1])

    channels: list[grpc.Channel] = []
    yield start
    for channel in channels:
        channel.close()


def in_progress(gateway: Any) -> int:
    count: int = gateway.http.get("/v1/treadle/status").json()["gateway"]["in_progress"]
    return count


def wait_full(worker: Any) -> None:
    """Wait until the worker is held back: for half a second it could write nothing."""
    seen = [worker.written, time.monotonic()]

    def held_back() -> bool:
        if worker.written != seen[0]:
            seen[:] = [worker.written, time.monotonic()]
        return bool(seen[0]) and time.monotonic() - seen[1] > 0.5

    wait_until(held_back, "the buffers are full", 20)


def unread(gateway: Any, sends: bytes) -> socket.socket:
    """A connection that has asked, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    host, port = gateway.ready["listen"].split(":")
    connection.connect((host, int(port)))
    connection.sendall(sends)
    return connection


def streamed() -> bytes:
    body = json.dumps(BODY | {"stream": True})
    return f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def chat(request_id: str) -> pb.ChatRequest:
    return pb.ChatRequest(model=MODEL, request_id=request_id, messages=[pb.ChatMessage(role="user", content="hi")])


def test_a_call_whose_time_is_over_in_a_write_gets_its_status(flooded: Any, worker: Any) -> None:
    gateway, stub = flooded("--request-timeout-seconds", "3")
    call = stub.Chat(chat("late"), timeout=60)
    assert worker.cancelled.wait(10)
    wait_until(lambda: in_progress(gateway) == 0, "the request is over")
    begun = time.monotonic()
    assert next(call).piece.text_delta
    with pytest.raises(grpc.RpcError):
        list(call)
    assert time.monotonic() - begun < 30  # not by the deadline of its own
    assert (call.code(), call.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, "not complete within 3 seconds")


def test_a_call_that_is_cancelled_in_a_write_ends_with_what_there_was(flooded: Any, worker: Any) -> None:
    gateway, stub = flooded()
    call = stub.Chat(chat("mine"), timeout=60)
    next(call)
    wait_full(worker)
    stub.Cancel(pb.CancelRequest(request_id="mine"), timeout=5)
    assert worker.cancelled.wait(5)
    pieces = [response.piece for response in call]
    assert pieces[-1].end == pb.ANSWER_END_ABORT
    assert pieces[-1].usage.completion_tokens == 1 + len(pieces) - 1
    assert gateway.figure("treadle_gateway_requests_total", route="rpc/Chat", outcome="cancelled") == 1


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_cancelled_answer_that_nobody_reads_does_not_hold_the_place_of_its_key(
    flooded: Any, worker: Any, scripts: Any, tmp_path: Path, door: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} calls_max=1\n")
    keys.chmod(0o600)
    gateway, stub = flooded("--api-key-file", str(keys))
    with socket.create_connection(tuple(gateway.ready["listen"].split(":")), timeout=10) as connection:
        shown = (("authorization", f"Bearer {KEY}"),)
        if door == "grpc":
            call = stub.Chat(chat("mine"), timeout=60, metadata=shown)
        else:
            body = json.dumps(BODY | {"stream": True})
            head = f"x-request-id: mine\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{head}{body}".encode())
        wait_until(lambda: in_progress(gateway) == 1 and len(worker.requests) == 1, "the answer is on its way")
        wait_full(worker)
        assert gateway.chat().status_code == 429
        assert gateway.http.post("/v1/requests/mine/cancel").status_code == 200
        worker.script = scripts["hello"]
        wait_until(lambda: gateway.chat().status_code == 200, "the place is free again", 12)
        if door == "grpc":
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.CANCELLED


LOOKS = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 90


def is_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it; nothing is read."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


@pytest.mark.parametrize("sends", [LOOKS, streamed()], ids=["looks", "stream"])
def test_connections_whose_clients_do_not_read_are_ended(flooded: Any, sends: bytes) -> None:
    gateway, _ = flooded("--idle-seconds", "1", "--request-timeout-seconds", "3")
    silent = [unread(gateway, sends) for _ in range(3)]
    try:
        wait_until(lambda: all(map(is_ended, silent)), "they are ended", 30)
        assert gateway.figure("treadle_gateway_unread_connections_total") == 3
    finally:
        for connection in silent:
            connection.close()


def test_a_client_that_reads_slowly_keeps_its_connection(flooded: Any, worker: Any) -> None:
    gateway, _ = flooded("--idle-seconds", "4")
    with unread(gateway, streamed()) as connection:
        end = time.monotonic() + 9  # two looks
        while time.monotonic() < end:
            assert connection.recv(65536)
            time.sleep(0.1)
        assert gateway.figure("treadle_gateway_unread_connections_total") == 0
        assert in_progress(gateway) == 1
