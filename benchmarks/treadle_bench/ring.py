"""`treadle bench ring`: rows of one pool through its shared-memory ring, beside the mapping and beside gRPC, from Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from treadle.client import Endpoint
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.pool import EngramPool
from treadle.contract import RowLayout
from treadle.contract.families import qwen_ple_model
from treadle_bench.pool_process import huge_folder, pool_process
from treadle_bench.report import Goal, Row, interleave, rows_of

TABLE_BYTES, TABLE_BYTES_QUICK = 2_560_000_000, 160_000_000  # far beyond any cache; quick: not quite
TOKENS, TOKENS_QUICK = (1, 16, 64, 256, 1024, 4096), (1, 256)
COLUMNS, ROW_BYTES = 16, 320
ID_SETS, WARM_ROUNDS = 40, 3
ADDED_GOAL_US, LARGE_GOAL, RPC_GOAL = 10.0, 1.05, 1 / 8
Act = Callable[[int], float]


def measure(*, quick: bool) -> tuple[list[Row], list[Goal]]:
    """Gathers by id, one caller. `mapped` is the baseline; the ring into its own buffers and copied out; gRPC up to 1,024 tokens."""
    rows: list[Row] = []
    with ExitStack() as stack:
        running = stack.enter_context(pool_process(stack.enter_context(huge_folder())))
        pool = stack.enter_context(EngramPool(Endpoint(running.address, timeout_seconds=30.0)))
        size = TABLE_BYTES_QUICK if quick else TABLE_BYTES
        model = qwen_ple_model("bench", prime_base=size // ROW_BYTES // COLUMNS, row=RowLayout(ROW_BYTES, ROW_BYTES // 2, "bf16"))
        pool.load_random(model)
        ways = {way: stack.enter_context(pool.open("bench", transport=way)) for way in ("mapped", "ring", "rpc")}
        pages = f"{pool.status().page_bytes >> 10}KiB"
        for tokens in TOKENS_QUICK if quick else TOKENS:
            samples = _samples(ways, tokens, rounds=30 if quick else max(60, min(600, 100_000 // tokens)))
            rows += rows_of(samples, {"tokens": tokens, "rows": f"{COLUMNS}x{ROW_BYTES}", "pages": pages}, "us", "mapped")
    return rows, _goals(rows)


def _samples(ways: dict[str, EngramHandle], tokens: int, rounds: int) -> dict[str, list[float]]:
    table_rows = ways["mapped"].model.table(ways["mapped"].layers[0]).rows
    ids = np.random.default_rng(tokens).integers(0, table_rows, size=(ID_SETS, tokens, COLUMNS), dtype=np.int64)
    shape = (tokens, COLUMNS, ROW_BYTES)
    outs = {"mapped": np.zeros(shape, np.uint8), "ring": ways["ring"].buffer(shape), "ring, copied": np.zeros(shape, np.uint8)}
    if tokens <= 1024:
        outs["rpc"] = np.zeros(shape, np.uint8)
    acts = {name: _act(ways[name.partition(",")[0]], ids, out, place, len(outs)) for place, (name, out) in enumerate(outs.items())}
    for number in range(WARM_ROUNDS):
        for act in acts.values():
            act(number)
    return interleave(acts, rounds, seed=tokens, what=f"{tokens} tokens")


def _act(handle: EngramHandle, ids: NDArray[np.int64], out: NDArray[np.uint8], place: int, ways: int) -> Act:
    """Microseconds of a gather of ids that no other way has just used, so that no cache holds their rows."""
    layer = handle.layers[0]

    def run(number: int) -> float:
        chosen = ids[(number * ways + place) % len(ids)]
        begun = time.perf_counter_ns()
        handle.gather(layer, chosen, out)
        return (time.perf_counter_ns() - begun) / 1e3

    return run


def _goals(rows: list[Row]) -> list[Goal]:
    goals = []
    for row in rows:
        tokens = row.params["tokens"]
        beside = {other.name: other for other in rows if other.params["tokens"] == tokens}
        if row.name != "ring" or row.ratio is None:
            continue
        if tokens <= 256:
            goals.append(Goal(f"{tokens} tokens, ring - mapped, us", row.median - beside["mapped"].median, ADDED_GOAL_US))
        else:
            goals.append(Goal(f"{tokens} tokens, ring / mapped", row.ratio, LARGE_GOAL))
        if "rpc" in beside:
            goals.append(Goal(f"{tokens} tokens, ring / rpc", row.median / beside["rpc"].median, RPC_GOAL))
    return goals
