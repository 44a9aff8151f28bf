"""Starts that go wrong for a moment, corrupt versions that take room: no table is lost, no room is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from engram_pool.adapters import segment_folder, version_files
from engram_pool.adapters.host_memory import available_memory_bytes
from engram_pool.adapters.segment_places import SegmentPlaces
from engram_pool.domain.storing import StoredVersion
from treadle.contract import EngramModel
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve, Served

ROWS_AT = 64 << 10  # of the small tables here
PLE_BYTES = 4_456_448  # of its one segment
PLE = pb.ModelRef(model="ple")


async def names(served: Served) -> list[str]:
    return [model.ref.model for model in (await served.stub.ListModels(pb.ListModelsRequest())).models]


async def spoil(served: Served, folder: Path, version: str) -> None:
    with (folder / "ple" / version / "layer-0.safetensors").open("r+b") as file:
        file.seek(ROWS_AT)
        file.write(b"\xff\xff\xff\xff")
    code, _, _ = await served.failure(served.stub.VerifyModel(pb.VerifyModelRequest(ref=PLE)))
    assert code is grpc.StatusCode.DATA_LOSS


async def test_a_version_that_the_system_cannot_read_now_is_left_and_served_by_the_next_start(
    serve: Serve, ple: EngramModel, demo: EngramModel, token_map: NDArray[np.int32], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        first = (await served.load(ple, None, seed=1)).ref.version
        await served.load(ple, None, seed=2, keep=True)
        current = (await served.load(ple, None, seed=3, keep=True)).ref.version
        await served.load(demo, token_map)
    whole = version_files.map_version

    def fails_once(path: Path, places: SegmentPlaces) -> StoredVersion:
        if path.name in (first, current):
            raise OSError(24, "Too many open files")
        return whole(path, places)

    monkeypatch.setattr(segment_folder, "map_version", fails_once)
    async with serve() as served:
        assert await names(served) == ["demo", "ple"]
        assert served.metric("versions_left_total") == 2
        assert served.metric("segments_corrupt_total") == 0
    monkeypatch.undo()
    async with serve() as served:
        models = (await served.stub.ListModels(pb.ListModelsRequest())).models
        assert len(models) == 4
        assert [model.ref.version for model in models if model.current and model.ref.model == "ple"] == [current]


async def test_a_manifest_of_a_newer_release_is_left_untouched(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        version = (await served.load(ple, None)).ref.version
    marker = folder / "ple" / version / "model.json"
    newer = json.dumps(json.loads(marker.read_bytes()) | {"schema": "treadle.engram-model/2"}).encode()
    marker.write_bytes(newer)
    async with serve() as served:
        assert await names(served) == []
        assert served.metric("versions_left_total") == 1
    assert marker.read_bytes() == newer
    assert (marker.parent / "layer-0.safetensors").stat().st_size == PLE_BYTES
    assert not list(folder.glob(".corrupt-*"))


async def test_rm_deletes_what_of_a_model_was_set_aside(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    async with serve() as served:
        version = (await served.load(ple, None)).ref.version
        await spoil(served, folder, version)
        assert served.metric("table_bytes", tier="corrupt") > PLE_BYTES
        assert (await served.stub.Status(pb.StatusRequest())).table_bytes == 0
    async with serve() as served:
        answer = await served.stub.RemoveModel(pb.RemoveModelRequest(ref=PLE))
        assert ([ref.version for ref in answer.removed], answer.awaiting_readers) == ([version], 0)
        assert not list(folder.glob(".corrupt-*"))
        assert served.metric("table_bytes", tier="corrupt") == 0
        code, _, _ = await served.failure(served.stub.RemoveModel(pb.RemoveModelRequest(ref=PLE)))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_a_load_that_needs_the_room_deletes_what_was_set_aside_oldest_first(
    serve: Serve, ple: EngramModel, tmp_path: Path
) -> None:
    folder = tmp_path / "segments"
    async with serve(table_bytes_max=5 * PLE_BYTES // 2) as served:
        for seed in range(2):
            await spoil(served, folder, (await served.load(ple, None, seed=seed)).ref.version)
        assert len(list(folder.glob(".corrupt-*"))) == 2
        second = max(folder.glob(".corrupt-*"), key=lambda path: path.lstat().st_mtime_ns)
        await served.load(ple, None, seed=2)
        assert list(folder.glob(".corrupt-*")) == [second]


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("0::/\n", {}, 4096_000),
        (
            "0::/a/b\n",
            {"a/memory.max": "3000", "a/memory.current": "1000", "a/b/memory.max": "max", "a/b/memory.current": "5"},
            2000,
        ),
        ("3:cpu,memory:/x\n", {"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "6000"}, 0),
        ("2:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "6"}, 4096_000),
    ],
)
def test_free_memory_is_the_least_of_the_host_and_the_cgroups(
    tmp_path: Path, cgroup: str, files: dict[str, str], left: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory_bytes(tmp_path) == left
