"""Frames of the mooncake door: bounded, checked, errors told as what they are. And what an SDK without Mooncake says."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from treadle.client.engram import mooncake_wire as wire
from treadle.client.engram.mooncake_engine import Engine
from treadle.client.engram.mooncake_landing import landing_figures
from treadle.client.engram.mooncake_wire import Frame, Kind, Staged
from treadle.client.errors import InternalError
from treadle.contract import (
    Deadline,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    ProtocolMismatch,
    ResourceExhausted,
    RowOutOfRange,
    TreadleError,
    Unavailable,
)

VERSION = "ab" * 32


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_a_frame_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    wire.send(pair[0], Frame(Kind.GATHER, b"body", 0.25))
    assert wire.receive(pair[1], Deadline.after(1)) == Frame(Kind.GATHER, b"body", 0.25)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<4sB3xId", b"HTTP", 1, 0, 0.0),
        struct.pack("<4sB3xId", b"TDLM", 99, 0, 0.0),
        struct.pack("<4sB3xId", b"TDLM", 1, wire.BODY_BYTES_MAX + 1, 0.0),
        struct.pack("<4sB3xId", b"TDLM", 4, 0, float("nan")),
    ],
)
def test_what_is_no_frame_is_refused_before_anything_is_allocated(pair: tuple[socket.socket, socket.socket], header: bytes) -> None:
    pair[0].sendall(header)
    with pytest.raises(ProtocolMismatch):
        wire.receive(pair[1], Deadline.after(1))


def test_a_frame_that_stops_half_way_ends_with_the_deadline_or_with_the_sender(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"TDLM")
    with pytest.raises(DeadlineExceeded):
        wire.receive(pair[1], Deadline.after(0.05))
    pair[0].close()
    with pytest.raises(Unavailable):
        wire.receive(pair[1], Deadline.after(1))


def test_a_body_beyond_the_limit_is_not_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(InvalidArgument, match=str(wire.BODY_BYTES_MAX)):
        wire.send(pair[0], Frame(Kind.LOOKUP, bytes(wire.BODY_BYTES_MAX + 1)))


@pytest.mark.parametrize(
    "error", [RowOutOfRange("row 9"), ResourceExhausted("full", 0.5), FingerprintMismatch("version", "a", "b"), Unavailable("soon")]
)
def test_an_error_arrives_as_what_it_was(error: TreadleError) -> None:
    came = wire.read_refusal(wire.refusal(error))
    assert (type(came), str(came), came.origin) == (type(error), str(error), type(error).__name__)
    assert getattr(came, "retry_after_seconds", None) == getattr(error, "retry_after_seconds", None)
    assert getattr(came, "field", None) == getattr(error, "field", None)


def test_an_unknown_error_is_an_internal_one() -> None:
    assert isinstance(wire.read_refusal(b'{"error":"SystemExit","text":"no"}'), InternalError)


def test_staged_rows_and_releases_keep_their_numbers_and_torn_ones_are_refused() -> None:
    staged = Staged(3, 2**40, 2**47 - 64, 4 << 20, 2**32 - 1, VERSION)
    assert wire.read_staged(wire.staged_body(staged)) == staged
    assert wire.read_release(wire.release_body(3, 2**40)) == (3, 2**40)
    for read, body in ((wire.read_staged, wire.staged_body(staged)), (wire.read_release, wire.release_body(1, 1))):
        with pytest.raises(ProtocolMismatch):
            read(body[:-1])
    for body in (b"[]", b"{", b"\xff"):
        with pytest.raises(ProtocolMismatch):
            wire.read_json(body)


def test_a_proof_depends_on_key_and_nonce() -> None:
    assert len({wire.proof(b"key", b"1"), wire.proof(b"key", b"2"), wire.proof(b"other", b"1")}) == 3


def test_an_identity_names_process_version_and_generation() -> None:
    one = wire.identity(bytes(16), VERSION, 1)
    assert len(one) == wire.IDENTITY_BYTES
    assert one != wire.identity(bytes(16), VERSION, 2)
    assert one != wire.identity(b"x" * 16, VERSION, 1)


def test_without_mooncake_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(Unavailable, match=r"libibverbs1"):
        Engine("127.0.0.1", "tcp")
    with pytest.raises(InvalidArgument, match="tcp or rdma"):
        Engine("127.0.0.1", "udp")
    assert landing_figures().quarantined_bytes >= 0
