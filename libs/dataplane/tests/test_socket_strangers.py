"""A real server against peers that take places, memory or time from others: those who have a token are served all the same."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from treadle.contract import AccessDenied, Deadline, InvalidArgument, ResourceExhausted, Windows
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, RemoteLayer, RemoteRows, Route, SocketServer, Tenants, Versions
from treadle.dataplane.socket import ping, token_digest
from treadle.kernels import row_ids

if TYPE_CHECKING:
    from tests.owner_process import ROW_BYTES, layers_of, model_of, plans_of, rows_of
else:
    from owner_process import ROW_BYTES, layers_of, model_of, plans_of, rows_of

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: install a C++20 compiler")
HEADER = struct.Struct("<IHHQQqqQQIi32s32s32s")
MODEL, PLANS, KEY, SECONDS = model_of(), plans_of(model_of()), "a key", 10.0
GATHER, PING, FAULT, FORBIDDEN, REFUSED = 1, 3, 17, 8, 6
TABLE = {layer: rows_of(np.arange(MODEL.table(layer).rows, dtype=np.int64), layer) for layer in MODEL.layers}


@contextmanager
def serving(*, tokens: bool = True, **limits: Any) -> Iterator[SocketServer]:
    versions = Versions()
    versions.publish(MODEL.version, MODEL.fingerprint.digest, layers_of(MODEL))
    tenants = Tenants(tokens={token_digest(KEY): 0}) if tokens else None
    with DeadlineQueue(workers=1, tenants=tenants) as queue, SocketServer(queue, versions, ["127.0.0.1:0"], **limits) as server:
        yield server


def connect(server: SocketServer, *, receive_bytes: int = 0) -> socket.socket:
    host, _, port = server.addresses[0].rpartition(":")
    connection = socket.socket()
    connection.settimeout(SECONDS)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    return connection


def header(kind: int, body_bytes: int, *, token: str | None = KEY) -> bytes:
    digests = (token_digest(token), bytes.fromhex(MODEL.version), MODEL.fingerprint.digest)
    return HEADER.pack(0x4C445254, 1, kind, 9, body_bytes, 1 << 40, 0, 0, 0, 1, 0, *digests)


def gather(count: int, *, token: str | None = KEY) -> bytes:
    body = struct.pack("<iIq", 1, 0, count) + (np.arange(count) % 100).astype("<i8").tobytes()
    return header(GATHER, len(body), token=token) + body


def read_until_closed(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def fault_of(data: bytes) -> tuple[int, int, str]:
    """(kind, fault, text) of the only frame."""
    fields = HEADER.unpack(data[: HEADER.size])
    return fields[2], fields[10], data[HEADER.size :].decode()


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def rows_at(server: SocketServer, *, spread: bool = False, token: str | None = KEY) -> Iterator[RemoteRows]:
    layers = [RemoteLayer(n, MODEL.table(n).rows, ROW_BYTES, MODEL.columns, PLANS[n]) for n in MODEL.layers]
    rows = RemoteRows(MODEL.version, MODEL.fingerprint.digest, layers, token=token)
    try:
        rows.add_owner(server.addresses[0])
        if spread:
            owners = np.zeros((1, 1), np.int32)
            rows.set_routes({n: Route(np.array([0, MODEL.table(n).rows]), owners) for n in MODEL.layers})
        yield rows
    finally:
        rows.close()


def test_silent_strangers_shut_nobody_out_and_are_gone_soon() -> None:
    with serving(greet_seconds=1.0) as server, ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(70)]
        begun = time.monotonic()
        ping(server.addresses[0], token=KEY, timeout_seconds=SECONDS)
        assert time.monotonic() - begun < SECONDS / 2
        told = [fault_of(read_until_closed(each)) for each in silent]
        assert {(kind, fault) for kind, fault, _ in told} == {(FAULT, REFUSED)}
        assert all("send one as soon as you are connected" in text for _, _, text in told)
        soon(lambda: server.stats()["connections"] == 0)


def test_a_stranger_is_told_so_and_cut_before_its_body_has_come() -> None:
    with serving(stall_seconds=60.0) as server, connect(server) as stranger:
        stranger.sendall(header(GATHER, 64 << 20, token="a stranger's"))
        begun = time.monotonic()
        assert fault_of(read_until_closed(stranger)) == (FAULT, FORBIDDEN, "show a token that this pool knows")
        assert time.monotonic() - begun < SECONDS / 2
        with pytest.raises(AccessDenied, match="show a token"):
            ping(server.addresses[0], token="a stranger's")


def test_a_door_without_a_place_says_what_is_full_and_what_to_do() -> None:
    with serving(connections_max=1) as server, connect(server) as known:
        known.sendall(header(PING, 0))
        assert known.recv(HEADER.size)
        with pytest.raises(ResourceExhausted, match=r"all 1 connections .* socket_connections_max: close some, raise it"):
            ping(server.addresses[0], token=KEY)


def test_a_connection_that_has_ended_keeps_neither_descriptor_nor_buffers() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving(tokens=False) as server:
        before, count = descriptors(), 1000
        connections = [connect(server) for _ in range(12)]
        for each in connections:
            each.sendall(gather(count, token=None))
            assert each.recv(1)
        assert descriptors() >= before + 24
        for each in connections:
            each.close()
        soon(lambda: descriptors() == before)  # nobody comes meanwhile
        soon(lambda: server.stats()["connections"] == 0)


def test_a_reader_below_the_least_rate_is_cut_though_it_never_stalls() -> None:
    count = 600_000  # 38 MB: at a megabyte a second 38 seconds, at the least rate 2.3
    with serving(tokens=False, stall_seconds=0.5) as server, connect(server, receive_bytes=32 << 10) as slow:
        slow.sendall(gather(count, token=None))
        begun, got = time.monotonic(), 0
        while server.stats()["cut_total"] == 0 and time.monotonic() - begun < SECONDS:
            got += len(slow.recv(64 << 10))
            time.sleep(0.05)  # the pace of this reader
        assert server.stats()["cut_total"] == 1
        assert got < count * ROW_BYTES


def test_a_reply_above_the_limit_is_invalid_and_names_it() -> None:
    ids = np.zeros(20_000, np.int64)
    with serving(reply_bytes_max=1 << 20) as server, rows_at(server) as rows:
        until, out = Deadline.after(SECONDS), np.zeros((len(ids), ROW_BYTES), np.uint8)
        ticket = rows.submit_gather(1, ids, out, until, until)
        with pytest.raises(
            InvalidArgument, match=r"1280000 bytes is more than 1048576, the limit socket_reply_bytes_max: ask for fewer"
        ):
            ticket.wait(SECONDS)


@pytest.mark.parametrize("spread", [False, True])
def test_a_large_gather_is_asked_for_in_pieces(spread: bool) -> None:
    ids = np.random.default_rng(0).integers(0, MODEL.table(1).rows, 700_000)  # 45 MB
    with serving(reply_bytes_max=64 << 20) as server, rows_at(server, spread=spread) as rows:
        until, out = Deadline.after(SECONDS), np.zeros((len(ids), ROW_BYTES), np.uint8)
        assert rows.submit_gather(1, ids, out, until, until).wait(SECONDS)
        assert np.array_equal(out, TABLE[1][ids])
        assert server.stats()["requests_total"] == 3


@pytest.mark.parametrize("spread", [False, True])
def test_a_large_lookup_is_cut_by_layers_and_tokens(spread: bool) -> None:
    depth, chance, tokens = MODEL.order_max - 1, np.random.default_rng(1), 60_000
    cuts = np.sort(chance.choice(np.arange(1, tokens), 9, replace=False))
    windows = Windows(
        tokens=chance.integers(0, 600, tokens), starts=np.array([0, *cuts, tokens], np.int32),
        lookback=chance.integers(0, 600, (10, depth)), dead=chance.random(tokens) < 0.2, lookback_dead=chance.random((10, depth)) < 0.2,
    )  # fmt: skip
    outs = {layer: np.zeros((tokens, MODEL.columns, ROW_BYTES), np.uint8) for layer in MODEL.layers}
    assert all(out.nbytes > 16 << 20 for out in outs.values())
    with serving(reply_bytes_max=64 << 20) as server, rows_at(server, spread=spread) as rows:
        until = Deadline.after(SECONDS)
        tickets = rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, until), until)
        assert all(ticket.wait(SECONDS) for ticket in tickets.values())
        assert server.stats()["requests_total"] >= 4
    for layer, out in outs.items():
        assert np.array_equal(out, TABLE[layer][row_ids(PLANS[layer], windows)])
