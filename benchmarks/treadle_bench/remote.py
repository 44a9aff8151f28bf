"""`treadle bench remote`: rows of another process, by the native socket against the least that a socket can do, by gRPC against an
empty handler that streams the same bytes.

The baseline of the socket is the sum of two times of the same round: the same bytes over a raw socket, and the gather in the owner.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, Unavailable
from treadle.dataplane import RemoteLayer, RemoteRows
from treadle.dataplane.socket import parse_address
from treadle_bench import mooncake
from treadle_bench.remote_grpc import measure_grpc
from treadle_bench.remote_owner import BENCH_TOKEN, GATHER, ORDER, SEND, bench_model
from treadle_bench.report import Goal, Row, interleave, rows_of

TABLE_BYTES, TABLE_BYTES_QUICK = 1_280_000_000, 160_000_000
ROW_BYTES, COLUMNS = 320, 16
TOKENS = (1, 16, 64, 256, 1024, 4096)
ROUNDS, ROUNDS_QUICK, WARM_ROUNDS = 300, 60, 5
ID_SETS = 64
SECONDS_MAX = 30.0
SOCKET_GOAL = 1.3


@dataclass(frozen=True)
class Owner:
    """Addresses of a running owner, by kind."""

    places: dict[str, str]


def measure(*, quick: bool) -> tuple[list[Row], list[Goal], list[str]]:
    """Rows, goals, and what could not be measured here."""
    rows: list[Row] = []
    table_rows = (TABLE_BYTES_QUICK if quick else TABLE_BYTES) // ROW_BYTES
    sizes = (64, 256, 1024) if quick else TOKENS
    rounds = ROUNDS_QUICK if quick else ROUNDS
    with owner_process("127.0.0.1", table_rows) as owner:
        for kind in ("unix", "tcp"):
            for tokens in sizes:
                rows += _measure(owner, kind, kind, tokens, table_rows, rounds)
    skipped = _missing()
    if not skipped:
        with other_host() as (host, inside), owner_process(host, table_rows, inside) as owner:
            for tokens in sizes:
                rows += _measure(owner, "tcp", "tcp, other namespace", tokens, table_rows, rounds)
    goals = [
        Goal(f"{row.params['by']}, {row.params['tokens']} tokens: socket / (raw + gather)", row.ratio, SOCKET_GOAL)
        for row in rows
        if row.name == "socket" and row.ratio is not None and row.params["tokens"] == 256
    ]
    by_grpc, grpc_goals = measure_grpc(sizes, rounds, table_rows=table_rows // 4)
    try:
        by_mooncake, mooncake_goals = mooncake.measure(quick=quick)
    except Unavailable as error:
        return rows + by_grpc, goals + grpc_goals, [*skipped, str(error)]
    return rows + by_grpc + by_mooncake, goals + grpc_goals + mooncake_goals, skipped


def _measure(owner: Owner, kind: str, by: str, tokens: int, table_rows: int, rounds: int) -> list[Row]:
    ids = np.random.default_rng(tokens).integers(0, table_rows, size=(ID_SETS, tokens * COLUMNS), dtype=np.int64)
    out = np.zeros((tokens * COLUMNS, ROW_BYTES), dtype=np.uint8)
    model = bench_model(table_rows, ROW_BYTES)
    layer = model.layers[0]
    known = RemoteLayer(layer, table_rows, ROW_BYTES, model.columns)
    rows = RemoteRows(model.version, model.fingerprint.digest, [known], token=BENCH_TOKEN)
    family, place = parse_address(owner.places[f"raw {kind}"])
    with ExitStack() as stack:
        stack.callback(rows.close)
        rows.add_owner(owner.places[kind])
        raw = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        raw.connect(place)
        if kind == "tcp":
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def by_socket(number: int) -> float:
            mine = ids[3 * number % ID_SETS]
            begun = time.perf_counter_ns()
            until = Deadline(time.monotonic_ns() + int(SECONDS_MAX * 1e9))
            if not rows.submit_gather(layer, mine, out, until, until).wait(SECONDS_MAX):
                raise RuntimeError("the owner did not answer")
            return (time.perf_counter_ns() - begun) / 1e3

        def raw_bytes(number: int) -> float:
            begun = time.perf_counter_ns()
            _order(raw, SEND, ids[(3 * number + 1) % ID_SETS], out)
            return (time.perf_counter_ns() - begun) / 1e3

        def gather(number: int) -> float:
            took = np.zeros(8, dtype=np.uint8)
            _order(raw, GATHER, ids[(3 * number + 2) % ID_SETS], took, out.nbytes)
            return float(struct.unpack("<q", took.tobytes())[0]) / 1e3

        variants: dict[str, Callable[[int], float]] = {"socket": by_socket, "raw socket": raw_bytes, "gather": gather}
        for number in range(WARM_ROUNDS):
            for act in variants.values():
                act(number)
        samples = interleave(variants, rounds, seed=tokens, what=f"{by}, {tokens} tokens")
    samples["raw socket + gather"] = [a + b for a, b in zip(samples["raw socket"], samples["gather"], strict=True)]
    params = {"rows": f"{COLUMNS}x{ROW_BYTES}", "tokens": tokens, "by": by}
    return rows_of(samples, params, "us", "raw socket + gather")


def _order(raw: socket.socket, what: int, ids: NDArray[np.int64], into: NDArray[np.uint8], answer_bytes: int = 0) -> None:
    raw.sendall(ORDER.pack(what, ids.nbytes, answer_bytes or into.nbytes) + ids.tobytes())
    view, got = into.data.cast("B"), 0
    while got < into.nbytes:
        piece = raw.recv_into(view[got:])
        if not piece:
            raise RuntimeError("the owner has gone")
        got += piece


@contextmanager
def owner_process(host: str, table_rows: int, inside: Sequence[str] = ()) -> Iterator[Owner]:
    """A process that serves the table. inside: a command that runs it elsewhere."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-bench-remote-"))
    arguments = [host, str(table_rows), str(ROW_BYTES), str(folder / "door")]
    command = [*inside, sys.executable, "-m", "treadle_bench.remote_owner", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        readable, _, _ = select.select([child.stdout], [], [], SECONDS_MAX)
        line = child.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"the owner was not ready within {SECONDS_MAX:g} s (exit code {child.poll()})")
        yield Owner(json.loads(line))
    finally:
        child.stdin.close()
        try:
            child.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def other_host(number: int = 0) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A network namespace: its address as it is reached from here, and what runs a command inside. All of this host's addresses are
    reached from there. number: tells several of them apart."""
    tag = f"{os.getpid()}x{number}"
    name, link, net = f"trdb{tag}", f"vb{tag}", 100 + (os.getpid() + number) % 100
    near, far = f"10.{net}.7.1", f"10.{net}.7.2"
    try:
        for words in (
            f"netns add {name}", f"link add {link} type veth peer name eth0 netns {name}", f"addr add {near}/30 dev {link}",
            f"link set {link} up", f"-n {name} addr add {far}/30 dev eth0", f"-n {name} link set eth0 up", f"-n {name} link set lo up",
            f"-n {name} route add default via {near}",
        ):  # fmt: skip
            subprocess.run(["ip", *words.split()], check=True, capture_output=True)
        yield far, ("ip", "netns", "exec", name)
    finally:
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _missing() -> list[str]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return ["another host is a network namespace: run as root, with iproute2"]
    return []
