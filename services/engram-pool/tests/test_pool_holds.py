"""HoldModel, calls whose reader stalls, threads that hang: who keeps what, and for how long."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from engram_pool.domain.compute import Compute
from treadle.contract import EngramModel, NotFound, Unavailable
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Grow, Serve, Served, V41Checkpoint

Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
PLE = pb.ModelRef(model="ple")


async def gathered(served: Served, version: str) -> bytes:
    request = pb.GatherRequest(ref=pb.ModelRef(model="ple", version=version), rows=np.arange(64).tobytes())
    return b"".join([message.data for message in await served.rest(served.stub.Gather(request))])


async def test_a_held_version_counts_a_reader_and_is_freed_only_when_the_caller_leaves(
    serve: Serve, ple: EngramModel, eventually: Eventually
) -> None:
    async with serve() as served:
        old = (await served.load(ple, None, seed=1)).ref.version
        hold = served.stub.HoldModel(pb.HoldModelRequest(ref=PLE))
        assert (await hold.read()).ref.version == old
        expected = await gathered(served, old)
        await served.load(ple, None, seed=2)
        assert await served.pool.reap() == 0
        assert await gathered(served, old) == expected != await gathered(served, "")
        models = (await served.stub.ListModels(pb.ListModelsRequest())).models
        assert [model.readers for model in models if model.ref.version == old] == [1]
        assert served.metric("open_readers") == 1
        hold.cancel()
        await eventually(lambda: served.pool.readers.open_readers() == 0, "the hold is over")
        assert await served.pool.reap() == 1


async def test_a_removed_version_is_read_by_its_version_until_its_hold_ends(
    serve: Serve, grow: Grow, eventually: Eventually
) -> None:
    grown = grow()
    version, ids = grown.model.version, np.arange(300)
    ref = pb.ModelRef(model="kjv", version=version)
    windows = pb.Windows(
        tokens=np.arange(8).tobytes(), starts=np.array([0, 8], np.int32).tobytes(), lookback=np.full((1, 2), -1).tobytes()
    )

    def calls(ref: pb.ModelRef) -> list[Any]:
        return [
            served.stub.Gather(pb.GatherRequest(ref=ref, layer=1, rows=ids.tobytes())),
            served.stub.Lookup(pb.LookupRequest(ref=ref, windows=windows)), served.stub.ReadFusion(pb.ReadFusionRequest(ref=ref)),
        ]  # fmt: skip

    async def answers(ref: pb.ModelRef) -> list[bytes]:
        return [b"".join([message.data for message in await served.rest(call)]) for call in calls(ref)]

    async with serve() as served:
        await asyncio.to_thread(served.fabric.engram.load_grown, grown.path)
        hold = served.stub.HoldModel(pb.HoldModelRequest(ref=ref))
        await hold.read()
        before = await answers(ref)
        assert (before[0], before[2]) == (grown.tables[1][:300].tobytes(), grown.fusion)
        removal = await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="kjv")))
        assert (removal.awaiting_readers, await served.pool.reap()) == (1, 0)
        assert await answers(ref) == before
        for call in calls(pb.ModelRef(model="kjv")):  # without a version, it is gone
            assert (await served.failure(call))[0] is grpc.StatusCode.NOT_FOUND
        again = served.stub.HoldModel(pb.HoldModelRequest(ref=ref))
        assert (await again.read()).ref == ref
        hold.cancel()
        await eventually(lambda: served.pool.readers.open_readers() == 1, "the first hold is over")
        assert await served.pool.reap() == 0
        assert await answers(ref) == before
        again.cancel()
        await eventually(lambda: served.pool.readers.open_readers() == 0, "the second hold is over")
        assert await served.pool.reap() == 1
        for call in [*calls(ref), served.stub.HoldModel(pb.HoldModelRequest(ref=ref))]:
            assert (await served.failure(call))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_handle_by_rpc_outlives_the_removal_of_its_memory(serve: Serve, ple: EngramModel, eventually: Eventually) -> None:
    ids = np.arange(64, dtype=np.int64).reshape(-1, 1)
    async with serve() as served:
        await served.load(ple, None)
        handle = await asyncio.to_thread(served.fabric.engram.open, "ple", transport="rpc")
        before = await asyncio.to_thread(handle.gather, 0, ids)
        assert await asyncio.to_thread(served.fabric.engram.remove, "ple") == ([handle.version], 1)
        assert np.array_equal(await asyncio.to_thread(handle.gather, 0, ids), before)
        with pytest.raises(NotFound, match="no model 'ple'"):
            await asyncio.to_thread(served.fabric.engram.open, "ple", handle.version, transport="rpc")
        await asyncio.to_thread(handle.close)
        await eventually(lambda: served.pool.readers.open_readers() == 0, "the hold is over")
        assert await served.pool.reap() == 1


async def test_holds_have_a_limit_know_their_versions_and_end_with_the_pool(serve: Serve, ple: EngramModel) -> None:
    async with serve(holds_max=1) as served:
        await served.load(ple, None)
        code, _, _ = await served.failure(
            served.stub.HoldModel(pb.HoldModelRequest(ref=pb.ModelRef(model="ple", version="0" * 64)))
        )
        assert code is grpc.StatusCode.NOT_FOUND
        hold = served.stub.HoldModel(pb.HoldModelRequest(ref=PLE))
        await hold.read()
        code, _, details = await served.failure(served.stub.HoldModel(pb.HoldModelRequest(ref=PLE)))
        assert (code, float(details["treadle-retry-after-seconds"]) > 0) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        await served.pool.drain()
        assert (await served.failure(hold))[0] is grpc.StatusCode.UNAVAILABLE


async def test_after_a_restart_superseded_versions_stay_until_readers_could_hold_them_again(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        old = (await served.load(ple, None, seed=1)).ref.version
        await served.load(ple, None, seed=2)
    async with serve(reap_grace_seconds=60) as served:
        assert await served.pool.reap() == 0
        hold = served.stub.HoldModel(pb.HoldModelRequest(ref=pb.ModelRef(model="ple", version=old)))
        assert (await hold.read()).ref.version == old
    async with serve() as served:
        assert await served.pool.reap() == 1


async def test_a_caller_who_stops_reading_gives_his_place_back_when_the_time_is_over(
    serve: Serve, ple: EngramModel, eventually: Eventually
) -> None:
    async with serve(gathers_max=1, gather_seconds_max=0.5) as served:
        version = (await served.load(ple, None)).ref.version
        stalled = served.stub.Gather(pb.GatherRequest(ref=PLE, rows=bytes(8 << 17)))
        await stalled.read()
        resident = served.pool.find("ple", version)
        await eventually(lambda: resident.calls == 0, "the version is free again")
        assert served.metric("gathers_total", transport="rpc", outcome="late") == 1
        request = pb.GatherRequest(ref=PLE, rows=np.arange(4).tobytes())
        assert len([message async for message in served.stub.Gather(request)]) == 1
        stalled.cancel()


async def test_pipes_devices_and_links_that_lead_out_are_refused_and_no_load_hangs(
    serve: Serve, ple: EngramModel, v41_checkpoint: V41Checkpoint, tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    for name in ("pipe", "device", "link", "config"):
        (allowed / name).mkdir(parents=True)
    os.mkfifo(allowed / "pipe" / "a.safetensors")
    (allowed / "device" / "a.safetensors").symlink_to("/dev/zero")
    (allowed / "link" / "a.safetensors").symlink_to(next(v41_checkpoint.folder.glob("*.safetensors")))
    (allowed / "config" / "config.json").symlink_to(v41_checkpoint.folder / "config.json")
    (allowed / "config" / "a.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")

    def order(path: Path) -> pb.LoadTableRequest:
        return pb.LoadTableRequest(manifest_json=ple.to_json(), checkpoint=pb.CheckpointSource(path=str(path)))

    for checkpoint_dir, name, says in (
        (None, "pipe", "no plain file"), (None, "pipe/a.safetensors", "no plain file"), (None, "device", "no plain file"),
        (allowed, "link", "outside checkpoint_dir"), (allowed, "config", "outside checkpoint_dir"),
    ):  # fmt: skip
        async with serve(checkpoint_dir=checkpoint_dir) as served:
            code, text, _ = await served.failure(served.stub.LoadTable(order(allowed / name), timeout=10))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert says in text


async def test_a_thread_that_hangs_holds_up_neither_who_may_leave_nor_the_end() -> None:
    compute, go = Compute(1), threading.Event()
    brought: list[bool] = []
    task = asyncio.create_task(compute.run_or_leave(lambda: go.wait(20), brought.append))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stuck = asyncio.create_task(compute.run(go.wait, 20))
    await asyncio.sleep(0)
    begun = time.monotonic()
    compute.close(0.1)
    with pytest.raises(Unavailable):
        await stuck
    assert time.monotonic() - begun < 5
    go.set()
