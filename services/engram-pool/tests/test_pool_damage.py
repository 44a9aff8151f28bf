"""Killed pools, torn files, flipped bytes, folders that are not ours: nothing wrong is ever served."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from engram_pool.adapters.segment_folder import CORRUPT_KEPT_MAX, SegmentFolder
from engram_pool.domain.compute import Compute
from engram_pool.domain.storing import Adopted
from treadle.contract import EngramModel, InvalidArgument, Unavailable
from treadle.contract.families import qwen_ple_model
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve, StartPool
    from tests.flipping import flip_byte
else:
    from flipping import flip_byte

ROWS_AT = 64 << 10  # of the small tables here


def put_behind_a_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def segment_of(folder: Path, model: str, version: str, layer: int = 0) -> Path:
    return folder / model / version / f"layer-{layer}.safetensors"


def adopt(folder: Path, *, checksums: bool = True) -> Adopted:
    store = SegmentFolder(folder)
    adopted = store.adopt(checksums=checksums)
    for stored in adopted.versions:
        store.release(stored)
    store.close(remove_if_empty=False)
    return adopted


def test_kill_in_the_middle_of_a_load_leaves_nothing_visible_and_the_next_start_sweeps(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel
) -> None:
    big = qwen_ple_model("big", prime_base=100_000, row=ple.row)  # 512 MB: about a second
    with start_pool(shm_folder) as process:
        process.fabric.engram.load_random(ple)

        def kill(progress: object) -> None:
            if getattr(progress, "bytes_done", 0):
                process.kill()

        with pytest.raises(Unavailable):
            process.fabric.engram.load_random(big, progress=kill)
    (partial,) = shm_folder.glob(".loading-*")
    assert sum(path.stat().st_blocks for path in partial.iterdir()) > 0
    with start_pool(shm_folder) as process:
        assert [model.model.name for model in process.fabric.engram.list_models()] == ["ple"]
        assert not list(shm_folder.glob(".loading-*"))
        assert process.stop() == 0


def test_a_killed_pool_comes_back_with_its_tables_and_mapped_readers_go_on(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel
) -> None:
    ids = np.arange(16).reshape(1, 16)
    with start_pool(shm_folder) as process:
        version = process.fabric.engram.load_random(ple).version
        handle = process.fabric.engram.open("ple", transport="mapped")
        before = handle.gather(0, ids).copy()
        process.kill()
        assert np.array_equal(handle.gather(0, ids), before)
    with start_pool(shm_folder) as process:
        (model,) = process.fabric.engram.list_models()
        assert (model.version, model.readers, model.current) == (version, 1, True)
        handle.close()
        assert np.array_equal(process.fabric.engram.open("ple", transport="rpc").gather(0, ids), before)


async def test_a_flipped_byte_is_data_loss_and_the_version_leaves_service(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        good = (await served.load(ple, None, seed=1)).ref.version
        bad = (await served.load(ple, None, seed=2, keep=True)).ref.version
        progress = [m.progress async for m in served.stub.VerifyModel(pb.VerifyModelRequest(ref=pb.ModelRef(model="ple")))]
        assert progress[-1].bytes_done == progress[-1].bytes_total > 0
        flip_byte(segment_of(folder, "ple", bad), ROWS_AT + 1000)
        code, text, _ = await served.failure(served.stub.VerifyModel(pb.VerifyModelRequest(ref=pb.ModelRef(model="ple"))))
        assert code is grpc.StatusCode.DATA_LOSS
        assert "chunk 0" in text
        request = pb.OpenModelRequest(ref=pb.ModelRef(model="ple", version=bad))
        assert (await served.failure(served.stub.OpenModel(request)))[0] is grpc.StatusCode.NOT_FOUND
        answer = await served.stub.ListModels(pb.ListModelsRequest())
        assert [(model.ref.version, model.current) for model in answer.models] == [(good, True)]
        assert served.metric("segments_corrupt_total") == 1
        assert len(list(folder.glob(".corrupt-*"))) == 1
        await served.pool.reap()
    async with serve() as served:
        assert len(list(folder.glob(".corrupt-*"))) == 1  # kept for a look until it is removed or its room is needed


async def test_a_gather_in_progress_ends_when_its_version_turns_out_corrupt(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    async with serve() as served:
        version = (await served.load(ple, None)).ref.version
        call = served.stub.Gather(pb.GatherRequest(ref=pb.ModelRef(model="ple"), rows=bytes(8 << 17)))
        await call.read()
        flip_byte(segment_of(tmp_path / "segments", "ple", version), ROWS_AT)
        await served.failure(served.stub.VerifyModel(pb.VerifyModelRequest(ref=pb.ModelRef(model="ple"))))
        assert (await served.failure(call))[0] is grpc.StatusCode.DATA_LOSS
        assert served.metric("gathers_total", transport="rpc", outcome="corrupt") == 1


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "a flipped byte in the rows": lambda version: flip_byte(version / "layer-0.safetensors", ROWS_AT + 77),
    "a flipped byte in the header": lambda version: flip_byte(version / "layer-0.safetensors", 100),
    "a truncated segment": lambda version: os.truncate(version / "layer-0.safetensors", 4 << 20),
    "a missing segment": lambda version: (version / "layer-0.safetensors").unlink(),
    "a missing manifest": lambda version: (version / "model.json").unlink(),
    "a damaged manifest": lambda version: flip_byte(version / "model.json", 30),
    "an empty manifest": lambda version: os.truncate(version / "model.json", 0),
    "a manifest that is a link": lambda version: put_behind_a_link(version / "model.json"),
    "a segment that is a link": lambda version: put_behind_a_link(version / "layer-0.safetensors"),
    "another version's folder": lambda version: version.rename(version.with_name("0" * 64)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_what_is_damaged_at_start_is_set_aside_and_the_rest_served(
    serve: Serve, ple: EngramModel, demo: EngramModel, token_map: NDArray[np.int32], tmp_path: Path, damage: Damage
) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        version = (await served.load(ple, None)).ref.version
        await served.load(demo, token_map)
    damage(folder / "ple" / version)
    async with serve() as served:
        answer = await served.stub.ListModels(pb.ListModelsRequest())
        assert [model.ref.model for model in answer.models] == ["demo"]
        assert served.metric("segments_corrupt_total") == 1
        assert len(list(folder.glob(".corrupt-ple-*"))) == 1


def test_headers_only_looks_at_headers(tmp_path: Path, ple: EngramModel, start_pool: StartPool) -> None:
    folder = tmp_path / "s"
    with start_pool(folder) as process:
        version = process.fabric.engram.load_random(ple).version
        assert process.stop() == 0
    flip_byte(segment_of(folder, "ple", version), ROWS_AT)
    with start_pool(folder, "--scrub-bytes-per-second", "0") as process:
        assert len(process.fabric.engram.list_models()) == 1
        process.stop()
    with start_pool(folder, "--verify-on-start", "full") as process:
        assert process.fabric.engram.list_models() == []
        assert "corrupt version set aside" in process.log.read_text()


async def test_only_a_few_corrupt_versions_are_kept_aside(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        for seed in range(CORRUPT_KEPT_MAX + 2):
            version = (await served.load(ple, None, seed=seed)).ref.version
            flip_byte(segment_of(folder, "ple", version), ROWS_AT)
            code, _, _ = await served.failure(served.stub.VerifyModel(pb.VerifyModelRequest(ref=pb.ModelRef(model="ple"))))
            assert code is grpc.StatusCode.DATA_LOSS
        assert len(list(folder.glob(".corrupt-*"))) == CORRUPT_KEPT_MAX


def test_links_strangers_and_the_folder_of_another_pool_are_left_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "s", tmp_path / "outside"
    (outside / ("0" * 64)).mkdir(parents=True)
    folder.mkdir(0o750)
    (folder / "linked").symlink_to(outside)
    (folder / ".loading-link").symlink_to(outside)
    (folder / "model").mkdir()
    (folder / "model" / ("1" * 64)).symlink_to(outside / ("0" * 64))
    (folder / "Some Notes").mkdir()
    (folder / "up-1234" / ("2" * 64)).mkdir(parents=True)
    (folder / "up-1234" / "pool.lock").touch()
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    assert adopt(folder) == Adopted([], [], {})
    after = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path != folder / "pool.lock")
    assert after == before


def test_a_second_pool_on_the_same_folder_refuses_in_one_line(start_pool: StartPool, shm_folder: Path) -> None:
    with start_pool(shm_folder):
        with pytest.raises(AssertionError) as refusal, start_pool(shm_folder):
            pass
        assert f"treadle-engram-pool: segment_dir: another engram-pool keeps {shm_folder}" in str(refusal.value)
        assert "Traceback" not in str(refusal.value)


def test_a_folder_that_others_could_have_prepared_is_refused(tmp_path: Path) -> None:
    writable, link, file = tmp_path / "writable", tmp_path / "link", tmp_path / "file"
    writable.mkdir()
    writable.chmod(0o770)
    link.symlink_to(tmp_path)
    file.touch()
    for path, says in ((writable, "writable by others"), (link, "a link"), (file, "no folder")):
        with pytest.raises(InvalidArgument, match=says):
            SegmentFolder(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    shutil.chown(tmp_path / "theirs", 12345)
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "ours"):
        with pytest.raises(InvalidArgument, match="belongs to user 12345"):
            SegmentFolder(path)


def test_modes_are_ours_whatever_the_umask(tmp_path: Path, ple: EngramModel, start_pool: StartPool) -> None:
    folder, before = tmp_path / "s", os.umask(0)
    try:
        with start_pool(folder) as process:
            process.fabric.engram.load_random(ple)
            process.stop()
    finally:
        os.umask(before)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_a_wrong_setting_stops_the_start_with_one_line(start_pool: StartPool, tmp_path: Path) -> None:
    for flags, says in (
        (("--table-bytes-max", "-1"), "table_bytes_max is >= 0"), (("--verify-on-start", "maybe"), "['full', 'headers']"),
        (("--compute-threads", "1"), "compute_threads is >= 2"), (("--gather-seconds-max", "0"), "gather_seconds_max"),
    ):  # fmt: skip
        with pytest.raises(AssertionError) as refusal, start_pool(tmp_path / "s", *flags):
            pass
        assert says in str(refusal.value)
        assert "Traceback" not in str(refusal.value)


def test_a_pool_told_not_to_keep_its_segments_leaves_nothing(start_pool: StartPool, shm_folder: Path, ple: EngramModel) -> None:
    with start_pool(shm_folder, "--keep-segments", "false") as process:
        process.fabric.engram.load_random(ple)
        process.child.send_signal(signal.SIGINT)
        assert process.child.wait(20) == 0
    assert not shm_folder.exists()


def test_a_pool_that_is_stopped_in_the_middle_of_a_load_cleans_up_first(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel
) -> None:
    big = qwen_ple_model("big", prime_base=100_000, row=ple.row)

    def stop(progress: object) -> None:
        if getattr(progress, "bytes_done", 0):
            process.child.send_signal(signal.SIGTERM)

    with start_pool(shm_folder, "--drain-seconds", "5") as process:
        with pytest.raises(Unavailable):
            process.fabric.engram.load_random(big, progress=stop)
        assert process.child.wait(20) == 0
        assert [path.name for path in shm_folder.iterdir()] == ["pool.lock"]
        assert "Traceback" not in process.log.read_text()


def test_a_pool_that_cannot_serve_deletes_nothing(start_pool: StartPool, shm_folder: Path, ple: EngramModel) -> None:
    with start_pool(shm_folder) as process:
        process.fabric.engram.load_random(ple)
        process.stop()
    taken = "127.0.0.1:99999"
    with pytest.raises(AssertionError), start_pool(shm_folder, "--keep-segments", "false", "--metrics-listen", taken):
        pass
    assert len(adopt(shm_folder).versions) == 1


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    """What a thread works on must outlive the caller."""
    compute, go, ended = Compute(1), threading.Event(), threading.Event()

    def work() -> None:
        go.wait(10)
        ended.set()

    task = asyncio.create_task(compute.run(work))
    await asyncio.sleep(0)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, go.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    compute.close()
