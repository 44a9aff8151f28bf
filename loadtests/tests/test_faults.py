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
from treadle_loadtests.fault_cells import ALL_CELLS, QUICK_CELLS, STORE, Cell
from treadle_loadtests.fault_goals import INSISTING, OPEN_PREFIX, Ended
from treadle_loadtests.report import Report

LEFT = "treadle-loadtest-*"
RUN = """
import json, sys
from treadle_loadtests.fault_cells import QUICK_CELLS
from treadle_loadtests.faults import Plan, run
cells = tuple(cell for cell in QUICK_CELLS if cell.transport == sys.argv[1])
print(json.dumps(run(Plan(cells, **json.loads(sys.argv[2]))).document()))
"""
REPORT = {"kind": "engram", "rows_missing": 4, "missing_because": "late"}


def played(transport: str, **plan: float) -> dict[str, Any]:
    """The report of the quick cells of one transport, all goals met and nothing left behind. plan: of its fields by name."""
    before = set(Path("/dev/shm").glob(LEFT))
    argv = [sys.executable, "-c", RUN, transport, json.dumps(plan)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    missed = [goal for goal in document["goals"] if not goal["met"]]
    assert not missed, done.stdout
    assert set(Path("/dev/shm").glob(LEFT)) <= before
    return document


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the socket transport needs the native data plane: build libs/dataplane")
def test_every_chat_ends_whatever_is_dead_or_frozen() -> None:
    assert played("socket")["counts"]["socket worker frozen decode: error worker_stalled"] >= 1


def test_chats_behind_a_prefix_end_as_their_policy_says_while_the_store_is_dead_or_frozen() -> None:
    counts = played("mapped", tokens=60, prompt_characters=600, deadline_seconds=120.0, silence_seconds=30.0)["counts"]
    frozen = {end.removeprefix("mapped store frozen decode: "): count for end, count in counts.items() if "frozen" in end}
    assert frozen == {
        "whole": 3, "behind an open prefix, whole": 3, "behind a new prefix or none, degraded unavailable": 1,
        "behind a new prefix or not at all, error unavailable": 1,
    }  # fmt: skip


def ended(outcome: str, treadle: dict[str, Any], code: str = "", because: str = "", seconds: float = 1.0) -> Chat:
    return Chat("", {"treadle": treadle}, 40.0, outcome=outcome, code=code, because=because, seconds=seconds)


@pytest.mark.parametrize(
    ("chats", "missed"),
    [
        ([ended(WHOLE, {}), ended(WHOLE, {"prefix": OPEN_PREFIX})], []),
        ([ended(DEGRADED, {"prefix": OPEN_PREFIX}, because="unavailable")], ["chats that a struck store changed"]),
        ([ended(ERROR, {}, "unavailable")], ["chats that a struck store changed"]),
        ([ended(DEGRADED, {"prefix": "frozen-decode"}, because="unavailable")], []),
        ([ended(DEGRADED, {"prefix": "frozen-decode"}, because="off_task")], ["chats behind a new prefix"]),
        ([ended(ERROR, {"prefix": "frozen-decode"}, "unavailable")], ["chats behind a new prefix"]),
        ([ended(ERROR, {"prefix": "frozen-decode", "policy": INSISTING}, "unavailable")], []),
        ([ended(ERROR, {"prefix": "frozen-decode", "policy": INSISTING}, "unavailable", seconds=5.5)], ["seconds until a chat"]),
        ([ended(ERROR, {"prefix": "frozen-decode", "policy": INSISTING}, "timeout")], ["chats behind a new prefix"]),
        ([ended(WHOLE, {"prefix": "frozen-decode"})], ["of these, of a frozen store"]),
    ],
)
def test_the_ends_that_a_struck_store_may_cause_are_told_from_those_it_may_not(chats: list[Chat], missed: list[str]) -> None:
    report = Report("faults", {})
    Ended({Cell("mapped", STORE, "frozen", "decode"): chats}).judge(report, 1, told_seconds_max=5.0)
    found = [goal.text for goal in report.goals if not goal.met]
    assert len(found) == len(missed)
    assert all(text.startswith(words) for text, words in zip(found, missed, strict=True))


def test_the_quick_cells_are_some_of_all() -> None:
    assert len(set(ALL_CELLS)) == 36
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
WITHOUT = {"kind": "prefix", "rows_missing": 0, "missing_because": "unavailable"}
WRONG = {"error": {"code": "worker_stalled"}}


@pytest.mark.parametrize(
    ("answer", "stream", "outcome", "detail"),
    [
        (whole(GOOD), False, WHOLE, ""),
        (whole(BAD), False, DEGRADED, "late"),
        (whole({"treadle": {"degraded": True, "memory": [WITHOUT]}}), False, DEGRADED, "unavailable"),
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
