"""Local, mapped, rpc and fake rows of one pool: the same bytes for the same tokens."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.client import AsyncFabric, Endpoint, Fabric
from treadle.client.engram import EngramHandle, EngramPool, StepPrefetcher, fake_handle
from treadle.contract import (
    Deadline,
    EngramModel,
    FingerprintMismatch,
    NotFound,
    RowLayout,
    RowOutOfRange,
    Unavailable,
    WaitPolicy,
    Windows,
)
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model

VOCABULARY = 3000
TOKEN_MAP = (np.arange(VOCABULARY) * 7 % 2500).astype(np.int32)
DIGEST = hashlib.sha256(TOKEN_MAP.astype("<i4").tobytes()).hexdigest()
TRANSPORTS = ("mapped", "local", "ring", "socket", "rpc")
MODELS = (
    demo_model(
        "demo",
        layers=(1, 4),
        token_map=DIGEST,
        compressed_vocab_size=2500,
        pad_id=2,
        prime_base=5000,
        row=RowLayout(320, 160, "bf16"),
    ),
    deepseek_v41_model("v41", token_map=DIGEST, pad_id=2, compressed_vocab_size=2500, layers=(1, 3), prime_base=3000),
    qwen_ple_model("ple", eos_id=2, vocabulary=VOCABULARY, prime_base=4000, row=RowLayout(64, 32, "bf16")),
)


class Pool:
    """A pool process that can be killed and started again on the same address and folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "engram_pool",
            "--listen",
            self.address,
            "--segment-dir",
            str(self.folder),
            "--log-level",
            "warning",
        ]
        self.process = subprocess.Popen([*command, "--metrics-listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["listen"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="treadle-congruence-", dir="/dev/shm") as folder:
        Path(folder).chmod(0o750)
        running = Pool(Path(folder))
        with EngramPool(Endpoint(running.address)) as client:
            for model in MODELS:
                client.load_random(model, TOKEN_MAP if model.token_map else None, seed=5)
        yield running
        running.stop()


@pytest.fixture(scope="module")
def handles(pool: Pool) -> Iterator[dict[str, dict[str, EngramHandle]]]:
    with ExitStack() as stack:
        client = stack.enter_context(EngramPool(Endpoint(pool.address)))
        opened: dict[str, dict[str, EngramHandle]] = {}
        for model in MODELS:
            mine = {each: stack.enter_context(client.open(model.name, transport=each)) for each in TRANSPORTS}
            ids = {layer: np.arange(model.rows_hashed(layer), dtype=np.int64).reshape(-1, 1) for layer in model.layers}
            tables = {layer: mine["mapped"].gather(layer, every)[:, 0] for layer, every in ids.items()}
            token_map = TOKEN_MAP if model.token_map else None
            mine["fake"] = stack.enter_context(fake_handle(mine["mapped"].model, token_map, tables))
            opened[model.name] = mine
        yield opened


@st.composite
def steps(draw: Any) -> list[tuple[list[int], int]]:
    token = st.integers(0, VOCABULARY - 1) | st.just(2)  # 2 is pad and, for qwen-ple, end of sequence
    sequences = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=5))
    return [(ids, draw(st.integers(0, len(ids) - 1))) for ids in sequences]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=steps())
def test_every_transport_gives_the_same_bytes(
    model: EngramModel, step: list[tuple[list[int], int]], handles: dict[str, dict[str, EngramHandle]]
) -> None:
    windows = Windows.of_sequences(step, model.order_max - 1)
    expected = handles[model.name]["mapped"].lookup(windows)
    for name, handle in handles[model.name].items():
        looked_up = handle.lookup(windows)
        prefetched = handle.prefetch(windows, {layer: Deadline.after(0.01) for layer in model.layers}).wait(WaitPolicy(10.0))
        for layer in model.layers:
            assert np.array_equal(looked_up[layer], expected[layer]), name
            assert prefetched[layer].missing is None
            assert np.array_equal(prefetched[layer].rows, expected[layer]), name


def test_dead_tokens_travel_by_every_transport(handles: dict[str, dict[str, EngramHandle]]) -> None:
    dead = np.array([False, True, True, False, False])
    windows = Windows(
        tokens=np.arange(10, 15, dtype=np.int64), starts=np.array([0, 5], dtype=np.int32), lookback=np.full((1, 3), 7, dtype=np.int64),
        dead=dead, lookback_dead=np.array([[False, True, False]]),
    )  # fmt: skip
    answers = [handle.lookup(windows)[1] for handle in handles["v41"].values()]
    alive = handles["v41"]["mapped"].lookup(Windows(windows.tokens, windows.starts, windows.lookback))[1]
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    assert not np.array_equal(answers[0][3], alive[3])


def test_gather_by_id_is_the_same_and_refuses_the_same(handles: dict[str, dict[str, EngramHandle]]) -> None:
    ids = np.random.default_rng(0).integers(0, MODELS[0].rows_hashed(4), size=(50, 16), dtype=np.int64)
    expected = handles["demo"]["mapped"].gather(4, ids)
    beyond = ids.copy()
    beyond[3, 3] = 10**9
    for handle in handles["demo"].values():
        assert np.array_equal(handle.gather(4, ids), expected)
        with pytest.raises(RowOutOfRange, match="1000000000"):
            handle.gather(4, beyond)


def test_a_large_answer_comes_in_pieces(handles: dict[str, dict[str, EngramHandle]]) -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, size=3000).tolist()  # 15 MB of rows for each layer
    windows = Windows.of_sequences([(ids, 0)], 2)
    by_rpc, mapped = handles["demo"]["rpc"].lookup(windows), handles["demo"]["mapped"].lookup(windows)
    assert all(np.array_equal(by_rpc[layer], mapped[layer]) for layer in (1, 4))


def test_what_does_not_fit_is_refused_by_name(pool: Pool) -> None:
    with Fabric(engram=pool.address) as fabric:
        with pytest.raises(NotFound, match="nobody"):
            fabric.engram.open("nobody")
        with pytest.raises(NotFound):
            fabric.engram.open("demo", "0" * 64)
        with pytest.raises(FingerprintMismatch) as refusal:
            fabric.engram.open("demo", expected={"row_bytes": "264"})
        assert refusal.value.field == "row_bytes"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handle_keeps_its_version_when_a_new_one_is_loaded(transport: str, pool: Pool) -> None:
    windows, template = Windows.of_sequences([([5, 6, 7], 0)], 2), replace(MODELS[0], name=f"swap-{transport}")
    with EngramPool(Endpoint(pool.address)) as client:
        old = client.load_random(template, TOKEN_MAP, seed=1).version
        with client.open(template.name, transport=transport) as handle:
            expected = handle.lookup(windows)
            new = client.load_random(template, TOKEN_MAP, seed=2).version
            assert new != old
            time.sleep(2)  # longer than the pool takes to free what nobody holds
            assert all(np.array_equal(rows, expected[layer]) for layer, rows in handle.lookup(windows).items())
            with client.open(template.name, transport=transport) as fresh:
                assert fresh.version == new
                assert not np.array_equal(fresh.lookup(windows)[1], expected[1])
        client.remove(template.name)


async def test_the_asyncio_door_opens_the_same_handles(pool: Pool, handles: dict[str, dict[str, EngramHandle]]) -> None:
    windows = Windows.of_sequences([([5, 6, 7], 0)], 2)
    async with AsyncFabric(engram=pool.address) as fabric:
        assert {resident.model.name for resident in await fabric.engram.list_models()} == {"demo", "v41", "ple"}
        assert await fabric.engram.run(lambda pool: pool.verify("demo")) > 0
        for transport in TRANSPORTS:
            with await fabric.engram.open("demo", transport=transport) as handle:
                ticket = handle.prefetch(windows, {1: Deadline.after(0.1), 4: Deadline.after(0.1)})
                await ticket.arrived(1)
                await ticket.arrived(4)
                rows = ticket.wait(WaitPolicy(0.0))
                assert np.array_equal(rows[4].rows, handles["demo"]["mapped"].lookup(windows)[4])


def test_mapped_rows_outlive_the_pool_and_rpc_finds_it_again(pool: Pool) -> None:
    windows = Windows.of_sequences([([5, 6, 7, 8], 0)], 2)
    with (
        EngramPool(Endpoint(pool.address)) as client,
        client.open("demo", transport="mapped") as mapped,
        client.open("demo", transport="rpc") as far,
    ):
        expected = mapped.lookup(windows)
        pool.kill()
        assert np.array_equal(mapped.lookup(windows)[1], expected[1])
        with pytest.raises(Unavailable, match=pool.address):
            client.list_models()
        with pytest.raises(Unavailable):
            far.lookup(windows)
        step = StepPrefetcher(far, policy=WaitPolicy(20.0)).begin(windows)  # begun while the pool is down, served once it is back
        pool.start()
        assert np.array_equal(step.rows(1).rows, expected[1])
        assert np.array_equal(step.rows(4).rows, expected[4])
        assert np.array_equal(far.lookup(windows)[4], expected[4])
        assert mapped.version == far.version
        assert [r.version for r in client.list_models() if r.model.name == "demo"] == [mapped.version]
