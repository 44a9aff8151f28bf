"""A pool whose segments lie on a DAX device: a file of fixed size stands for one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from engram_pool.adapters.segment_places import host_id
from treadle.contract import DataLoss, EngramModel, NotFound, ResourceExhausted, RowLayout, Unavailable
from treadle.contract.families import qwen_ple_model
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels.dax import REGION_ALIGN_BYTES, dax_facts, map_directory
from treadle.kernels.dax_directory import Directory, RegionState, newest

if TYPE_CHECKING:
    from tests.conftest import Process, StartPool

IDS = np.arange(32).reshape(2, 16)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "device"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 96 << 20)
    return path


@pytest.fixture(scope="session")
def wide() -> EngramModel:
    """One layer of 38 MB."""
    return qwen_ple_model("wide", prime_base=7_500, row=RowLayout(320, 160, "bf16"))


def flags(device: Path, host: str = "one") -> tuple[str, ...]:
    return ("--storage", "dax", "--dax-device", str(device), "--dax-host", host)


def directory_of(device: Path) -> Directory:
    with map_directory(dax_facts(device)) as page:
        found = newest(page[:])
    assert found is not None
    return found


def rows(process: Process, model: str, transport: str = "mapped") -> bytes:
    with process.fabric.engram.open(model, transport=transport) as handle:
        return handle.gather(0, IDS).tobytes()


def test_rows_lie_on_the_device_and_a_killed_pool_finds_them_again(
    start_pool: StartPool, tmp_path: Path, device: Path, ple: EngramModel
) -> None:
    with start_pool(tmp_path / "run", *flags(device)) as process:
        version = process.fabric.engram.load_random(ple, seed=1).version
        (place,) = process.fabric.engram.describe("ple").segments
        assert (place.path, place.segment_offset_bytes) == (device, REGION_ALIGN_BYTES)
        good = rows(process, "ple")
        assert rows(process, "ple", "rpc") == good
        assert not list((tmp_path / "run").rglob("*.safetensors"))
        with process.fabric.engram.open("ple", transport="mapped") as handle:
            process.kill()
            assert handle.gather(0, IDS).tobytes() == good
    with start_pool(tmp_path / "run", *flags(device)) as process:
        assert rows(process, "ple") == good
        assert process.fabric.engram.verify("ple") > 0
        assert process.stop() == 0
    (region,) = directory_of(device).regions
    assert (region.state, region.model, region.version.hex()) == (RegionState.READY, "ple", version)
    with start_pool(tmp_path / "shm") as process:  # the same rows as anywhere else
        process.fabric.engram.load_random(ple, seed=1)
        assert rows(process, "ple") == good


def test_a_lost_run_folder_is_made_again_from_the_device(
    start_pool: StartPool, tmp_path: Path, device: Path, ple: EngramModel
) -> None:
    with start_pool(tmp_path / "run", *flags(device)) as process:
        loaded = process.fabric.engram.load_random(ple, seed=1)
        good = rows(process, "ple")
        assert process.stop() == 0
    shutil.rmtree(tmp_path / "run")  # as after a reboot, if it was on tmpfs
    with start_pool(tmp_path / "run", *flags(device)) as process:
        (model,) = process.fabric.engram.list_models()
        assert (model.version, model.current) == (loaded.version, True)
        assert rows(process, "ple") == good


def test_a_loader_killed_half_way_leaves_no_version_and_its_region_is_reclaimed(
    start_pool: StartPool, tmp_path: Path, device: Path, wide: EngramModel, ple: EngramModel
) -> None:
    with start_pool(tmp_path / "run", *flags(device)) as process:
        process.fabric.engram.load_random(ple)

        def kill(progress: object) -> None:
            if getattr(progress, "bytes_done", 0):
                process.kill()

        with pytest.raises(Unavailable):
            process.fabric.engram.load_random(wide, progress=kill)
    assert [region.state for region in directory_of(device).regions] == [RegionState.READY, RegionState.WRITING]
    with start_pool(tmp_path / "run", *flags(device)) as process:
        assert [model.model.name for model in process.fabric.engram.list_models()] == ["ple"]
        assert len(directory_of(device).regions) == 1
        process.fabric.engram.load_random(wide)
        assert not list((tmp_path / "run").glob(".loading-*"))


def test_a_region_is_reused_only_when_its_last_reader_has_gone(
    start_pool: StartPool, tmp_path: Path, device: Path, wide: EngramModel
) -> None:
    with start_pool(tmp_path / "run", *flags(device), "--reap-interval-seconds", "0.05") as process:
        process.fabric.engram.load_random(wide, seed=1)
        with process.fabric.engram.open("wide", transport="mapped") as handle:
            good = handle.gather(0, IDS).tobytes()
            process.fabric.engram.load_random(wide, seed=2)  # 42 MB each: a third has no room
            with pytest.raises(ResourceExhausted, match=r"available|free stretch"):
                process.fabric.engram.load_random(wide, seed=3)
            assert handle.gather(0, IDS).tobytes() == good
        process.fabric.engram.load_random(wide, seed=3)
        process.fabric.engram.remove("wide")
        assert process.stop() == 0
    assert directory_of(device).regions == ()


def test_a_bad_chunk_on_a_device_is_repaired_in_place(
    start_pool: StartPool, tmp_path: Path, device: Path, wide: EngramModel
) -> None:
    with start_pool(tmp_path / "run", *flags(device), "--scrub-bytes-per-second", "0") as process:
        process.fabric.engram.load_random(wide, seed=1)
        good = device.read_bytes()
        with device.open("r+b") as file:
            file.seek(2 * REGION_ALIGN_BYTES + 3 * CHUNK_BYTES + 5)
            file.write(b"damaged")
        with pytest.raises(DataLoss, match="chunk 3"):
            process.fabric.engram.verify("wide")
        assert process.fabric.engram.verify("wide") > 0
        assert device.read_bytes()[2 * REGION_ALIGN_BYTES :] == good[2 * REGION_ALIGN_BYTES :]


def test_another_host_reads_a_shared_device_and_takes_it_over_only_when_told(
    start_pool: StartPool, tmp_path: Path, device: Path, ple: EngramModel
) -> None:
    with start_pool(tmp_path / "one", *flags(device), "--dax-shared", "true") as one:
        one.fabric.engram.load_random(ple, seed=1)
        good = rows(one, "ple")
        with start_pool(tmp_path / "two", *flags(device, "two")) as two:
            assert rows(two, "ple") == good
            with pytest.raises((ResourceExhausted, Unavailable)):
                two.fabric.engram.load_random(ple, seed=2)
            two.fabric.engram.remove("ple")
            with pytest.raises(NotFound):
                rows(two, "ple")
            assert two.stop() == 0
        assert rows(one, "ple") == good  # nothing was freed
        assert one.stop() == 0
    with start_pool(tmp_path / "two", *flags(device, "two"), "--dax-take-over", "true") as two:
        two.fabric.engram.load_random(ple, seed=2)
        assert two.stop() == 0
    assert {region.owner for region in directory_of(device).regions} == {host_id("two")}


def test_a_restart_that_forgets_the_sharing_gives_no_row_of_a_reader_away(
    start_pool: StartPool, tmp_path: Path, device: Path, ple: EngramModel
) -> None:
    with start_pool(tmp_path / "one", *flags(device), "--dax-shared", "true") as one:
        one.fabric.engram.load_random(ple, seed=1)
        good = rows(one, "ple")
        assert one.stop() == 0
    with start_pool(tmp_path / "two", *flags(device, "two"), "--scrub-bytes-per-second", "0") as two:
        mapped = two.fabric.engram.open("ple", transport="mapped")
        with mapped, start_pool(tmp_path / "one", *flags(device)) as one:
            one.fabric.engram.remove("ple")
            one.fabric.engram.load_random(ple, seed=2)
            assert rows(one, "ple") != good
            assert mapped.gather(0, IDS).tobytes() == good
            assert rows(two, "ple", "rpc") == good


def test_a_second_pool_on_a_device_and_wrong_settings_end_the_start(
    start_pool: StartPool, tmp_path: Path, device: Path, ple: EngramModel
) -> None:
    with start_pool(tmp_path / "run", *flags(device)) as process:
        process.fabric.engram.load_random(ple)
        with pytest.raises(AssertionError, match="one pool for each device"), start_pool(tmp_path / "other", *flags(device)):
            pass
    with pytest.raises(AssertionError, match="go together"), start_pool(tmp_path / "run", "--storage", "dax"):
        pass
    with (
        pytest.raises(AssertionError, match="does not say that it is a DAX one"),
        start_pool(tmp_path / "r", *flags(Path("/dev/zero"))),
    ):
        pass


def test_a_host_is_known_by_its_setting_or_its_machine(tmp_path: Path) -> None:
    (tmp_path / "machine-id").write_text("4711\n")
    assert host_id("", tmp_path / "machine-id") == host_id("4711")
    assert host_id("", tmp_path / "none") == host_id(os.uname().nodename)
    assert len(host_id("a")) == 16
