"""Checkpoints: found by suffix or by name, packed byte for byte, refused in words that help."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from treadle.contract import EngramModel, RowLayout
from treadle.contract.families import head_primes, qwen_ple_model
from treadle.contract.row_layout import row_layout
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve, Served, V41Checkpoint, WriteSafetensors


def order(path: Path, model: EngramModel | None, token_map: NDArray[np.int32] | None, **tensors: str) -> pb.LoadTableRequest:
    """Keyword `_1_rows` is the role `1.rows`."""
    roles = {role.strip("_").replace("_", "."): name for role, name in tensors.items()}
    return pb.LoadTableRequest(
        checkpoint=pb.CheckpointSource(path=str(path), tensors=roles), manifest_json=model.to_json() if model else b"",
        token_map=b"" if token_map is None else token_map.tobytes(),
    )  # fmt: skip


async def load(served: Served, request: pb.LoadTableRequest) -> pb.Model:
    loaded: pb.Model = [event async for event in served.stub.LoadTable(request)][-1].loaded
    return loaded


def table(served: Served, name: str, layer: int) -> NDArray[np.uint8]:
    return served.pool.find(name, "").stored.segments[layer].rows


async def refused(served: Served, request: pb.LoadTableRequest, code: grpc.StatusCode) -> str:
    got, text, _ = await served.failure(served.stub.LoadTable(request))
    assert got is code, text
    assert not served.pool.occupancy.table_bytes
    assert not [
        name for name in os.listdir((await served.stub.Status(pb.StatusRequest())).segment_dir) if name.startswith(".loading-")
    ]
    return text


async def test_a_v41_checkpoint_is_packed_to_264_byte_rows(
    serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32]
) -> None:
    async with serve() as served:
        loaded = await load(served, order(v41_checkpoint.folder, v41, token_map))
        assert loaded.ref.model == "v41"
        for layer, packed in v41_checkpoint.packed.items():
            assert np.array_equal(table(served, "v41", layer), packed)
        assert served.metric("loads_total", outcome="ok") == 1
        assert served.metric("load_bytes_total") == sum(packed.nbytes for packed in v41_checkpoint.packed.values())


async def test_without_a_manifest_the_model_is_derived_from_config_json(
    serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32]
) -> None:
    async with serve() as served:
        loaded = await load(served, order(v41_checkpoint.folder, None, token_map))
        derived = EngramModel.from_json(loaded.manifest_json)
        assert derived.name == "deepseek-v4.1-small"
        assert derived.fusion is not None
        assert derived.fusion.form == "v4.1"
        assert replace(derived.template, name="v41", fusion=None) == v41
        assert [row.rows for _, row in derived.tables] == [len(packed) for packed in v41_checkpoint.packed.values()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engram_n_heads": None}, "engram_n_heads is missing"),
        ({"engram_vocab_size": "many"}, "engram_vocab_size: whole numbers"),
        ({"engram_n_heads": 10**9}, "columns"),
        ({"engram_vocab_size": [100, 100]}, "one for each order"),
        ({"engram_num_embeddings": [7, 7]}, "add up to"),
    ],
)
async def test_a_config_that_does_not_fit_is_refused_by_key(
    serve: Serve, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32], change: dict[str, object], says: str
) -> None:
    config = {key: value for key, value in (v41_checkpoint.config | change).items() if value is not None}
    (v41_checkpoint.folder / "config.json").write_text(json.dumps(config))
    async with serve() as served:
        assert says in await refused(served, order(v41_checkpoint.folder, None, token_map), grpc.StatusCode.INVALID_ARGUMENT)


async def test_one_prime_base_for_each_order_is_understood(
    serve: Serve, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32]
) -> None:
    config = v41_checkpoint.config | {"engram_vocab_size": [100, 90, 80]}
    (v41_checkpoint.folder / "config.json").write_text(json.dumps(config | {"engram_num_embeddings": 10_000}))
    async with serve() as served:
        loaded = await load(served, order(v41_checkpoint.folder, None, token_map))
        assert EngramModel.from_json(loaded.manifest_json).primes == head_primes([100, 90, 80], 2, 8)


async def test_a_token_map_of_another_tokenizer_is_refused_by_field(
    serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint
) -> None:
    other = np.arange(500, dtype=np.int32)
    async with serve() as served:
        code, _, details = await served.failure(served.stub.LoadTable(order(v41_checkpoint.folder, v41, other)))
        assert (code, details["treadle-field"]) == (grpc.StatusCode.FAILED_PRECONDITION, "token_map")
        code, _, details = await served.failure(served.stub.LoadTable(order(v41_checkpoint.folder, None, other)))
        assert (code, details["treadle-field"]) == (grpc.StatusCode.FAILED_PRECONDITION, "compressed_vocab_size")


async def test_a_missing_token_map_and_one_too_many_are_refused(
    serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint, ple: EngramModel, token_map: NDArray[np.int32]
) -> None:
    async with serve() as served:
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        assert "token_map: missing" in await refused(served, order(v41_checkpoint.folder, v41, None), invalid)
        assert "token_map: missing" in await refused(served, order(v41_checkpoint.folder, None, None), invalid)
        assert "token_map: given" in await refused(served, order(v41_checkpoint.folder, ple, token_map), invalid)


async def test_a_refusal_lists_the_tensors_that_were_found(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    save_file({f"block.{n}.weight": np.zeros((n + 1, 3), np.float32) for n in range(30)}, tmp_path / "x.safetensors")
    async with serve() as served:
        text = await refused(served, order(tmp_path / "x.safetensors", ple, None), grpc.StatusCode.INVALID_ARGUMENT)
    assert "name one for the role 0.rows" in text
    assert "block.29.weight F32[30, 3]" in text
    assert "and 10 smaller ones" in text


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("fp16", "<f2"), ("fp32", "<f4"), ("bf16", "<u2")])
async def test_plain_tensors_are_taken_as_they_are(
    write_tensors: WriteSafetensors, serve: Serve, tmp_path: Path, dtype: str, numpy_dtype: str
) -> None:
    width = np.dtype(numpy_dtype).itemsize
    model = qwen_ple_model("plain", prime_base=100, row=RowLayout(32 * width, 32, dtype))
    values = np.random.default_rng(1).integers(0, 30_000, (model.rows_hashed(0), 32)).astype(numpy_dtype)
    name = {"fp16": "F16", "fp32": "F32", "bf16": "BF16"}[dtype]
    write_tensors(tmp_path / "x.safetensors", {"ple.table": (name, values.shape, values.tobytes())})
    async with serve() as served:
        await load(served, order(tmp_path / "x.safetensors", model, None, _0_rows="ple.table"))
        assert table(served, "plain", 0).tobytes() == values.tobytes()


@pytest.mark.parametrize(("precision", "dtype", "width"), [("fp8", "F8_E4M3", 32), ("int4", "U8", 16)])
async def test_fp16_scales_are_packed_behind_their_values(
    write_tensors: WriteSafetensors, serve: Serve, tmp_path: Path, precision: str, dtype: str, width: int
) -> None:
    model = qwen_ple_model("plain", prime_base=100, row=row_layout(precision, 32))
    rows, chance = model.rows_hashed(0), np.random.default_rng(1)
    values, scales = chance.integers(0, 100, (rows, width), dtype=np.uint8), chance.random((rows, 1)).astype("<f2")
    tensors = {"t.values": (dtype, values.shape, values.tobytes()), "t.scales": ("F16", scales.shape, scales.tobytes())}
    write_tensors(tmp_path / "x.safetensors", tensors)
    async with serve() as served:
        wrong = order(tmp_path / "x.safetensors", model, None, _0_rows="t.values", _0_scale="t.values")
        assert "0.scale: F16" in await refused(served, wrong, grpc.StatusCode.INVALID_ARGUMENT)
        await load(served, order(tmp_path / "x.safetensors", model, None, _0_rows="t.values", _0_scale="t.scales"))
        assert np.array_equal(table(served, "plain", 0), np.hstack([values, scales.view(np.uint8)]))


async def test_numbered_pieces_in_several_files_are_joined_in_order(
    write_tensors: WriteSafetensors, serve: Serve, ple: EngramModel, tmp_path: Path
) -> None:
    rows = ple.rows_hashed(0)
    values = np.random.default_rng(1).integers(0, 256, (rows, 320), dtype=np.uint8)
    edges = [0, 1, 4000, 4096, 9000, *range(9100, 10_000, 100), rows]  # more than ten pieces: 10 comes after 9
    for n, (first, last) in enumerate(pairwise(edges)):
        piece = values[first:last]
        write_tensors(tmp_path / f"p{n}.safetensors", {f"ple.shard_{n}.weight": ("BF16", (len(piece), 160), piece.tobytes())})
    async with serve() as served:
        await load(served, order(tmp_path, ple, None, _0_rows="ple.shard_*.weight"))
        assert np.array_equal(table(served, "ple", 0), values)


async def test_rows_that_are_packed_already_need_no_scales(
    write_tensors: WriteSafetensors,
    serve: Serve,
    v41: EngramModel,
    v41_checkpoint: V41Checkpoint,
    token_map: NDArray[np.int32],
    tmp_path: Path,
) -> None:
    packed = {f"rows.{layer}": ("U8", rows.shape, rows.tobytes()) for layer, rows in v41_checkpoint.packed.items()}
    write_tensors(tmp_path / "packed.safetensors", packed)
    async with serve() as served:
        request = order(tmp_path / "packed.safetensors", v41, token_map, _1_rows="rows.1", _3_rows="rows.3")
        await load(served, request)
        assert np.array_equal(table(served, "v41", 3), v41_checkpoint.packed[3])


async def test_tensors_of_another_shape_dtype_or_height_are_refused(
    write_tensors: WriteSafetensors, serve: Serve, ple: EngramModel, tmp_path: Path
) -> None:
    rows = ple.rows_hashed(0)
    write_tensors(tmp_path / "x.safetensors", {
        "narrow": ("BF16", (rows, 80), bytes(rows * 160)), "other": ("F16", (rows, 160), bytes(rows * 320)),
        "short": ("BF16", (rows - 1, 160), bytes((rows - 1) * 320)), "a.0": ("BF16", (2, 160), bytes(640)),
    })  # fmt: skip
    async with serve() as served:
        for name, says in (
            ("narrow", "BF16 [rows, 160] expected, got narrow BF16"), ("other", "got other F16"),
            ("short", f"the hash of ple reaches {rows}"), ("nowhere", "'nowhere', named for the role 0.rows, is not there"),
            ("a.*", "2 rows in 1 tensor(s), but the hash"), ("a.*.*", "one * stands"),
        ):  # fmt: skip
            request = order(tmp_path / "x.safetensors", ple, None, _0_rows=name)
            assert says in await refused(served, request, grpc.StatusCode.INVALID_ARGUMENT)
        request = order(tmp_path / "x.safetensors", ple, None, _7_rows="other")
        assert "unknown roles ['7.rows']" in await refused(served, request, grpc.StatusCode.INVALID_ARGUMENT)


async def test_two_tensors_for_one_role_are_refused(
    write_tensors: WriteSafetensors, serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32]
) -> None:
    rows = len(v41_checkpoint.packed[1])
    twin = {"mtp.layers.1.engram.embed.weight": ("F8_E4M3", (rows, 256), bytes(rows * 256))}
    write_tensors(v41_checkpoint.folder / "twin.safetensors", twin)
    async with serve() as served:
        text = await refused(served, order(v41_checkpoint.folder, v41, token_map), grpc.StatusCode.INVALID_ARGUMENT)
    assert "all fit; name one for the role" in text


async def test_a_torn_checkpoint_is_data_loss(
    serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32]
) -> None:
    file = v41_checkpoint.folder / "model-00003.safetensors"
    whole = file.read_bytes()
    async with serve() as served:
        for size in (4, 100, len(whole) - 1):
            file.write_bytes(whole[:size])
            text = await refused(served, order(v41_checkpoint.folder, v41, token_map), grpc.StatusCode.DATA_LOSS)
            assert "torn" in text


async def test_files_of_another_kind_are_refused(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    wrong_size = {"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}
    contents = {
        "not JSON": (8).to_bytes(8, "little") + b"nonsense",
        "header of": (1 << 40).to_bytes(8, "little") + b"{}",
        "does not take the 4 bytes": len(json.dumps(wrong_size)).to_bytes(8, "little")
        + json.dumps(wrong_size).encode()
        + bytes(16),
        "entry for 't' is wrong": (8).to_bytes(8, "little") + b'{"t":{}}',
    }
    async with serve() as served:
        for says, content in contents.items():
            file.write_bytes(content)
            assert says in await refused(served, order(file, ple, None), grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_path_without_tensors_is_not_found(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    async with serve() as served:
        await refused(served, order(tmp_path / "nowhere", ple, None), grpc.StatusCode.NOT_FOUND)
        (tmp_path / "empty").mkdir()
        await refused(served, order(tmp_path / "empty", ple, None), grpc.StatusCode.NOT_FOUND)


async def test_paths_outside_checkpoint_dir_are_refused_links_resolved(
    serve: Serve, v41: EngramModel, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32], tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(v41_checkpoint.folder)
    async with serve(checkpoint_dir=allowed) as served:
        for path in (v41_checkpoint.folder, allowed / "link", allowed / ".." / v41_checkpoint.folder.name):
            text = await refused(served, order(path, v41, token_map), grpc.StatusCode.INVALID_ARGUMENT)
            assert "outside checkpoint_dir" in text
    async with serve(checkpoint_dir=tmp_path) as served:
        await load(served, order(v41_checkpoint.folder, v41, token_map))
