"""`treadle bench attach`: how long mapping a table takes, how long until it is warm, and what each further client costs in memory."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract import EngramModel, RowLayout, Unavailable
from treadle.contract.families import demo_model
from treadle_bench.answers import Lines
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Goal, Row

TABLE_BYTES, TABLE_BYTES_QUICK = 5_000_000_000, 500_000_000
CLIENTS = 4  # attached at the same time
ROUNDS, ROUNDS_QUICK = 5, 1  # of all clients, one after the other
OPEN_SECONDS_MAX = 0.1
ADDED_SHARE_MAX = 0.01  # of the table
ANSWER_SECONDS_MAX = 180.0
ROW = RowLayout(320, 160, "bf16")
TOKEN_MAP = np.arange(1000, dtype=np.int32)
NAME = "bench-attach"


def measure(*, quick: bool, table_bytes: int | None = None) -> tuple[list[Row], list[Goal], list[str]]:
    """Real clients of a real pool, each a process of its own. Needs the table's bytes of tmpfs."""
    size = table_bytes or (TABLE_BYTES_QUICK if quick else TABLE_BYTES)
    attached: list[dict[str, Any]] = []
    warmed: list[dict[str, Any]] = []
    with pool_process() as process:
        with EngramPool(Endpoint(process.address)) as pool:
            model = pool.load_random(_model(size), TOKEN_MAP).model
        for _ in range(ROUNDS_QUICK if quick else ROUNDS):
            with ExitStack() as stack:
                for _ in range(CLIENTS):  # the next one comes when this one is warm; all stay until the last one is
                    client = stack.enter_context(_client(process.address))
                    attached.append(_answer(client))
                    warmed.append(_answer(client))
    payload = sum(model.rows_hashed(layer) for layer in model.layers) * ROW.bytes
    rows = _rows(attached, warmed, payload)
    median = {row.name: row.median for row in rows}
    share = median["added by a client, warm"] * (1 << 20) / payload
    states = [client["warm_state"] for client in warmed]
    notes = [
        "added: anonymous memory and page tables of the client's process since before it attached; the table itself is the pool's, one copy",
        f"pss: the client's share of all it maps with {CLIENTS} clients attached; warm state at the end: {', '.join(sorted(set(states)))}",
    ]
    goals = [
        Goal(f"median time to attach {payload / 1e9:.1f} GB, ms", median["attach"], OPEN_SECONDS_MAX * 1e3),
        Goal("memory added by each client / table", share, ADDED_SHARE_MAX),
        Goal("clients that got warm in the background / clients", states.count("warm") / len(states), 1.0, at_least=True),
    ]
    return rows, goals, notes


def _rows(attached: list[dict[str, Any]], warmed: list[dict[str, Any]], payload: int) -> list[Row]:
    params = {"table": f"{payload / 1e9:.1f} GB", "clients": CLIENTS}

    def row(name: str, unit: str, values: list[float]) -> Row:
        return Row(name, params, unit, float(np.median(values)), float(np.percentile(values, 99)), len(values))

    def added(clients: list[dict[str, Any]], *kinds: str) -> list[float]:
        return [sum(client["added_bytes"][kind] for kind in kinds) / (1 << 20) for client in clients]

    return [
        row("attach", "ms", [client["open_seconds"] * 1e3 for client in attached]),
        row("first gather, cold pages", "ms", [client["first_gather_seconds"] * 1e3 for client in attached]),
        row("warm in the background", "ms", [client["warm_seconds"] * 1e3 for client in warmed]),
        row("added by a client, attached", "MiB", added(attached, "anonymous", "page_tables")),
        row("added by a client, warm", "MiB", added(warmed, "anonymous", "page_tables")),
        row("of that, page tables", "MiB", added(warmed, "page_tables")),
        row("pss of a client", "MiB", [client["pss_bytes"] / (1 << 20) for client in warmed]),
    ]


@contextmanager
def _client(address: str) -> Iterator[Lines]:
    """What a client says: a line when it has attached, a line when it is warm."""
    command = [sys.executable, "-m", "treadle_bench.attach_client", address, NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        try:
            yield Lines(client.stdout)
        finally:
            client.kill()


def _answer(client: Lines) -> dict[str, Any]:
    try:
        line = client.within(ANSWER_SECONDS_MAX)
    except EOFError as error:
        raise Unavailable("a client ended before it had attached") from error
    if line is None:
        raise Unavailable(f"a client did not attach within {ANSWER_SECONDS_MAX:.0f} s")
    said: dict[str, Any] = json.loads(line)
    return said


def _model(table_bytes: int) -> EngramModel:
    digest = hashlib.sha256(TOKEN_MAP.astype("<i4").tobytes()).hexdigest()
    return demo_model(
        NAME, layers=(1,), token_map=digest, compressed_vocab_size=len(TOKEN_MAP), pad_id=2,
        prime_base=table_bytes // ROW.bytes // 16, row=ROW,
    )  # fmt: skip
