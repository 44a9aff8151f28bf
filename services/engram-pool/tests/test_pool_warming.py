"""Mapping returns at once; pages come in the background, in the pool and in each reader; gathers work meanwhile."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engram_pool.domain.calibration import stretch_to_measure
from treadle.contract import EngramModel, RowLayout
from treadle.contract.families import qwen_ple_model
from treadle.contract.warm_state import WarmState
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.kernels.numa import nodes

if TYPE_CHECKING:
    from tests.conftest import Process, Serve, StartPool

Until = Callable[[Callable[[], bool], str], None]
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]


@pytest.fixture(scope="session")
def wide() -> EngramModel:
    """One layer of 256 MB."""
    return qwen_ple_model("wide", prime_base=50_000, row=RowLayout(320, 160, "bf16"))


def metric(process: Process, name: str) -> float:
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=5) as answer:
        (line,) = [line for line in answer.read().decode().splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


def warm_state(process: Process) -> WarmState:
    (model,) = process.fabric.engram.list_models()
    return model.warm_state


def test_pool_and_reader_are_warm_after_a_while_and_usable_before(
    start_pool: StartPool, shm_folder: Path, wide: EngramModel, until: Until
) -> None:
    with start_pool(shm_folder, "--keep-segments", "false", "--numa", "interleave") as process:
        loaded = process.fabric.engram.load_random(wide)
        until(lambda: warm_state(process) is WarmState.WARM, "the pool's pages are entered")
        assert metric(process, "treadle_engram_warm_bytes") == loaded.segment_bytes
        assert metric(process, 'treadle_engram_versions{warm="warm"}') == 1
        with process.fabric.engram.open("wide", transport="mapped") as handle:
            before = handle.gather(0, np.arange(16).reshape(1, 16))  # whatever is entered by now
            until(lambda: handle.warm_state is WarmState.WARM, "the reader's pages are entered")
            assert np.array_equal(handle.gather(0, np.arange(16).reshape(1, 16)), before)
        node_bytes = sum(metric(process, f'treadle_engram_node_bytes{{node="{node}"}}') for node in nodes())
        assert node_bytes in (0, pytest.approx(loaded.segment_bytes, rel=0.01))  # 0: the kernel does not tell
        with process.fabric.engram.open("wide", transport="rpc") as handle:
            assert handle.warm_state is WarmState.UNKNOWN
        with process.fabric.engram.open("wide", transport="local") as handle:
            assert handle.warm_state is WarmState.WARM
        until(lambda: "prefetch distance chosen" in process.log.read_text(), "the pool has measured on its first warm version")
        assert process.stop() == 0


async def test_the_prefetch_distance_is_measured_on_warm_rows_that_are_here(
    serve: Serve, shm_folder: Path, ple: EngramModel, eventually: Eventually
) -> None:
    rows, row_bytes = ple.rows_hashed(0), ple.row.bytes
    async with serve(folder=shm_folder, keep_segments=False) as served:
        await served.load(ple, None)
        (resident,) = served.pool.residents()
        await eventually(lambda: resident.warm_state is WarmState.WARM, "its pages are entered")
        found = stretch_to_measure([resident], rows * row_bytes)
        assert found is not None
        assert found[0] is resident
        assert found[1].shape == (rows, row_bytes)
        assert stretch_to_measure([resident], rows * row_bytes + 1) is None  # it says nothing of memory
        resident.closing = True
        assert stretch_to_measure([resident], 1) is None
        resident.closing = False
        placement = pb.Placement(owners=["a", "b"], owner="a", replicas=1, stretch_rows=1024)
        part = pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource(seed=0), placement=placement)
        assert [event async for event in served.stub.LoadTable(part)]
        (resident,) = served.pool.residents()
        await eventually(lambda: resident.warm_state is WarmState.WARM, "the pages of the part are entered")
        held = resident.stored.held[0]
        found = stretch_to_measure([resident], 1)
        assert held is not None
        assert found is not None
        assert len(found[1]) == max(last - first for first, last in held) < rows


def test_a_rate_holds_the_pool_back_and_a_stop_does_not_wait_for_it(
    start_pool: StartPool, shm_folder: Path, wide: EngramModel
) -> None:
    with start_pool(shm_folder, "--warm-bytes-per-second", str(8 << 20), "--keep-segments", "false") as process:
        process.fabric.engram.load_random(wide)
        assert warm_state(process) is WarmState.WARMING
        assert metric(process, "treadle_engram_warm_bytes") < 200 << 20  # at full speed it is done by now
        begun = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - begun < 15  # 32 seconds' worth was left


def test_tables_on_disk_stay_cold_and_evictable(start_pool: StartPool, tmp_path: Path, ple: EngramModel) -> None:
    with start_pool(tmp_path / "disk") as process:
        process.fabric.engram.load_random(ple)
        assert warm_state(process) is WarmState.COLD
        with process.fabric.engram.open("ple", transport="mapped") as handle:
            assert handle.warm_state is WarmState.COLD
        assert process.stop() == 0
