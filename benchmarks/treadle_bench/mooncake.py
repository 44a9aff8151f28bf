"""Rows between two processes by Mooncake: the owner gathers and one read brings them, against Mooncake's own EngramStore.

Everything runs in a network namespace of its own (root), as Mooncake listens on all addresses without keys: pool, Mooncake master,
store node, and the process that measures, which is this module again. The EngramStore holds the same table, a head in each object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.client import Fabric
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.mooncake_engine import load
from treadle.client.engram.mooncake_source import MooncakeSource
from treadle.contract import EngramModel, RowLayout, Unavailable
from treadle.contract.families import qwen_ple_model
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Goal, Row, interleave, rows_of

OWNER, DIRECT, THEIRS = "mooncake owner gather", "mooncake direct", "EngramStore.lookup"
ROWS = 4_096  # 256 tokens of 16 heads
FEW = (1, 4)
MASTER_PORT, METRICS_PORT, NODE_PORT = 21751, 21752, 21753  # in the namespace; below the ephemeral range
START_SECONDS_MAX = 30.0
RUN_SECONDS_MAX = 600.0
SPEEDUP_MIN = 50.0


def measure(*, quick: bool) -> tuple[list[Row], list[Goal]]:
    """Figures of rows by Mooncake. Raises Unavailable, saying what is missing, where they cannot be measured."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise Unavailable("mooncake: needs root and `ip`, for a network namespace of its own")
    load("mooncake.engine")
    namespace = f"treadle-bench-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True)
        found = _run_inside(namespace, rounds=12 if quick else 60)
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=True)
    rows: list[Row] = []
    for each in found:
        rows += rows_of(each["samples"], {"rows": each["rows"], "row_bytes": 320}, "us", each["baseline"])
    ratio = next(row.ratio for row in rows if row.name == OWNER and row.params["rows"] == ROWS)
    assert ratio is not None
    return rows, [Goal(f"{OWNER}: times faster than {THEIRS}, {ROWS} rows", 1 / ratio, SPEEDUP_MIN, at_least=True)]


def _run_inside(namespace: str, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="treadle-bench-mooncake-") as folder, (Path(folder) / "log").open("w+") as log:
        command = [
            "ip",
            "netns",
            "exec",
            namespace,
            sys.executable,
            "-m",
            "treadle_bench.mooncake",
            folder,
            "--rounds",
            str(rounds),
        ]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=RUN_SECONDS_MAX, text=True)
        log.seek(0)
        if ran.returncode != 0:
            raise Unavailable(f"mooncake: the measuring process ended with {ran.returncode}: {log.read()[-2000:]}")
        found: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
        return found


# -- inside the namespace -----------------------------------------------------------------------------------------------------


def _main() -> None:
    parser = argparse.ArgumentParser(prog="treadle_bench.mooncake")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    found = _measured(options.folder, options.rounds)
    sys.stdout.write(json.dumps(found) + "\n")


def _measured(folder: Path, rounds: int) -> list[dict[str, Any]]:
    model = qwen_ple_model("bench", prime_base=20_000, row=RowLayout(320, 160, "bf16"))
    with ExitStack() as stack:
        pool = stack.enter_context(pool_process(arguments=["--mooncake-listen", "127.0.0.1:0"]))
        fabric = stack.enter_context(Fabric(engram=pool.address, timeout_seconds=30.0))
        fabric.engram.load_random(model)
        mapped = stack.enter_context(fabric.engram.open(model.name, transport="mapped"))
        by_mooncake = stack.enter_context(fabric.engram.open(model.name, transport="mooncake"))
        theirs = stack.enter_context(_engram_store(folder, model, mapped))
        return [
            _many(model, by_mooncake, mapped, theirs, rounds),
            *(_few(model, by_mooncake, mapped, count, 10 * rounds) for count in FEW),
        ]


def _many(
    model: EngramModel, ours: EngramHandle, mapped: EngramHandle, theirs: Callable[[NDArray[np.int64]], NDArray[np.uint8]], rounds: int
) -> dict[str, Any]:  # fmt: skip
    heads = _head_rows(model)
    chance, offsets = np.random.default_rng(0), np.cumsum([0, *heads[:-1]])
    ids = np.stack([chance.integers(0, rows, (rounds + 1, ROWS // len(heads))) for rows in heads], axis=2)
    out = ours.rows_buffer(ROWS // len(heads))
    expected = mapped.gather(0, ids[rounds] + offsets)
    assert np.array_equal(theirs(ids[rounds]).reshape(expected.shape), expected), "the EngramStore holds another table"
    assert np.array_equal(ours.gather(0, ids[rounds] + offsets, out), expected)
    variants = {
        OWNER: _timed(lambda number: ours.gather(0, ids[number] + offsets, out)), THEIRS: _timed(lambda number: theirs(ids[number])),
    }  # fmt: skip
    return {"rows": ROWS, "baseline": THEIRS, "samples": interleave(variants, rounds)}


def _few(model: EngramModel, ours: EngramHandle, mapped: EngramHandle, count: int, rounds: int) -> dict[str, Any]:
    """Direct reads against asking the owner for as few rows."""
    ids = np.random.default_rng(count).integers(0, sum(_head_rows(model)), (rounds, count, 1))
    source = ours._source
    assert isinstance(source, MooncakeSource)
    out = np.empty((count, 1, model.row.bytes), dtype=np.uint8)
    assert np.array_equal(ours.gather(0, ids[0], out), mapped.gather(0, ids[0]))

    def staged(number: int) -> None:
        direct, source.direct_rows = source.direct_rows, 0
        source.gather(0, ids[number], out)
        source.direct_rows = direct

    variants = {DIRECT: _timed(lambda number: ours.gather(0, ids[number], out)), OWNER: _timed(staged)}
    return {"rows": count, "baseline": OWNER, "samples": interleave(variants, rounds)}


def _timed(act: Callable[[int], object]) -> Callable[[int], float]:
    def run(number: int) -> float:
        begun = time.perf_counter_ns()
        act(number)
        return (time.perf_counter_ns() - begun) / 1e3

    return run


@contextmanager
def _engram_store(
    folder: Path, model: EngramModel, mapped: EngramHandle
) -> Iterator[Callable[[NDArray[np.int64]], NDArray[np.uint8]]]:
    """Mooncake's EngramStore over a store node in a process of its own; ids [tokens, heads] within each head -> their rows."""
    where, heads = Path(sys.executable).parent, _head_rows(model)
    with ExitStack() as stack:
        _started(stack, folder, where / "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={MASTER_PORT}",
                 "--metrics_host=127.0.0.1", f"--metrics_port={METRICS_PORT}", "--default_kv_lease_ttl=600000")  # fmt: skip
        _wait_for(lambda: _metric("/health") is not None)
        _started(stack, folder, where / "mooncake_client", "--host=127.0.0.1", f"--port={NODE_PORT}", "--protocol=tcp",
                 f"--master_server_address=127.0.0.1:{MASTER_PORT}", "--metadata_server=P2PHANDSHAKE", "--global_segment_size=512MB")  # fmt: skip
        _wait_for(lambda: "master_active_clients 1" in (_metric("/metrics") or ""))
        library = load("mooncake.store")
        client = library.MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"127.0.0.1:{MASTER_PORT}")
        assert code == 0, f"the store's client does not start: {code}"
        stack.callback(client.close)
        config = library.EngramStoreConfig()
        config.table_vocab_sizes, config.embedding_dim = heads, model.row.bytes // 4  # it knows float32 only
        store = library.EngramStore(0, config, client)
        first, tables = 0, []
        for rows in heads:
            ids = np.arange(first, first + rows).reshape(-1, 1)
            tables.append(mapped.gather(0, ids).reshape(rows, model.row.bytes).view(np.float32))
            first += rows
        store.populate(tables)
        yield lambda ids: np.asarray(store.lookup(ids[np.newaxis])).view(np.uint8)


def _head_rows(model: EngramModel) -> list[int]:
    return [prime for order in model.primes[0] for prime in order]


def _started(stack: ExitStack, folder: Path, program: Path, *flags: str) -> None:
    log = stack.enter_context((folder / f"{program.name}.log").open("wb"))
    process = subprocess.Popen([str(program), *flags], stdout=log, stderr=log)
    stack.callback(process.wait, START_SECONDS_MAX)
    stack.callback(process.kill)


def _metric(path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}{path}", timeout=2) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + START_SECONDS_MAX
    while not condition():
        if time.monotonic() > until:
            raise Unavailable("mooncake: master or store node did not start; their logs are in the measuring process's folder")
        time.sleep(0.05)


if __name__ == "__main__":
    _main()
