"""How long a refusal takes: in this process, and end to end through the socket door beside an empty round trip.

Speaks frames itself (libs/dataplane/src/frames.hpp), so that both round trips cost this side the same.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from treadle.contract import Deadline
from treadle.dataplane import DeadlineQueue
from treadle.dataplane.admission import Reason
from treadle_loadtests.driving import Driver, apart

TIMES, STANDING = 2000, 16
START_SECONDS, ANSWER_SECONDS = 60.0, 5.0
HEADER = struct.Struct("<IHHQQqqQQIi32s32s32s")
MAGIC, PROTOCOL, GATHER, PING, FAULT, PONG = 0x4C445254, 1, 1, 3, 17, 18
IDS = 256  # of a refused request: a small decode batch


def in_process(driver: Driver, kind: int, count: int = STANDING, *, times: int = TIMES) -> list[float]:
    """Seconds of the native decision, with up to `count` requests of the last kind queued behind it."""
    with apart() as part, DeadlineQueue(admission=True, tickets_max=count + STANDING) as queue:
        part()
        engine, arguments = queue.native_engine(), driver.arguments(kind)
        driver.alone(queue)  # costs are learnt
        seconds: list[float] = []
        while len(seconds) < times:
            standing = [driver.submit(queue, -1, Deadline.after(10.0 + number)) for number in range(count)]
            while not standing[-1].done and len(seconds) < times:
                soon_ns, begun_ns = time.monotonic_ns() + 1000, time.perf_counter_ns()
                answer = engine.submit_gather(*arguments, soon_ns, 0)
                took_ns = time.perf_counter_ns() - begun_ns
                if getattr(answer, "reason", None) == Reason.LATE:
                    seconds.append(took_ns / 1e9)
            for ticket in standing:
                ticket.cancel()
        return seconds


def end_to_end(*, times: int = TIMES) -> tuple[list[float], list[float]]:
    """Seconds of a refused request, STANDING others behind it, and of an empty round trip (ping), in turn on one connection.

    Raises AssertionError for another answer than that it would be late.
    """
    with (
        apart() as part,
        _server() as (path, version, fingerprint),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door,
    ):
        part()
        door.settimeout(ANSWER_SECONDS)
        door.connect(str(path))
        body = struct.pack("<iIq", 0, 0, IDS) + np.arange(IDS, dtype="<i8").tobytes()
        digests = (bytes(32), bytes.fromhex(version), bytes.fromhex(fingerprint))
        late = HEADER.pack(MAGIC, PROTOCOL, GATHER, 1, len(body), 1000, 0, 0, 0, 1, 0, *digests) + body
        ping = HEADER.pack(MAGIC, PROTOCOL, PING, 1, 0, 10**9, 0, 0, 0, 0, 0, bytes(32), bytes(32), bytes(32))
        refused: list[float] = []
        empty: list[float] = []
        for _ in range(times):
            empty.append(_round_trip(door, ping, PONG, Reason.NONE))
            refused.append(_round_trip(door, late, FAULT, Reason.LATE))
        return refused, empty


def _round_trip(door: socket.socket, request: bytes, wanted: int, reason: Reason) -> float:
    begun_ns = time.perf_counter_ns()
    door.sendall(request)
    answer = bytearray(door.recv(1 << 16))
    took_ns = time.perf_counter_ns() - begun_ns
    while len(answer) < HEADER.size or len(answer) < HEADER.size + HEADER.unpack_from(answer)[4]:
        piece = door.recv(1 << 16)
        assert piece, "the door hung up"
        answer += piece
        took_ns = time.perf_counter_ns() - begun_ns
    header = HEADER.unpack_from(answer)
    assert (header[2], header[9]) == (wanted, reason), (
        f"an answer of kind {header[2]}, reason {header[9]}: {bytes(answer[HEADER.size :])!r}"
    )
    return took_ns / 1e9


@contextmanager
def _server() -> Iterator[tuple[Path, str, str]]:
    """A door with one version in a process of its own, on the caller's core: (socket, version, fingerprint)."""
    with tempfile.TemporaryDirectory(prefix="treadle-loadtest-") as folder:
        path = Path(folder) / "door.sock"
        command = [sys.executable, "-m", "treadle_loadtests.refusal_server", str(path), str(STANDING)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                version, _, fingerprint = child.stdout.readline().strip().partition(" ")
                assert fingerprint, "the server did not start"
                yield path, version, fingerprint
            finally:
                with suppress(BrokenPipeError):
                    child.stdin.close()  # it ends with its input
                try:
                    child.wait(START_SECONDS)
                finally:
                    child.kill()
