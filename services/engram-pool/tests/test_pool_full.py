"""A full file system is an error that says so, before anything is touched that could not be written; nothing stays behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from treadle.chassis.small_files import write_small
from treadle.contract import EngramModel, ResourceExhausted
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB: one table of 4.5 MB, and no second one."""
    place = tmp_path / "small"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    mounting = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounting.returncode != 0:
        pytest.skip(f"no tmpfs of our own: {mounting.stderr.strip()}; run as root, or with CAP_SYS_ADMIN")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


async def test_a_load_that_does_not_fit_is_refused_and_the_one_before_goes_on(
    serve: Serve, small_tmpfs: Path, ple: EngramModel
) -> None:
    async with serve(folder=small_tmpfs / "s") as served:
        first = (await served.load(ple, None, seed=1)).ref.version
        request = pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource(seed=2), keep_previous=True)
        code, text, _ = await served.failure(served.stub.LoadTable(request))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "available" in text
        assert [model.ref.version for model in (await served.stub.ListModels(pb.ListModelsRequest())).models] == [first]
        assert sorted(path.name for path in (small_tmpfs / "s").iterdir()) == ["ple", "pool.lock"]


async def test_room_that_somebody_takes_meanwhile_ends_the_load_and_leaves_nothing(
    serve: Serve, small_tmpfs: Path, ple: EngramModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(folder=small_tmpfs / "s") as served:
        monkeypatch.setattr(type(served.pool.room), "check", lambda *_: None)  # there was room when it was asked
        filling = os.open(small_tmpfs / "filling", os.O_WRONLY | os.O_CREAT)
        for size, what in ((5 << 20, "no room for"), ((8 << 20) - 4096, "no room for")):  # before the segment; before small files
            os.posix_fallocate(filling, 0, size)
            request = pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource(seed=2))
            code, text, _ = await served.failure(served.stub.LoadTable(request))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert what in text
            assert [path.name for path in (small_tmpfs / "s").iterdir()] == ["pool.lock"]
        os.close(filling)
        (small_tmpfs / "filling").unlink()
        await served.load(ple, None, seed=2)


def test_a_small_file_that_does_not_fit_leaves_the_old_one(small_tmpfs: Path) -> None:
    write_small(small_tmpfs / "current.json", b"old")
    with pytest.raises(ResourceExhausted, match="no room for"):
        write_small(small_tmpfs / "current.json", bytes(9 << 20))
    assert (small_tmpfs / "current.json").read_bytes() == b"old"
    assert [path.name for path in small_tmpfs.iterdir()] == ["current.json"]
