"""Grown memories: loaded if they are what their manifest says, kept with weights and card, refused by name otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.client import AsyncFabric
from treadle.contract import DataLoss, EngramModel, NotFound, ResourceExhausted
from treadle.contract.engram_model import CARD_BYTES_MAX, FUSION_BYTES_MAX, MANIFEST_BYTES_MAX
from treadle.contract.row_layout import PRECISIONS
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Grow, Grown, Serve, Served, StartPool, WriteSafetensors

Code = grpc.StatusCode


def grown_order(path: Path, name: str = "", *, keep: bool = True) -> pb.LoadTableRequest:
    return pb.LoadTableRequest(grown=pb.GrownSource(path=str(path), name=name), keep_previous=keep)


async def load(served: Served, grown: Grown, name: str = "", *, keep: bool = True) -> pb.Model:
    events = [event async for event in served.stub.LoadTable(grown_order(grown.path, name, keep=keep))]
    loaded: pb.Model = events[-1].loaded
    return loaded


async def read_fusion(served: Served, model: str, version: str = "") -> list[pb.ReadFusionResponse]:
    request = pb.ReadFusionRequest(ref=pb.ModelRef(model=model, version=version))
    return [message async for message in served.stub.ReadFusion(request)]


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- loading ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_a_grown_memory_is_served_with_rows_weights_and_card(serve: Serve, grow: Grow, precision: str) -> None:
    grown = grow(1, precision=precision)

    def read(served: Served) -> None:
        steps: list[str] = []
        loaded = served.fabric.engram.load_grown(grown.path, progress=lambda now: steps.append(now.step))
        assert (loaded.model, loaded.version, loaded.current) == (grown.model, grown.model.version, True)
        assert {"layer 1", "layer 3", "publishing"} <= set(steps)
        assert served.fabric.engram.read_fusion("kjv") == grown.fusion
        assert served.fabric.engram.read_fusion("kjv", loaded.version) == grown.fusion
        for transport in ("mapped", "local", "rpc"):
            with served.fabric.engram.open("kjv", transport=transport) as handle:
                assert handle.card == grown.card
                for layer, table in grown.tables.items():
                    ids = np.arange(len(table), dtype=np.int64).reshape(-1, 1)[:500]
                    assert np.array_equal(handle.gather(layer, ids)[:, 0], table[:500])

    async with serve() as served:
        await asyncio.to_thread(read, served)
        opened = await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model="kjv")))
        assert json.loads(opened.card_json) == grown.card
        assert served.metric("fusion_bytes_total") == 2 * len(grown.fusion)
        assert served.metric("loads_total", outcome="ok") == 1


async def test_the_asyncio_face_does_the_same(serve: Serve, grow: Grow) -> None:
    old, new = grow(1), grow(2)
    async with serve() as served, AsyncFabric(engram=served.address) as fabric:
        assert (await fabric.engram.load_grown(old.path)).version == old.model.version
        steps: list[int] = []
        await fabric.engram.load_grown(new.path, progress=lambda now: steps.append(now.bytes_done))
        assert steps[-1] == sum(table.nbytes for table in new.tables.values())
        assert await fabric.engram.read_fusion("kjv") == new.fusion
        promoted = await fabric.engram.promote("kjv")
        assert (promoted.now.version, promoted.previous_version) == (old.model.version, new.model.version)
        handle = await fabric.engram.open("kjv")
        assert handle.card == old.card
        handle.close()


async def test_another_name_makes_another_version_of_the_same_tables(serve: Serve, grow: Grow) -> None:
    grown = grow()
    async with serve() as served:
        loaded = await load(served, grown, "bible")
        model = EngramModel.from_json(loaded.manifest_json)
        assert (model.name, model.tables) == ("bible", grown.model.tables)
        assert loaded.ref.version == replace(grown.model, name="bible").version != grown.model.version
        assert b"".join([message.data for message in await read_fusion(served, "bible")]) == grown.fusion


async def test_weights_travel_in_messages_below_one_mebibyte(serve: Serve, grow: Grow) -> None:
    grown = grow(fusion_bytes=3_000_000)
    async with serve() as served:
        await load(served, grown)
        messages = await read_fusion(served, "kjv")
        assert [message.bytes_total for message in messages] == [3_000_000, 0, 0]
        assert all(message.ByteSize() <= 1 << 20 for message in messages)
        assert b"".join(message.data for message in messages) == grown.fusion


async def test_a_memory_that_is_loaded_twice_is_one_version(serve: Serve, grow: Grow) -> None:
    grown = grow()
    async with serve() as served:
        await load(served, grown)
        await load(served, grown)
        assert len((await served.stub.ListModels(pb.ListModelsRequest())).models) == 1


async def test_a_memory_beside_which_nothing_was_kept_has_no_weights_to_read(
    serve: Serve, grow: Grow, token_map: NDArray[np.int32]
) -> None:
    grown = grow()
    async with serve() as served:
        await served.load(grown.model.template, token_map)
        code, text, _ = await served.failure(served.stub.ReadFusion(pb.ReadFusionRequest(ref=pb.ModelRef(model="kjv"))))
        assert code is Code.NOT_FOUND
        assert "no fusion weights" in text
        opened = await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model="kjv")))
        assert opened.card_json == b""
        await served.load(replace(grown.model.template, name="plain", fusion=None), token_map)
        with pytest.raises(NotFound, match="names no fusion weights"):
            await asyncio.to_thread(served.fabric.engram.read_fusion, "plain")


async def test_a_version_that_came_without_its_weights_is_not_taken_for_the_whole(
    serve: Serve, grow: Grow, token_map: NDArray[np.int32], tmp_path: Path
) -> None:
    grown = grow()
    (only_rows := tmp_path / "only-rows").mkdir()
    shutil.copy(grown.path / "rows.safetensors", only_rows)
    request = pb.LoadTableRequest(manifest_json=grown.model.template.to_json(), token_map=token_map.tobytes())
    request.checkpoint.CopyFrom(pb.CheckpointSource(path=str(only_rows), tensors={f"{n}.rows": f"{n}.rows" for n in (1, 3)}))
    async with serve() as served:
        events = [event async for event in served.stub.LoadTable(request)]
        assert events[-1].loaded.ref.version == grown.model.version
        code, text, _ = await served.failure(served.stub.LoadTable(grown_order(grown.path)))
        assert (code, "remove it" in text) == (Code.INVALID_ARGUMENT, True)
        await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="kjv")))
        await load(served, grown)


# -- refusals -------------------------------------------------------------------------------------------------------------------

Spoil = Callable[["Grown"], None]


def truncate(name: str, keep: float) -> Spoil:
    def spoil(grown: Grown) -> None:
        path = grown.path / name
        path.write_bytes(path.read_bytes()[: round(path.stat().st_size * keep)])

    return spoil


def flip(name: str) -> Spoil:
    def spoil(grown: Grown) -> None:
        path = grown.path / name
        data = bytearray(path.read_bytes())
        data[len(data) * 3 // 5] ^= 1
        path.write_bytes(data)

    return spoil


def write(name: str, data: bytes) -> Spoil:
    def spoil(grown: Grown) -> None:
        (grown.path / name).write_bytes(data)

    return spoil


def remove(name: str) -> Spoil:
    return lambda grown: (grown.path / name).unlink()


def link(name: str) -> Spoil:
    def spoil(grown: Grown) -> None:
        (grown.path / name).rename(grown.path.parent / name)
        (grown.path / name).symlink_to(grown.path.parent / name)

    return spoil


def sparse(name: str, size: int) -> Spoil:
    return lambda grown: os.truncate(grown.path / name, size)


def manifest(change: Callable[[EngramModel], EngramModel]) -> Spoil:
    def spoil(grown: Grown) -> None:
        (grown.path / "manifest.json").write_bytes(change(grown.model).to_json())

    return spoil


def pipe(name: str) -> Spoil:
    def spoil(grown: Grown) -> None:
        (grown.path / name).unlink()
        os.mkfifo(grown.path / name)

    return spoil


def other_rows(model: EngramModel) -> EngramModel:
    tables = {layer: replace(table, rows=table.rows + 1) for layer, table in model.tables}
    return model.with_tables(tables)


FILES = ("manifest.json", "rows.safetensors", "fusion.safetensors", "card.json")
SPOILT: list[tuple[str, Spoil, grpc.StatusCode, str]] = [
    *((f"no {name}", remove(name), Code.NOT_FOUND, f"{name} is missing") for name in FILES),
    *((f"{name} is a link", link(name), Code.INVALID_ARGUMENT, f"{name} is a link") for name in FILES),
    *((f"{name} is a pipe", pipe(name), Code.INVALID_ARGUMENT, f"{name} is no plain file") for name in FILES),
    ("torn rows", truncate("rows.safetensors", 0.9), Code.DATA_LOSS, "rows.safetensors is torn"),
    ("torn header of the rows", truncate("rows.safetensors", 0.001), Code.DATA_LOSS, "rows.safetensors is torn"),
    ("a flipped bit in the rows", flip("rows.safetensors"), Code.DATA_LOSS, "the rows hash to"),
    ("torn weights", truncate("fusion.safetensors", 0.9), Code.DATA_LOSS, "fusion.safetensors hashes to"),
    ("a flipped bit in the weights", flip("fusion.safetensors"), Code.DATA_LOSS, "fusion.safetensors hashes to"),
    ("weights beyond the limit", sparse("fusion.safetensors", FUSION_BYTES_MAX + 1), Code.INVALID_ARGUMENT, "the limit is"),
    ("a torn card", truncate("card.json", 0.9), Code.INVALID_ARGUMENT, "card.json: not JSON"),
    ("a card that is no object", write("card.json", b"[1]"), Code.INVALID_ARGUMENT, "card.json: an object expected"),
    ("a card beyond the limit", sparse("card.json", CARD_BYTES_MAX + 1), Code.INVALID_ARGUMENT, "card.json: 262145 bytes"),
    ("a card of brackets", write("card.json", b"[" * 200_000), Code.INVALID_ARGUMENT, "card.json: not JSON"),
    ("a manifest beyond the limit", sparse("manifest.json", MANIFEST_BYTES_MAX + 1), Code.INVALID_ARGUMENT, "manifest.json: 1048577"),
    ("a manifest that is none", write("manifest.json", b"{}"), Code.INVALID_ARGUMENT, "manifest.json: manifest: missing"),
    ("a template", manifest(lambda model: model.template), Code.INVALID_ARGUMENT, "names tables"),
    ("no weights named", manifest(lambda model: replace(model, fusion=None)), Code.INVALID_ARGUMENT, "digest of its fusion weights"),
    ("other tables", manifest(other_rows), Code.INVALID_ARGUMENT, "1.rows: U8"),
    (
        "another token map",
        manifest(lambda model: replace(model, token_map="ab" * 32)),
        Code.FAILED_PRECONDITION,
        "token_map",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "code", "says"), [case[1:] for case in SPOILT], ids=[case[0] for case in SPOILT])
async def test_a_spoilt_folder_is_refused_by_name_and_leaves_nothing(
    serve: Serve, grow: Grow, tmp_path: Path, spoil: Spoil, code: grpc.StatusCode, says: str
) -> None:
    good, bad = grow(1), grow(2)
    spoil(bad)
    async with serve() as served:
        await load(served, good)
        before, taken = files_of(tmp_path / "segments"), served.pool.occupancy.table_bytes
        refused = await served.failure(served.stub.LoadTable(grown_order(bad.path)))
        assert refused[0] is code, refused
        assert says in refused[1]
        assert (files_of(tmp_path / "segments"), served.pool.occupancy.table_bytes) == (before, taken)
        assert files_of(tmp_path / "segments" / "kjv") == {good.model.version, "current.json"}
        (listed,) = (await served.stub.ListModels(pb.ListModelsRequest())).models
        assert (listed.ref.version, listed.current) == (good.model.version, True)


async def test_rows_of_other_shapes_or_names_are_refused(
    serve: Serve, grow: Grow, write_tensors: WriteSafetensors, token_map: NDArray[np.int32]
) -> None:
    grown = grow()
    rows: dict[str, Any] = {f"{n}.rows": ("U8", table.shape, table.tobytes()) for n, table in grown.tables.items()}
    ids = ("I32", token_map.shape, token_map.tobytes())
    table = grown.tables[1]
    for tensors, says in (
        (rows, "missing ['token_map']"),
        (rows | {"token_map": ids, "more": ("U8", (1,), b"x")}, "unknown ['more']"),
        (rows | {"token_map": ids, "1.rows": ("I8", table.shape, table.tobytes())}, "1.rows: U8"),
        (rows | {"token_map": ids, "1.rows": ("U8", table[1:].shape, table[1:].tobytes())}, "1.rows: U8"),
        (rows | {"token_map": ids, "1.rows": ("U8", (table.size,), table.tobytes())}, "1.rows: U8"),
        (rows | {"token_map": ("I64", (250,), token_map.tobytes())}, "token_map: I32"),
        (rows | {"token_map": ("I32", (250, 2), token_map.tobytes())}, "token_map: I32"),
        (rows | {"token_map": ("I32", (0,), b"")}, "token_map: I32"),
    ):
        write_tensors(grown.path / "rows.safetensors", tensors)
        async with serve() as served:
            code, text, _ = await served.failure(served.stub.LoadTable(grown_order(grown.path)))
            assert (code, says in text) == (Code.INVALID_ARGUMENT, True), text


async def test_orders_that_do_not_go_together_are_refused(serve: Serve, grow: Grow, tmp_path: Path) -> None:
    grown = grow()
    orders = [
        (pb.LoadTableRequest(grown=pb.GrownSource()), Code.INVALID_ARGUMENT, "grown.path"),
        (grown_order(tmp_path / "nowhere"), Code.NOT_FOUND, "no folder"),
        (grown_order(grown.path / "card.json"), Code.NOT_FOUND, "no folder"),
        *((grown_order(grown.path, name), Code.INVALID_ARGUMENT, "name: a name is") for name in ("a/b", "../x", "-x", "x" * 129)),
        (grown_order(grown.path, "none"), Code.INVALID_ARGUMENT, "name: the name 'none'"),
        (grown_order(tmp_path / "nowhere", "a/b"), Code.INVALID_ARGUMENT, "name: a name is"),
    ]
    for field in ("manifest_json", "token_map"):
        order = grown_order(grown.path)
        setattr(order, field, b"{}  ")
        orders.append((order, Code.INVALID_ARGUMENT, "a grown folder has its own"))
    (allowed := tmp_path / "allowed").mkdir()
    (allowed / "out").symlink_to(grown.path)
    async with serve(checkpoint_dir=allowed) as served:
        for path in (grown.path, allowed / "out", allowed / ".." / "grown" / grown.path.name):
            code, text, _ = await served.failure(served.stub.LoadTable(grown_order(path)))
            assert (code, "outside checkpoint_dir" in text) == (Code.INVALID_ARGUMENT, True)
        shutil.copytree(grown.path, allowed / "in")
        events = [event async for event in served.stub.LoadTable(grown_order(allowed / "in"))]
        assert events[-1].loaded.ref.version == grown.model.version
    async with serve() as served:
        for order, wanted, says in orders:
            code, text, _ = await served.failure(served.stub.LoadTable(order))
            assert (code, says in text) == (wanted, True), text


async def test_a_memory_without_room_is_refused_before_anything_is_written(serve: Serve, grow: Grow, tmp_path: Path) -> None:
    grown = grow(fusion_bytes=5_000_000)
    async with serve(table_bytes_max=5_100_000) as served:  # the weights alone would fit
        code, text, _ = await served.failure(served.stub.LoadTable(grown_order(grown.path)))
        assert (code, "table_bytes_max" in text) == (Code.RESOURCE_EXHAUSTED, True)
        assert files_of(tmp_path / "segments") == {"pool.lock"}


# -- damage behind the pool's back ------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[Grown], Path]:
    """Folder in which the pool keeps a memory."""
    return lambda grown: tmp_path / "segments" / grown.model.name / grown.model.version


async def test_a_restart_adopts_weights_and_card(serve: Serve, grow: Grow) -> None:
    grown = grow()
    async with serve() as served:
        await load(served, grown)
        taken = served.pool.occupancy.table_bytes
    shutil.rmtree(grown.path)
    async with serve() as served:
        assert served.pool.occupancy.table_bytes == taken
        assert await asyncio.to_thread(served.fabric.engram.read_fusion, "kjv") == grown.fusion
        opened = await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model="kjv")))
        assert json.loads(opened.card_json) == grown.card


@pytest.mark.parametrize("name", ["fusion.safetensors", "card.json"])
@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "a link"])
@pytest.mark.parametrize("checksums", [True, False])
async def test_damage_found_at_a_start_sets_the_version_aside(
    serve: Serve, grow: Grow, kept: Callable[[Grown], Path], name: str, damage: str, checksums: bool
) -> None:
    grown = grow()
    async with serve() as served:
        await load(served, grown)
    path = kept(grown) / name
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "a link":
        path.symlink_to(grown.path / name)
    elif damage != "gone":
        data[10] ^= 1
        path.write_bytes(data if damage == "flipped" else data[:-1])
    async with serve(checksums=checksums) as served:
        assert (await served.stub.ListModels(pb.ListModelsRequest())).models == []
        assert served.metric("segments_corrupt_total") == 1
        await load(served, grown)


@pytest.mark.parametrize("gone", [True, False])
async def test_damaged_weights_are_never_served_as_whole(
    serve: Serve, grow: Grow, kept: Callable[[Grown], Path], gone: bool
) -> None:
    grown = grow()
    async with serve() as served:
        await load(served, grown)
        path = kept(grown) / "fusion.safetensors"
        data = bytearray(path.read_bytes())
        path.unlink()
        if not gone:
            data[10] ^= 1
            path.write_bytes(data)
        with pytest.raises(DataLoss, match="cannot be read" if gone else "not the fusion weights"):
            await asyncio.to_thread(served.fabric.engram.read_fusion, "kjv")
        code, _, _ = await served.failure(served.stub.VerifyModel(pb.VerifyModelRequest(ref=pb.ModelRef(model="kjv"))))
        assert code is Code.DATA_LOSS
        assert (await served.stub.ListModels(pb.ListModelsRequest())).models == []


async def test_readings_of_weights_at_once_are_bounded(serve: Serve, grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_pool.domain.fusion_reading.READS_MAX", 1)
    grown = grow(fusion_bytes=40_000_000)
    async with serve() as served:
        await load(served, grown)
        slow = served.stub.ReadFusion(pb.ReadFusionRequest(ref=pb.ModelRef(model="kjv")))
        await slow.read()
        code, _, details = await served.failure(served.stub.ReadFusion(pb.ReadFusionRequest(ref=pb.ModelRef(model="kjv"))))
        assert code is Code.RESOURCE_EXHAUSTED
        assert "treadle-retry-after-seconds" in details
        slow.cancel()


async def test_the_sdk_refuses_weights_beyond_its_limit(serve: Serve, grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = grow(fusion_bytes=5_000)
    monkeypatch.setattr("treadle.client.engram.pool_types.FUSION_BYTES_MAX", 4_999)
    async with serve() as served:
        await load(served, grown)
        with pytest.raises(ResourceExhausted, match="4999"):
            await asyncio.to_thread(served.fabric.engram.read_fusion, "kjv")


# -- in a process of its own --------------------------------------------------------------------------------------------------------


def test_loaded_promoted_rolled_back_and_restarted(start_pool: StartPool, shm_folder: Path, grow: Grow) -> None:
    old, new = grow(1), grow(2)
    with start_pool(shm_folder) as process:
        pool = process.fabric.engram
        pool.load_grown(old.path)
        handle = pool.open("kjv")
        pool.load_grown(new.path)
        assert [(model.version, model.current) for model in pool.list_models()] == [
            (new.model.version, True),
            (old.model.version, False),
        ]
        assert (handle.version, handle.card) == (old.model.version, old.card)
        assert pool.promote("kjv").now.version == old.model.version
        process.kill()
        handle.close()
    with start_pool(shm_folder) as process:
        pool = process.fabric.engram
        assert pool.list_models()[0].version == old.model.version
        assert pool.read_fusion("kjv") == old.fusion
        assert pool.read_fusion("kjv", new.model.version) == new.fusion
        promoted = pool.promote("kjv")
        assert (promoted.now.version, promoted.previous_version) == (new.model.version, old.model.version)
        assert hashlib.sha256(pool.read_fusion("kjv")).hexdigest() == (new.model.fusion and new.model.fusion.weights)
        assert process.stop() == 0
    with start_pool(shm_folder) as process:
        assert process.fabric.engram.list_models()[0].version == new.model.version
        assert process.fabric.engram.promote("kjv", old.model.version).previous_version == new.model.version
