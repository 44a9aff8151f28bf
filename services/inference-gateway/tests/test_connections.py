"""What connections may do with HTTP/1: versions, hosts, trailers, several requests at once, and heads that trickle in."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

BODY = {"model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}]}


def connected(gateway: Any) -> socket.socket:
    host, port = gateway.ready["listen"].split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def until_closed(connection: socket.socket) -> bytes:
    answer = b""
    while data := connection.recv(65536):
        answer += data
    return answer


def chat(version: bytes, *lines: bytes, stream: bool = True) -> bytes:
    body = json.dumps(BODY | {"stream": stream}).encode()
    head = [b"POST /v1/chat/completions HTTP/" + version, b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@pytest.mark.parametrize("lines", [(), (b"host: 127.0.0.1",), (b"host: 127.0.0.1", b"connection: keep-alive")])
@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_gets_no_chunks_and_the_end_is_the_end_of_the_connection(gateway: Any, lines: Any, stream: bool) -> None:
    with connected(gateway) as connection:
        connection.sendall(chat(b"1.0", *(lines or (b"host: 127.0.0.1",)), stream=stream))
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "Hé there"


@pytest.mark.parametrize("lines", [(), (b"host: 127.0.0.1", b"host: localhost"), (b"host : 127.0.0.1",)])
def test_http_1_1_names_its_host_once(gateway: Any, lines: Any) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"\r\n".join([b"GET /health HTTP/1.1", *lines]) + b"\r\n\r\n")
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b'"error"' in answer


def test_a_length_beside_chunks_is_refused_or_not_heeded(gateway: Any) -> None:
    with connected(gateway) as connection:
        lines = [
            b"POST /v1/completions HTTP/1.1",
            b"host: 127.0.0.1",
            b"content-length: 3",
            b"transfer-encoding: chunked",
            b"connection: close",
        ]
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 400")


def test_requests_that_come_together_are_answered_in_their_order(gateway: Any) -> None:
    looks = [b"GET %s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % path for path in (b"/health", b"/version")]
    last = b"GET /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    with connected(gateway) as connection:
        connection.sendall(b"".join([looks[0], chat(b"1.1", b"host: 127.0.0.1"), looks[1], last]))
        answer = until_closed(connection)
    places = [answer.index(part) for part in (b'{"status":"ok"}', b"data: [DONE]", b'"proto_version"', b"HTTP/1.1 404")]
    assert places == sorted(places)


def test_trailers_of_a_body_are_passed_over(gateway: Any) -> None:
    body = json.dumps(BODY).encode()
    trailers = b"".join(
        b"x-%d: %s\r\n" % (number, b"a" * 100) for number in range(200)
    )  # more than a head may have, and less than is kept of what is not whole
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    with connected(gateway) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailers + b"\r\n")
        assert until_closed(connection).startswith(b"HTTP/1.1 200")


def test_an_upgrade_that_nobody_offers_is_no_reason_to_lose_the_body(gateway: Any) -> None:
    asks = (
        b"host: 127.0.0.1",
        b"connection: upgrade, http2-settings",
        b"upgrade: h2c",
        b"http2-settings: AAMAAABkAAQBAAAAAAIAAAAA",
    )
    with connected(gateway) as connection:
        connection.sendall(chat(b"1.1", *asks, stream=False))
        answer = b""
        while b'"finish_reason"' not in answer and (data := connection.recv(65536)):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200"), answer
