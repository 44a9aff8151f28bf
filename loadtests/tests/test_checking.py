"""The checking client: it knows every row by itself, and what is wrong it finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from treadle.client.engram import EngramHandle, fake_handle
from treadle.contract import Unavailable
from treadle_bench.pool_process import pool_process
from treadle_loadtests import checking
from treadle_loadtests.checking import CheckingClient, Task
from treadle_loadtests.counters import REASON_BYTES_MAX, Counters, totals, version_head
from treadle_loadtests.rows import MODEL, Steps, Truth, template, token_map

PRIME_BASE = 200
TRUTH = Truth(1, PRIME_BASE)


def task(folder: Path) -> Task:
    return Task("127.0.0.1:1", "mapped", (1, 2), PRIME_BASE, 2, 0, str(folder / "counters"))


def handle_of(flip: tuple[int, int] | None) -> EngramHandle:
    tables = {layer: rows.copy() for layer, rows in TRUTH.tables.items()}
    if flip is not None:
        layer, row = flip
        tables[layer][row, 5] ^= 1
    return fake_handle(TRUTH.model, token_map(), tables)


def work(client: CheckingClient, handle: EngramHandle, enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    thread = threading.Thread(target=lambda: client._use(handle))
    thread.start()
    give_up = threading.Event()
    for _ in range(1_000):
        if enough(client.counters.read()):
            break
        give_up.wait(0.01)
    client.over.set()
    thread.join(10)
    return client.counters.read()


def test_rows_are_those_of_a_real_pool() -> None:
    with pool_process() as pool:
        from treadle.client import Fabric

        with Fabric(engram=pool.address) as fabric:
            loaded = fabric.engram.load_random(template(PRIME_BASE), token_map(), seed=1)
            assert loaded.version == TRUTH.version
            steps = Steps(4, 3, PRIME_BASE, seed=2)
            with fabric.engram.open(MODEL) as handle:
                for number, windows in enumerate(steps.windows):
                    for layer, rows in handle.lookup(windows).items():
                        assert TRUTH.wrong(layer, steps.ids[number][layer], rows) == 0


def test_right_rows_are_counted_and_none_is_called_wrong(tmp_path: Path) -> None:
    seen = work(CheckingClient(task(tmp_path)), handle_of(None), lambda now: now["gathers"] > 300)
    assert seen["gathers"] > 300
    assert seen["rows"] == seen["gathers"] * 2 * 16
    assert (seen["wrong_rows"], seen["failed"]) == (0, 0)
    assert seen["version_head"] == version_head(TRUTH.version)


def test_one_flipped_bit_of_one_row_is_found(tmp_path: Path) -> None:
    client = CheckingClient(task(tmp_path))
    row = int(client._steps.ids[7][4][0, 0])
    seen = work(client, handle_of((4, row)), lambda now: now["wrong_rows"] > 0)
    assert seen["wrong_rows"] > 0
    assert "wrong rows of layer 4" in client.counters.reasons()[0]


def test_rows_of_another_version_are_wrong(tmp_path: Path) -> None:
    other = Truth(2, PRIME_BASE)
    ids = np.arange(8, dtype=np.int64)[None]
    assert other.wrong(1, ids, TRUTH.tables[1][ids]) == 8


def test_a_failed_request_is_counted_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, handle = CheckingClient(task(tmp_path)), handle_of(None)
    monkeypatch.setattr(handle, "gather", lambda *_: (_ for _ in ()).throw(Unavailable("nobody answers")))
    seen = work(client, handle, lambda now: now["failed"] > 0)
    assert seen["failed"] > 0
    assert "Unavailable: nobody answers" in client.counters.reasons()[0]


def test_counters_outlive_their_writer_and_reasons_are_bounded(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "c")
    counters.add("gathers", 3)
    counters.largest("slowest_call_us", 70)
    counters.largest("slowest_call_us", 20)
    for _ in range(3_000):
        counters.say("x" * 50)
    again = Counters(tmp_path / "c")
    assert (again.read()["gathers"], again.read()["slowest_call_us"]) == (3, 70)
    assert counters.reasons_path.stat().st_size < REASON_BYTES_MAX + 100
    assert totals([again.read(), again.read()])["gathers"] == 6
    assert totals([again.read(), again.read()])["slowest_call_us"] == 70


def test_a_task_survives_the_command_line(tmp_path: Path) -> None:
    assert checking.Task.from_json(task(tmp_path).to_json()) == task(tmp_path)
