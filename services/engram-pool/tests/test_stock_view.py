"""A resident PLE as the files that stock vLLM reads: its own reading functions give the bytes that our gather gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from engram_pool.commands import app
from treadle.client import Fabric
from treadle.client.engram.stock_view import export_view
from treadle.contract import EngramModel, InvalidArgument, Unavailable

if TYPE_CHECKING:
    from tests.conftest import StartPool

SHARDS = 7


@pytest.fixture
def pool(start_pool: StartPool, shm_folder: Path, ple: EngramModel) -> Iterator[Fabric]:
    with start_pool(shm_folder) as process:
        process.fabric.engram.load_random(ple)
        yield process.fabric


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "view"


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that shares blocks between files."""
    make = shutil.which("mkfs.btrfs")
    if make is None or os.geteuid() != 0:
        pytest.skip("mkfs.btrfs (apt install btrfs-progs) and root are needed for a file system that shares blocks")
    image, mount = tmp_path / "image", tmp_path / "btrfs"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run([make, "-q", str(image)], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this kernel or container mounts no btrfs: {mounted.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def rows_in_pool(pool: Fabric, model: EngramModel, layer: int) -> NDArray[np.uint8]:
    with pool.engram.open(model.name, transport="local") as handle:
        ids = np.arange(model.rows_hashed(layer), dtype=np.int64).reshape(-1, 1)
        return handle.gather(layer, ids).reshape(len(ids), -1)


def rows_in_view(folder: Path) -> tuple[list[str], NDArray[np.uint8]]:
    """Names in the order of the shards, and the rows, read as the format says."""
    (path,) = folder.glob("treadle-ple-*.safetensors")
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__")
    names = sorted(header, key=lambda name: int(name.split("shard_")[1].split(".")[0]))
    ends = [0, *(header[name]["data_offsets"][1] for name in names)]
    assert [header[name]["data_offsets"][0] for name in names] == ends[:-1], "one behind the other, no holes"
    assert begin + ends[-1] == len(data)
    assert all(header[name]["dtype"] == "BF16" for name in names)
    return names, np.frombuffer(data, np.uint8, offset=begin).reshape(-1, header[names[0]]["shape"][1] * 2)


def test_a_view_holds_every_row_under_the_names_of_the_checkpoint(pool: Fabric, ple: EngramModel, folder: Path) -> None:
    view = export_view(pool.engram.describe(ple.name), folder, copy=True, shards=SHARDS)
    names, rows = rows_in_view(folder)
    layer = ple.layers[0]
    np.testing.assert_array_equal(rows[: ple.rows_hashed(layer)], rows_in_pool(pool, ple, layer))
    assert names[0] == f"model.language_model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_0.weight"
    assert len(names) == SHARDS
    assert not view.shared
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(names)


def test_shared_memory_shares_no_blocks_and_says_so_and_leaves_nothing(pool: Fabric, ple: EngramModel, shm_folder: Path) -> None:
    target = shm_folder.with_name(shm_folder.name + "-view")
    try:
        with pytest.raises(Unavailable, match="tmpfs never does"):
            export_view(pool.engram.describe(ple.name), target)
        assert not list(target.iterdir())
    finally:
        shutil.rmtree(target, ignore_errors=True)


def test_a_file_system_that_can_shares_the_blocks_of_the_pool(start_pool: StartPool, btrfs: Path, ple: EngramModel) -> None:
    with start_pool(btrfs / "segments") as process:
        process.fabric.engram.load_random(ple)
        before = _free(btrfs)
        view = export_view(process.fabric.engram.describe(ple.name), btrfs / "view", shards=SHARDS)
        assert view.shared
        assert before - _free(btrfs) < view.row_bytes_total // 2, "the rows are there once"
        _, rows = rows_in_view(btrfs / "view")
        layer = ple.layers[0]
        np.testing.assert_array_equal(rows[: ple.rows_hashed(layer)], rows_in_pool(process.fabric, ple, layer))


def _free(folder: Path) -> int:
    os.sync()
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


def test_a_view_completes_a_checkpoint(pool: Fabric, ple: EngramModel, folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    for file in ("rest", "ple"):
        (checkpoint / f"{file}.safetensors").write_bytes(b"of the checkpoint")
    table = [f"m.layers.{ple.layers[0]}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight" for shard in range(3)]
    weights = {"m.norm.weight": "rest.safetensors"} | dict.fromkeys(table, "ple.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    export_view(pool.engram.describe(ple.name), folder, copy=True, checkpoint=checkpoint)
    names, _ = rows_in_view(folder)
    assert names == table
    assert {path.name for path in folder.iterdir() if path.is_symlink()} == {"config.json", "rest.safetensors"}
    merged = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert merged["m.norm.weight"] == "rest.safetensors"
    assert merged[table[0]] == f"treadle-ple-{ple.layers[0]}.safetensors"
    index.write_text(json.dumps({"weight_map": weights | {"m.norm.weight": "ple.safetensors"}}))
    with pytest.raises(InvalidArgument, match="read the tables twice"):
        export_view(pool.engram.describe(ple.name), tmp_path / "second", copy=True, checkpoint=checkpoint)


def test_tables_that_stock_vllm_takes_in_no_file_are_refused_with_the_reason(
    start_pool: StartPool, shm_folder: Path, v41: EngramModel, token_map: NDArray[np.int32], folder: Path
) -> None:
    with start_pool(shm_folder) as process:
        process.fabric.engram.load_random(v41, token_map)
        with pytest.raises(InvalidArgument, match="pinned memory of its own"):
            export_view(process.fabric.engram.describe("v41"), folder, copy=True)


def test_the_command_says_what_it_did(pool: Fabric, ple: EngramModel, folder: Path) -> None:
    address = pool.engram._endpoint.address
    folder.mkdir()
    (folder / "other").write_text("")
    arguments = ["export-view", ple.name, str(folder), "--pool", address, "--copy"]
    assert isinstance(CliRunner().invoke(app, arguments).exception, InvalidArgument)
    (folder / "other").unlink()
    answer = CliRunner().invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["shared"] is False


def test_vllms_own_loader_reads_our_rows_and_keeps_them_in_our_file(pool: Fabric, ple: EngramModel, folder: Path) -> None:
    torch = pytest.importorskip("torch", reason="vLLM 0.32.0 is needed: make vllm-env")
    weight_utils = pytest.importorskip(
        "vllm.model_executor.model_loader.weight_utils", reason="vLLM 0.32.0 is needed: make vllm-env"
    )
    stock = pytest.importorskip("vllm.models.qwen4_exp.common.ple", reason="vLLM 0.32.0 is needed: make vllm-env")
    export_view(pool.engram.describe(ple.name), folder, copy=True, shards=SHARDS)
    (path,) = folder.glob("treadle-ple-*.safetensors")
    rows = pool.engram.describe(ple.name).segments[0].rows
    table = torch.zeros(rows, ple.row.dim, dtype=torch.bfloat16)
    each = -(-rows // SHARDS)
    for name, shard in weight_utils.safetensors_weights_iterator([str(path)], False):
        first = int(name.split("shard_")[1].split(".")[0]) * each
        stock.copy_ple_embedding_shard_(table, shard, checkpoint_start=first, tp_start=0, tp_end=rows)
        _check_file_backed(shard, path, torch.uint8)
    ours, layer = rows_in_pool(pool, ple, ple.layers[0]), ple.layers[0]
    np.testing.assert_array_equal(table.view(torch.uint8).numpy()[: ple.rows_hashed(layer)], ours)


def _check_file_backed(tensor: Any, path: Path, uint8: Any) -> None:
    """What `host_file_gather` of later releases asks of a shard: its memory is the file's, so rows can be read by position."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, last = (int(bound, 16) for bound in fields[0].split("-"))
        if first <= address < last:
            assert Path(fields[5]) == path
            row_bytes = tensor.shape[1] * tensor.element_size()
            with path.open("rb") as file:
                row = os.pread(file.fileno(), row_bytes, address - first + int(fields[2], 16))
            assert row == tensor[0].clone().view(uint8).numpy().tobytes()
            return
    raise AssertionError("the shard lies in no mapping")
