"""Heads that are too large, depths that are too deep, and words that no log may hold."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
from typing import Any

import pytest
from starlette.testclient import TestClient

from inference_gateway.domain.api_keys import ApiKeys
from inference_gateway.frame import Frame
from inference_gateway.request_head import HeadLimits
from treadle.chassis.bug_report import bug_report

CANARY = "canary-7f3a91"


def answered(gateway: Any, head: bytes) -> bytes:
    host, port = gateway.ready["listen"].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):  # it may have answered and closed already
            connection.sendall(head)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while not whole(answer) and (data := connection.recv(65536)):
                answer += data
        return answer


def whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(end) and length is not None and len(body) >= int(length[1])


def head_of(*lines: bytes, target: bytes = b"/health") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize(
    "head",
    [
        head_of(*(b"X-%d: 1" % number for number in range(120))),
        head_of(b"X: " + b"a" * 20_000),
        head_of(b"X: " + b"a" * 60_000),
        head_of(b"X: " + b"a" * 2_000_000),
        head_of(target=b"/health?" + b"a" * 20_000),
    ],
)
def test_a_head_that_is_too_large_is_refused_with_431(gateway: Any, head: bytes) -> None:
    answer = answered(gateway, head)
    assert answer.startswith(b"HTTP/1.1 431"), answer[:200]
    assert b"headers_too_large" in answer
    assert gateway.http.get("/health").status_code == 200


def test_a_head_within_the_limits_is_taken(gateway: Any) -> None:
    assert answered(gateway, head_of(*(b"X-%d: 1" % number for number in range(90)))).startswith(b"HTTP/1.1 200")
    assert answered(gateway, head_of(b"X: " + b"a" * 15_000)).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_gets_an_error_object(gateway: Any) -> None:
    answer = answered(gateway, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer


@pytest.mark.parametrize("opening", [b'{"a":', b"["])
def test_json_that_is_too_deep_is_refused(gateway: Any, opening: bytes) -> None:
    body = b'{"model": "tiny-chat", "messages": [], "extra": ' + opening * 3000 + b"1"
    refused = gateway.http.post("/v1/chat/completions", content=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"


class NoFigures:
    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


def test_a_bug_is_logged_by_class_and_place_and_none_of_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def stumble(scope: Any, receive: Any, send: Any) -> None:
        try:
            int(CANARY)
        except ValueError as error:
            raise KeyError(f"in {CANARY}") from error

    caplog.set_level(logging.DEBUG)
    app = Frame(stumble, ApiKeys(None), NoFigures(), HeadLimits())
    answer = TestClient(app, base_url="http://127.0.0.1").post("/v1/chat/completions", content=CANARY)
    assert answer.status_code == 500
    assert CANARY not in answer.text
    (line,) = [record for record in caplog.records if record.name == "treadle.gateway.http"]
    assert "KeyError at " in vars(line)["bug"]
    assert "ValueError at " in vars(line)["bug"]
    assert "test_request_heads.py" in vars(line)["bug"]
    shown = "".join(str(vars(record)) + logging.Formatter().format(record) for record in caplog.records)
    assert CANARY not in shown


def test_a_bug_without_a_traceback_or_in_a_ring_is_reported_too() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert bug_report(first) == "ValueError at nowhere <- ValueError at nowhere"
