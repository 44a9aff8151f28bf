"""Versions side by side: which is current, who still reads, when memory goes."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve, Served, StartPool

Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]


@contextmanager
def reading(folder: Path, model: str, version: str) -> Iterator[None]:
    """Hold a version as a mapped reader does. In this process: flock belongs to the open file, not to the process."""
    with (folder / model / version / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def versions_on_disk(folder: Path, model: str) -> set[str]:
    return {path.name for path in (folder / model).iterdir() if path.is_dir()} if (folder / model).exists() else set()


async def listed(served: Served) -> list[tuple[str, bool]]:
    answer = await served.stub.ListModels(pb.ListModelsRequest())
    return [(model.ref.version, model.current) for model in answer.models]


async def test_an_old_version_stays_until_its_last_reader_leaves(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        old = (await served.load(ple, None, seed=1)).ref.version
        table = served.pool.find("ple", old).stored.segments[0].rows[:4].copy()
        with reading(folder, "ple", old):
            new = (await served.load(ple, None, seed=2)).ref.version
            assert await served.pool.reap() == 0
            assert await listed(served) == [(new, True), (old, False)]
            request = pb.GatherRequest(ref=pb.ModelRef(model="ple", version=old), rows=np.arange(4).tobytes())
            assert b"".join([message.data async for message in served.stub.Gather(request)]) == table.tobytes()
        assert await served.pool.reap() == 1
        assert await listed(served) == [(new, True)]
        assert versions_on_disk(folder, "ple") == {new}


async def test_the_reaper_deletes_by_itself_and_watchers_hear_of_it(
    serve: Serve, ple: EngramModel, tmp_path: Path, eventually: Eventually
) -> None:
    async with serve() as served:
        old = (await served.load(ple, None, seed=1)).ref.version
        reaper = asyncio.create_task(served.pool.reap_forever(0.01))
        with reading(tmp_path / "segments", "ple", old):
            await served.load(ple, None, seed=2)
            watch = served.stub.WatchModels(pb.WatchModelsRequest())
            assert len((await watch.read()).models) == 2
        assert len((await watch.read()).models) == 1
        await eventually(lambda: len(versions_on_disk(tmp_path / "segments", "ple")) == 1, "the old version is deleted")
        reaper.cancel()


async def test_keep_previous_keeps_the_old_version_until_it_is_removed(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        old = (await served.load(ple, None, seed=1)).ref.version
        new = (await served.load(ple, None, seed=2, keep=True)).ref.version
        assert await served.pool.reap() == 0
        assert await listed(served) == [(new, True), (old, False)]
        answer = await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="ple", version=old)))
        assert ([ref.version for ref in answer.removed], answer.awaiting_readers) == ([old], 0)
        assert await listed(served) == [(new, True)]


async def test_removing_the_current_version_goes_back_to_the_newest_kept_one(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        old = (await served.load(ple, None, seed=1)).ref.version
        new = (await served.load(ple, None, seed=2, keep=True)).ref.version
        await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="ple", version=new)))
        assert await listed(served) == [(old, True)]


async def test_a_removed_version_is_off_the_list_at_once_and_out_of_memory_with_its_last_reader(
    serve: Serve, ple: EngramModel, tmp_path: Path
) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        version = (await served.load(ple, None)).ref.version
        ref = pb.ModelRef(model="ple")
        with reading(folder, "ple", version):
            answer = await served.stub.RemoveModel(pb.RemoveModelRequest(ref=ref))
            assert answer.awaiting_readers == 1
            assert await listed(served) == []
            assert (await served.failure(served.stub.OpenModel(pb.OpenModelRequest(ref=ref))))[0] is grpc.StatusCode.NOT_FOUND
            assert served.pool.occupancy.table_bytes > 0
        await served.pool.reap()
        assert [path.name for path in folder.iterdir()] == ["pool.lock"]
        assert served.pool.occupancy.table_bytes == 0


async def test_a_version_with_a_gather_in_progress_is_not_unmapped(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await served.load(ple, None)
        expected = served.pool.find("ple", "").stored.segments[0].rows[0].tobytes()
        call = served.stub.Gather(pb.GatherRequest(ref=pb.ModelRef(model="ple"), rows=bytes(8 << 17)))
        pieces = [(await call.read()).data]
        answer = await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="ple")))
        assert answer.awaiting_readers == 1
        pieces += [message.data for message in await served.rest(call)]
        assert b"".join(pieces) == expected * (1 << 17)
        assert await served.pool.reap() == 1


async def test_loading_what_is_resident_makes_it_current_again(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        first = (await served.load(ple, None, seed=1)).ref.version
        with reading(folder, "ple", first):
            second = (await served.load(ple, None, seed=2)).ref.version
            assert (await served.load(ple, None, seed=1)).ref.version == first
            assert await listed(served) == [(first, True), (second, False)]
        await served.pool.reap()
        assert await listed(served) == [(first, True)]
        assert versions_on_disk(folder, "ple") == {first}


async def test_many_models_stand_beside_each_other(
    serve: Serve, ple: EngramModel, demo: EngramModel, v41: EngramModel, token_map: NDArray[np.int32]
) -> None:
    async with serve() as served:
        for model in (v41, ple, demo):
            await served.load(model, None if model is ple else token_map)
        answer = await served.stub.ListModels(pb.ListModelsRequest())
        assert [(model.ref.model, model.current) for model in answer.models] == [("demo", True), ("ple", True), ("v41", True)]
        assert served.metric("models_resident") == 3


async def test_current_kept_and_removed_versions_survive_a_restart(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        kept = (await served.load(ple, None, seed=1)).ref.version
        held = (await served.load(ple, None, seed=2, keep=True)).ref.version
        current = (await served.load(ple, None, seed=3, keep=True)).ref.version
        lock = (folder / "ple" / held / "lock").open()
        fcntl.flock(lock, fcntl.LOCK_SH)
        await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="ple", version=held)))
    async with serve() as served:
        assert await listed(served) == [(current, True), (kept, False)]
        assert await served.pool.reap() == 0
        lock.close()
        assert await served.pool.reap() == 1
        assert versions_on_disk(folder, "ple") == {kept, current}


async def test_a_damaged_current_file_falls_back_to_the_newest_version(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    async with serve() as served:
        await served.load(ple, None, seed=1)
        newest = (await served.load(ple, None, seed=2, keep=True)).ref.version
    (tmp_path / "segments" / "ple" / "current.json").write_text("{")
    async with serve() as served:
        assert (await listed(served))[0] == (newest, True)


def test_readers_in_other_processes_are_counted(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel, until: Callable[[Callable[[], bool], str], None]
) -> None:
    with start_pool(shm_folder) as process:
        process.fabric.engram.load_random(ple)
        handles = [process.fabric.engram.open("ple", transport="mapped") for _ in range(2)]
        assert process.fabric.engram.list_models()[0].readers == 1  # two handles, one process
        for handle in handles:
            handle.close()
        assert process.fabric.engram.list_models()[0].readers == 0


async def test_the_pools_own_maps_are_no_readers(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        assert (await served.load(ple, None)).readers == 0
        assert served.metric("open_readers") == 0


async def test_segments_that_nobody_reads_go_with_a_pool_that_is_not_to_keep_them(
    serve: Serve, ple: EngramModel, demo: EngramModel, token_map: NDArray[np.int32], tmp_path: Path
) -> None:
    folder = tmp_path / "segments"
    async with serve(keep_segments=False) as served:
        await served.load(demo, token_map)
        version = (await served.load(ple, None)).ref.version
        lock = (folder / "ple" / version / "lock").open()
        fcntl.flock(lock, fcntl.LOCK_SH)
    assert versions_on_disk(folder, "ple") == {version}
    assert not versions_on_disk(folder, "demo")
    lock.close()
    async with serve(keep_segments=False) as served:
        assert await listed(served) == [(version, True)]
    assert not folder.exists()
