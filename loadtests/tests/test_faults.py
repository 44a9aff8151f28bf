"""A few cells of the fault matrix with real processes, and how the end of a chat is read."""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from treadle.dataplane import IMPLEMENTATION
from treadle_loadtests.chats import DEGRADED, ERROR, HUNG, UNCLEAR, WHOLE, Chat
from treadle_loadtests.faults import ALL_CELLS, QUICK_CELLS

LEFT = "treadle-loadtest-*"
RUN = "import json;from treadle_loadtests.faults import *;print(json.dumps(run(Plan(cells=QUICK_CELLS)).document()))"
REPORT = {"kind": "engram", "rows_missing": 4, "missing_because": "late"}


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the socket transport needs the native data plane: build libs/dataplane")
def test_every_chat_ends_whatever_is_dead_or_frozen() -> None:
    before = set(Path("/dev/shm").glob(LEFT))
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    missed = [goal for goal in document["goals"] if not goal["met"]]
    assert not missed, document
    assert document["counts"]["socket worker frozen decode: error worker_stalled"] >= 1
    assert set(Path("/dev/shm").glob(LEFT)) <= before  # nothing is left behind


def test_the_quick_cells_are_some_of_all() -> None:
    assert len(set(ALL_CELLS)) == 24
    assert set(QUICK_CELLS) < set(ALL_CELLS)


@contextmanager
def answering(*parts: bytes, then_wait: bool = False) -> Iterator[str]:
    """A door that answers anything with these bytes, and closes unless it is to wait."""
    over = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            for part in parts:
                self.wfile.write(part)
            if then_wait:
                over.wait(10)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def whole(answer: dict[str, Any], status: int = 200) -> bytes:
    body = json.dumps(answer).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def events(*answers: dict[str, Any], done: bool = True) -> bytes:
    body = b"".join(b"data: " + json.dumps(answer).encode() + b"\n\n" for answer in answers)
    return b"HTTP/1.1 200 X\r\nconnection: close\r\n\r\n" + body + (b"data: [DONE]\n\n" if done else b"")


def held(address: str, *, stream: bool, deadline_seconds: float = 5.0, late_seconds: float = 2.0) -> Chat:
    chat = Chat(address, {"stream": stream}, deadline_seconds, late_seconds)
    chat.start()
    chat.join()
    return chat


PIECE = {"choices": [{"delta": {"content": "a"}}]}
GOOD, BAD = {"treadle": {"degraded": False, "memory": []}}, {"treadle": {"degraded": True, "memory": [REPORT]}}
WRONG = {"error": {"code": "worker_stalled"}}


@pytest.mark.parametrize(
    ("answer", "stream", "outcome", "detail"),
    [
        (whole(GOOD), False, WHOLE, ""),
        (whole(BAD), False, DEGRADED, "late"),
        (whole(WRONG, 504), False, ERROR, "worker_stalled"),
        (whole({"error": {"code": None}}, 500), False, UNCLEAR, ""),
        (whole(GOOD)[:-3], False, UNCLEAR, "IncompleteRead"),
        (events(PIECE, GOOD), True, WHOLE, ""),
        (events(PIECE, BAD), True, DEGRADED, "late"),
        (events(PIECE, WRONG), True, ERROR, "worker_stalled"),
        (events(PIECE, GOOD, done=False), True, UNCLEAR, ""),
        (events(PIECE), True, UNCLEAR, ""),
        (b"", True, UNCLEAR, "RemoteDisconnected"),
    ],
)
def test_the_end_of_a_chat_is_read_as_what_it_is(answer: bytes, stream: bool, outcome: str, detail: str) -> None:
    with answering(answer) as address:
        chat = held(address, stream=stream)
    assert chat.outcome == outcome, chat
    assert detail in chat.code + chat.because
    assert chat.pieces == (stream and answer != b"")


def test_a_chat_that_does_not_end_is_hung() -> None:
    with answering(events(PIECE, done=False), then_wait=True) as address:
        chat = held(address, stream=True, deadline_seconds=0.3, late_seconds=0.1)
    assert (chat.outcome, chat.pieces) == (HUNG, 1)
