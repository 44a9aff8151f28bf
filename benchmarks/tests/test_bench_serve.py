"""`treadle bench serve`: rounds are what was asked, latency is really added, and a comparison says what it compares."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from treadle.contract.errors import InvalidArgument
from treadle.nn import model_fetch
from treadle_bench.answers import Lines
from treadle_bench.serve.command import run_and_show
from treadle_bench.serve.driving import Fleet, Round, Shape
from treadle_bench.serve.pools import pool_with_table
from treadle_bench.serve.processes import EMBEDDED, WorkerSpec, key_file, key_of, ready_process, worker_process
from treadle_bench.serve.tables import Result, Run, _compared, _look_for_mooncake, _one_worker

SHAPE = Shape(batch=2, prompt=8, new=4)


@pytest.mark.slow
def test_a_round_counts_its_tokens_and_the_workers_own_tickets() -> None:
    folder = model_fetch.fetch("smollm2-135m")
    with key_file() as key, pool_with_table(folder, key) as pool:
        spec = WorkerSpec(EMBEDDED, "socket", pool.address)
        with worker_process(spec, folder, SHAPE.batch, key) as address, Fleet([address], key_of(key)) as fleet:
            took = fleet.round(SHAPE, seed=1)
    assert took.tokens == 8
    assert len(took.first) == 2
    assert took.tickets == 2 * took.steps
    assert took.step_seconds > took.stall_seconds >= 0
    assert (took.degraded, took.rows_missing) == (0, 0)


WITHOUT_MOONCAKE = "import runpy, sys; sys.modules['mooncake'] = None; runpy.run_module('inference_worker', run_name='__main__')"


@pytest.mark.slow
def test_an_environment_of_the_worker_without_mooncake_is_named_and_the_rest_measured() -> None:
    found = Result()
    _look_for_mooncake(found)
    if not found.mooncake:
        pytest.skip(found.skipped[0])  # it says what to install
    folder = model_fetch.fetch("smollm2-135m")
    with key_file() as key, pool_with_table(folder, key, mooncake=True) as pool:
        run = Run(EMBEDDED, (sys.executable, "-c", WITHOUT_MOONCAKE), folder, key, SHAPE, 1)
        _one_worker(run, pool, found)
    assert not found.mooncake
    (note,) = found.skipped
    assert note.startswith("embedded: rows by mooncake: ")
    assert "pip install treadle[mooncake]" in note
    assert {row.name for row in found.rows} == {"no engram", "local", "mapped", "socket"}


@pytest.fixture
def echo() -> Iterator[int]:
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            while piece := connection.recv(1024):
                connection.sendall(piece)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.close()


def test_the_forwarder_brings_everything_later_and_in_order(echo: int) -> None:
    argv = [sys.executable, "-m", "treadle_bench.serve.delay", "127.0.0.1", str(echo), "0.05"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        line = Lines(child.stdout).within(20)
        assert line is not None
        with socket.create_connection(("127.0.0.1", json.loads(line)["port"])) as connection:
            begun = time.monotonic()
            for piece in (b"a", b"b", b"c"):
                connection.sendall(piece)
            got = b""
            while len(got) < 3:
                got += connection.recv(16)
            took = time.monotonic() - begun
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
    assert got == b"abc"
    assert took >= 0.05


def test_a_comparison_names_its_baseline_and_what_the_tickets_did() -> None:
    fast = [
        Round(
            seconds=1.0,
            tokens=20,
            first=[0.1],
            gaps=[0.01, 0.02],
            step_seconds=1.0,
            stall_seconds=0.01,
            tickets=10,
            tickets_in_time=9,
        )
    ]
    slow = [Round(seconds=2.0, tokens=20, first=[0.2], gaps=[0.02, 0.04], step_seconds=2.0)]
    with key_file() as key:
        rows = _compared(Run(EMBEDDED, (), key, key, SHAPE, 1), {"mapped": fast, "no engram": slow}, {"hosts": 1}, "no engram")
    throughput = next(row for row in rows if row.name == "mapped" and row.params["of"] == "throughput")
    assert (throughput.median, throughput.ratio) == (20.0, 2.0)
    stall = next(row for row in rows if row.params["of"] == "stall of a ticket")
    assert (stall.median, stall.params["of_step"], stall.params["in_time"]) == (1000.0, "1.000%", "9/10")


def test_a_service_that_does_not_start_says_why() -> None:
    argv = [sys.executable, "-m", "engram_pool", "--listen", "nonsense"]
    with pytest.raises(RuntimeError, match=r"exit code 2 .* host:port"), ready_process(argv, "the pool"):
        pass


def test_an_engine_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="both"):
        run_and_show(quick=True, as_json=False, engine="fast", worker_command="", model_dir=None)
