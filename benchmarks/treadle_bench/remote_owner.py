"""The other process of `treadle bench remote`: a table behind the native socket door, and beside it what the door is compared with.

`python -m treadle_bench.remote_owner HOST TABLE_ROWS ROW_BYTES UNIX_PATH`; prints its addresses as one JSON line, serves until standard
input ends. HOST beyond loopback is reached with BENCH_TOKEN.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowLayout, Table
from treadle.contract.families import qwen_ple_model
from treadle.dataplane import DeadlineQueue, ServedLayer, SocketServer, Tenants, Versions
from treadle.dataplane.socket import token_digest
from treadle.kernels import HashPlan, gather_rows

BENCH_TOKEN = "bench"
ORDER = struct.Struct("<iiq")  # what to do, bytes of ids behind it, bytes of the answer
SEND, GATHER = 1, 2  # answer with so many bytes; gather the ids and answer with the nanoseconds that it took
LAYER = 0


def bench_model(table_rows: int, row_bytes: int) -> EngramModel:
    """One layer that hashes into a part of `table_rows`; rows are asked for by id."""
    template = qwen_ple_model("bench-remote", prime_base=800, row=RowLayout(row_bytes, row_bytes // 2, "bf16"))
    return template.with_tables({template.layers[0]: Table(table_rows, "0" * 64)})


def table_of(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Random rows; the same in every process."""
    block = np.frombuffer(np.random.default_rng(0).bytes(row_bytes * 4096), dtype=np.uint8).reshape(4096, row_bytes)
    return np.tile(block, (-(-rows // 4096), 1))[:rows].copy()


def main() -> None:
    """Serve until standard input ends."""
    host, path = sys.argv[1], sys.argv[4]
    rows, row_bytes = int(sys.argv[2]), int(sys.argv[3])
    model, table = bench_model(rows, row_bytes), table_of(rows, row_bytes)
    layer = model.layers[0]
    versions = Versions()
    plan = HashPlan.from_model(model, layer, None)
    versions.publish(model.version, model.fingerprint.digest, [ServedLayer(layer, plan, table)])
    tenants = Tenants(tokens={token_digest(BENCH_TOKEN): 0})
    listeners = [_raw_listener(socket.AF_INET, (host, 0)), _raw_listener(socket.AF_UNIX, path + ".raw")]
    for listener in listeners:
        threading.Thread(target=_serve_raw, args=(listener, table), daemon=True).start()
    with (
        DeadlineQueue(workers=1, tenants=tenants, implementation="native") as queue,
        SocketServer(queue, versions, [f"{host}:0", f"unix:{path}"]) as server,
    ):
        raw = f"{host}:{listeners[0].getsockname()[1]}"
        print(
            json.dumps({"tcp": server.addresses[0], "unix": server.addresses[1], "raw tcp": raw, "raw unix": f"unix:{path}.raw"}),
            flush=True,
        )
        sys.stdin.read()


def _raw_listener(family: int, place: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(place)
    listener.listen(4)
    return listener


def _serve_raw(listener: socket.socket, table: NDArray[np.uint8]) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(connection, table), daemon=True).start()


def _serve_one(connection: socket.socket, table: NDArray[np.uint8]) -> None:
    """The least that a server can do with the same bytes."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out = np.zeros((1, table.shape[1]), dtype=np.uint8)
    with connection:
        while head := _exactly(connection, ORDER.size):
            what, id_bytes, answer_bytes = ORDER.unpack(head)
            ids = np.frombuffer(_exactly(connection, id_bytes), dtype="<i8")
            if out.shape[0] * out.shape[1] < answer_bytes:
                out = np.zeros((answer_bytes // table.shape[1], table.shape[1]), dtype=np.uint8)
            mine = out[: len(ids)]
            if what == GATHER:
                begun = time.perf_counter_ns()
                gather_rows(table, ids, mine)
                connection.sendall(struct.pack("<q", time.perf_counter_ns() - begun))
            else:
                connection.sendall(mine.data.cast("B"))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        piece = connection.recv_into(view[got:])
        if not piece:
            return b""
        got += piece
    return bytes(data)


if __name__ == "__main__":
    main()
