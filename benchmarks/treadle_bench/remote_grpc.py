"""gRPC's part of `treadle bench remote`: a pool's Gather against an empty handler that streams the same bytes in the same messages."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract import RowLayout
from treadle.contract.families import qwen_ple_model
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Goal, Row, interleave, rows_of

MESSAGE_BYTES = (1 << 20) - 1024  # as the pool cuts them
GRPC_GOAL = 1.2
SECONDS_MAX, START_SECONDS_MAX = 30.0, 30.0
ROW_BYTES, COLUMNS, WARM_ROUNDS = 320, 16, 5


def measure_grpc(sizes: tuple[int, ...], rounds: int, *, table_rows: int) -> tuple[list[Row], list[Goal]]:
    """Needs the table in shared memory once."""
    template = qwen_ple_model("bench-grpc", prime_base=table_rows // 16, row=RowLayout(ROW_BYTES, ROW_BYTES // 2, "bf16"))
    rows: list[Row] = []
    with (
        pool_process() as pool,
        EngramPool(Endpoint(pool.address, timeout_seconds=SECONDS_MAX)) as client,
        _empty_process() as empty,
    ):
        resident = client.load_random(template, seed=1)
        layer, count = resident.model.layers[0], resident.model.table(resident.model.layers[0]).rows
        ref = pb.ModelRef(model=resident.model.name, version=resident.version)
        with Endpoint(pool.address).channel() as real, Endpoint(empty).channel() as nothing:
            stubs = {"grpc gather": pb_grpc.EngramPoolServiceStub(real), "empty handler": pb_grpc.EngramPoolServiceStub(nothing)}
            for tokens in sizes:
                ids = np.random.default_rng(tokens).integers(0, count, size=(16, tokens * COLUMNS), dtype=np.int64)
                out = np.zeros(tokens * COLUMNS * ROW_BYTES, dtype=np.uint8)
                acts = {name: _asking(stub, ref, layer, ids, out) for name, stub in stubs.items()}
                for number in range(WARM_ROUNDS):
                    for act in acts.values():
                        act(number)
                samples = interleave(acts, rounds, seed=tokens, what=f"grpc, {tokens} tokens")
                rows += rows_of(samples, {"rows": f"{COLUMNS}x{ROW_BYTES}", "tokens": tokens, "by": "grpc"}, "us", "empty handler")
    goals = [
        Goal(f"grpc, {row.params['tokens']} tokens: gather / empty handler", row.ratio, GRPC_GOAL)
        for row in rows
        if row.ratio is not None and row.params["tokens"] == 256
    ]
    return rows, goals


def _asking(stub: Any, ref: pb.ModelRef, layer: int, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> Callable[[int], float]:
    def ask(number: int) -> float:
        begun = time.perf_counter_ns()
        request, at = pb.GatherRequest(ref=ref, layer=layer, rows=ids[number % len(ids)].tobytes()), 0
        for answer in stub.Gather(request, timeout=SECONDS_MAX):
            piece = np.frombuffer(answer.data, dtype=np.uint8)
            out[at : at + len(piece)] = piece
            at += len(piece)
        if at != len(out):
            raise RuntimeError(f"{at} of {len(out)} bytes came")
        return (time.perf_counter_ns() - begun) / 1e3

    return ask


class _Empty(pb_grpc.EngramPoolServiceServicer):
    """Answers Gather with as many bytes as the rows would have, made beforehand."""

    def __init__(self) -> None:
        self._message = bytes(MESSAGE_BYTES // ROW_BYTES * ROW_BYTES)

    async def Gather(self, request: pb.GatherRequest, context: Any) -> AsyncIterator[pb.GatherResponse]:  # type: ignore[override]  # noqa: N802
        """The same messages."""
        left = len(request.rows) // 8 * ROW_BYTES
        while left > 0:
            data = self._message if left >= len(self._message) else self._message[:left]
            yield pb.GatherResponse(data=data)
            left -= len(data)


@contextmanager
def _empty_process() -> Iterator[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "treadle_bench.remote_grpc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        readable, _, _ = select.select([child.stdout], [], [], START_SECONDS_MAX)
        line = child.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"the empty handler was not ready (exit code {child.poll()})")
        yield json.loads(line)["listen"]
    finally:
        child.stdin.close()
        child.kill()
        child.wait()
        child.stdout.close()


async def _serve() -> None:
    server = grpc.aio.server()
    empty: Any = _Empty
    pb_grpc.add_EngramPoolServiceServicer_to_server(empty(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"listen": f"127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve())
