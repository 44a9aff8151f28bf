"""A real server against bytes that no client of ours would send: it closes or answers with a fault, and serves on."""

from __future__ import annotations

import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.contract import InvalidArgument, ResourceExhausted, Unavailable
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, SocketServer, Versions
from treadle.dataplane.faults import Fault
from treadle.dataplane.socket import ping

if TYPE_CHECKING:
    from tests.owner_process import layers_of, model_of
else:
    from owner_process import layers_of, model_of

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: install a C++20 compiler")
HEADER = struct.Struct("<IHHQQqqQQIi32s32s32s")
MAGIC, SECONDS = 0x4C445254, 10.0
MODEL = model_of()
GATHER, LOOKUP, PING, ROWS, FAULT, PONG = 1, 2, 3, 16, 17, 18
BODY_BYTES_MAX = 64 << 20
Server = tuple[SocketServer, str]


@pytest.fixture(scope="module")
def server() -> Iterator[SocketServer]:
    versions = Versions()
    versions.publish(MODEL.version, MODEL.fingerprint.digest, layers_of(MODEL))
    with (
        DeadlineQueue(workers=1) as queue,
        SocketServer(queue, versions, ["127.0.0.1:0"], stall_seconds=0.5, reply_bytes_max=4 << 20) as opened,
    ):
        yield opened


@contextmanager
def connected(server: SocketServer) -> Iterator[socket.socket]:
    host, _, port = server.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        yield connection


def header(kind: int, body_bytes: int, *, magic: int = MAGIC, protocol: int = 1, layers: int = 1, request: int = 9) -> bytes:
    digests = (bytes(32), bytes.fromhex(MODEL.version), MODEL.fingerprint.digest)
    return HEADER.pack(magic, protocol, kind, request, body_bytes, 1 << 40, 0, 0, 0, layers, 0, *digests)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes; fails where it does neither close nor send."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def answer(connection: socket.socket) -> tuple[int, int]:
    """(kind, fault) of the next frame, its body read."""
    data = b""
    while len(data) < HEADER.size:
        piece = connection.recv(HEADER.size - len(data))
        assert piece, "the server closed"
        data += piece
    fields = HEADER.unpack(data)
    left = fields[4]
    while left:
        left -= len(connection.recv(left))
    return fields[2], fields[10]


def gather_body(ids: list[int], *, layer: int = 1, count: int | None = None) -> bytes:
    said = len(ids) if count is None else count
    return struct.pack("<iIq", layer, 0, said) + np.asarray(ids, dtype="<i8").tobytes()


hostile_integers = st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_end_in_a_fault_or_a_close(server: SocketServer, data: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        got = everything(connection)
    assert not got or HEADER.unpack(got[: HEADER.size])[2] in (FAULT, PONG)
    ping(server.addresses[0])


@given(
    kind=st.sampled_from([GATHER, LOOKUP, 4]), layers=st.sampled_from([0, 1, 2, 64, 65, 2**32 - 1]),
    words=st.lists(hostile_integers, max_size=24), tail=st.binary(max_size=16),
)  # fmt: skip
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hostile_numbers_in_a_body_are_answered_with_a_fault(
    server: SocketServer, kind: int, layers: int, words: list[int], tail: bytes
) -> None:
    body = struct.pack("<iI", 1, 0) + b"".join(struct.pack("<q", word) for word in words) + tail
    with connected(server) as connection:
        connection.sendall(header(kind, len(body), layers=layers) + body)
        connection.sendall(header(PING, 0))
        first, _ = answer(connection)
        while first == ROWS:  # it may be a request after all
            first, _ = answer(connection)
        assert first in (FAULT, PONG)
        assert first == PONG or answer(connection)[0] == PONG


@given(cut=st.integers(0, HEADER.size + 8 * 20))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_that_ends_too_soon_is_forgotten(server: SocketServer, cut: int) -> None:
    whole = header(GATHER, 16 + 8 * 20) + gather_body(list(range(20)))
    with connected(server) as connection:
        connection.sendall(whole[: min(cut, len(whole) - 1)])
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection) == b""
    ping(server.addresses[0])


@pytest.mark.parametrize("body_bytes", [BODY_BYTES_MAX + 1, 1 << 40, (1 << 64) - 1])
def test_memory_follows_what_came_and_not_what_a_header_claims(server: SocketServer, body_bytes: int) -> None:
    with connected(server) as connection:
        connection.sendall(header(GATHER, body_bytes))
        assert answer(connection) == (FAULT, Fault.INVALID)
        assert everything(connection) == b""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connected(server) as connection:
        connection.sendall(header(GATHER, BODY_BYTES_MAX) + b"x" * 1000)  # and then nothing: cut after stall_seconds
        begun = time.monotonic()
        assert everything(connection) == b""
        assert time.monotonic() - begun < SECONDS / 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (header(GATHER, 0, magic=1), Fault.INVALID),
        (header(GATHER, 0, protocol=2), Fault.INVALID),
        (header(99, 0), Fault.INVALID),
        (header(GATHER, 8) + b"x" * 8, Fault.INVALID),
        (header(GATHER, 24) + gather_body([-1]), Fault.OUT_OF_RANGE),
        (header(GATHER, 24) + gather_body([1 << 40]), Fault.OUT_OF_RANGE),
        (header(GATHER, 24) + gather_body([1], layer=2), Fault.NOT_FOUND),
        (header(GATHER, 24) + gather_body([1], count=2), Fault.INVALID),
        (header(GATHER, 24) + gather_body([1], count=1 << 61), Fault.INVALID),
        (header(GATHER, 16 + 8 * 100_000) + gather_body([1] * 100_000), Fault.INVALID),  # more than reply_bytes_max
    ],
)  # fmt: skip
def test_a_wrong_request_is_told_what_is_wrong(server: SocketServer, sent: bytes, fault: Fault) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        assert answer(connection) == (FAULT, fault)


def test_a_reader_that_does_not_read_is_cut_and_others_are_served() -> None:
    versions, count = Versions(), 600_000  # rows of 38 MB: more than the kernel keeps for a peer
    versions.publish(MODEL.version, MODEL.fingerprint.digest, layers_of(MODEL))
    with (
        DeadlineQueue(workers=1) as queue,
        SocketServer(queue, versions, ["127.0.0.1:0"], stall_seconds=0.5) as server,
        connected(server) as stuck,
    ):
        stuck.sendall(header(GATHER, 16 + 8 * count) + gather_body([5] * count))
        ping(server.addresses[0])
        until = time.monotonic() + SECONDS
        while server.stats()["cut_total"] == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
        ping(server.addresses[0])


def test_beyond_its_limit_connections_are_turned_away(tmp_path: Path) -> None:
    with DeadlineQueue() as queue, SocketServer(queue, Versions(), [f"unix:{tmp_path}/door"], connections_max=2) as server:
        kept = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for each in kept:
            each.connect(f"{tmp_path}/door")
            each.settimeout(SECONDS)
            each.sendall(header(PING, 0))
            assert answer(each)[0] == PONG
        with pytest.raises(ResourceExhausted):
            ping(server.addresses[0])
        kept[0].close()
        until = time.monotonic() + SECONDS
        while True:
            try:
                ping(server.addresses[0])
                break
            except ResourceExhausted:
                assert time.monotonic() < until
        kept[1].close()


def test_a_socket_left_by_a_killed_process_is_taken_over_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "door"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with DeadlineQueue() as queue:
        with SocketServer(queue, Versions(), [f"unix:{path}"]) as server:
            ping(server.addresses[0])
            with pytest.raises(Unavailable, match="cannot listen"):
                SocketServer(queue, Versions(), [f"unix:{path}"])
            ping(server.addresses[0])
        assert not path.exists()
        path.write_text("a file")
        with pytest.raises(InvalidArgument, match="no socket"):
            SocketServer(queue, Versions(), [f"unix:{path}"])
        assert path.read_text() == "a file"
