"""The RPCs over a real server: answers, limits and every error code."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from engram_pool.adapters.host_memory import file_system_type
from engram_pool.domain.gathering import LOOKUP_ROWS_MAX
from treadle.contract import PROTO_VERSION, EngramModel, RowLayout, Windows
from treadle.contract.families import qwen_ple_model
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.kernels import HashPlan, lookup

if TYPE_CHECKING:
    from tests.conftest import Serve, Served


def tier_of(path: Path) -> str:
    return "memory" if file_system_type(path) in ("tmpfs", "ramfs", "hugetlbfs") else "disk"


MESSAGE_BYTES_MAX = 1 << 20
PLE_BYTES = 4_456_448  # of its one segment: header and rows on 64 KiB boundaries
Code = grpc.StatusCode
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]


def message_of(windows: Windows) -> pb.Windows:
    parts: dict[str, Any] = {"tokens": windows.tokens, "starts": windows.starts, "lookback": windows.lookback}
    parts |= {name: mask for name in ("dead", "lookback_dead") if (mask := getattr(windows, name)) is not None}
    return pb.Windows(**{name: array.tobytes() for name, array in parts.items()})


def some_windows(seed: int, depth: int, *, masks: bool = False) -> Windows:
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, 40, 5)
    lookback = chance.integers(-1, 500, (5, depth))
    return Windows(
        tokens=chance.integers(0, 500, int(lengths.sum())), starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        lookback=lookback, dead=chance.random(int(lengths.sum())) < 0.2 if masks else None,
        lookback_dead=chance.random(lookback.shape) < 0.2 if masks else None,
    )  # fmt: skip


def gather_of(model: str, ids: ArrayLike, layer: int = 0, version: str = "") -> pb.GatherRequest:
    return pb.GatherRequest(
        ref=pb.ModelRef(model=model, version=version), layer=layer, rows=np.asarray(ids, dtype=np.int64).tobytes()
    )


async def test_gather_hands_out_rows_in_order_in_messages_below_one_mebibyte(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await served.load(ple, None)
        table = served.pool.find("ple", "").stored.segments[0].rows
        ids = np.random.default_rng(0).integers(0, len(table), 10_000)
        messages = [message async for message in served.stub.Gather(gather_of("ple", ids))]
        assert len(messages) == 4
        assert all(message.ByteSize() <= MESSAGE_BYTES_MAX and len(message.data) % 320 == 0 for message in messages)
        assert b"".join(message.data for message in messages) == table[ids].tobytes()
        assert served.metric("rows_total", transport="rpc") == 10_000
        assert served.metric("gathers_total", transport="rpc", outcome="ok") == 1
        assert served.metric("gather_seconds_count", transport="rpc") == 1


async def test_gather_of_no_rows_is_an_empty_answer(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await served.load(ple, None)
        assert [message async for message in served.stub.Gather(gather_of("ple", []))] == []


@pytest.mark.parametrize("masks", [False, True])
async def test_lookup_gives_the_bytes_that_a_mapped_reader_gathers(
    serve: Serve, demo: EngramModel, token_map: NDArray[np.int32], masks: bool
) -> None:
    windows = some_windows(4, demo.order_max - 1, masks=masks)
    async with serve() as served:
        await served.load(demo, token_map)
        for layers in ((), (4,), (4, 1)):
            request = pb.LookupRequest(ref=pb.ModelRef(model="demo"), layers=layers, windows=message_of(windows))
            answers = [(answer.layer, answer.data) async for answer in served.stub.Lookup(request)]
            expected = []
            for layer in layers or demo.layers:
                table = served.pool.find("demo", "").stored.segments[layer].rows
                out = np.empty((windows.token_count, demo.columns, demo.row.bytes), np.uint8)
                lookup(HashPlan.from_model(demo, layer, token_map), table, windows, out)
                expected.append((layer, out.tobytes()))
            assert answers == expected


async def test_open_model_says_where_a_mapped_reader_finds_the_same_rows(
    serve: Serve, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    async with serve() as served:
        loaded = await served.load(demo, token_map)
        opened = await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model="demo")))
        assert opened.model.ref.version == loaded.ref.version == EngramModel.from_json(opened.model.manifest_json).version
        assert opened.fingerprint["version"] == loaded.ref.version
        assert [segment.layer for segment in opened.segments] == [1, 4]
        for segment in opened.segments:
            assert segment.rows_offset_bytes % (64 << 10) == 0
            file = np.memmap(segment.path, np.uint8, "r")
            assert file.nbytes == segment.file_bytes
            rows = file[segment.rows_offset_bytes :][: segment.rows * segment.row_bytes].reshape(segment.rows, segment.row_bytes)
            assert np.array_equal(rows, served.pool.find("demo", "").stored.segments[segment.layer].rows)
        assert os.stat(opened.lock_path).st_size == 0


async def test_an_sdk_reads_the_same_bytes_mapped_and_by_rpc(serve: Serve, demo: EngramModel, token_map: NDArray[np.int32]) -> None:
    windows = some_windows(9, demo.order_max - 1)

    def read(served: Served) -> list[dict[int, NDArray[np.uint8]]]:
        found = []
        for transport in ("mapped", "rpc"):
            handle = served.fabric.engram.open("demo", transport=transport)
            found.append({layer: rows.copy() for layer, rows in handle.lookup(windows).items()})
            handle.close()
        return found

    async with serve() as served:
        await served.load(demo, token_map)
        mapped, rpc = await asyncio.to_thread(read, served)
        assert all(np.array_equal(mapped[layer], rpc[layer]) for layer in demo.layers)


async def test_unknown_models_and_versions_are_not_found_and_the_answer_says_what_there_is(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        version = (await served.load(ple, None)).ref.version
        other = pb.ModelRef(model="ple", version="0" * 64)
        for ref, says in ((pb.ModelRef(model="nobody"), "ple"), (other, version), (pb.ModelRef(model="ple", version="x"), version)):
            calls: list[Any] = [
                served.stub.OpenModel(pb.OpenModelRequest(ref=ref)), served.stub.RemoveModel(pb.RemoveModelRequest(ref=ref)),
                served.stub.Gather(pb.GatherRequest(ref=ref)), served.stub.Lookup(pb.LookupRequest(ref=ref)),
                served.stub.VerifyModel(pb.VerifyModelRequest(ref=ref)),
            ]  # fmt: skip
            for call in calls:
                code, text, _ = await served.failure(call)
                assert code is Code.NOT_FOUND
                assert says in text


@pytest.mark.parametrize("bad", [-1, 1 << 40])
async def test_a_row_id_out_of_range_reads_nothing_and_is_named(serve: Serve, ple: EngramModel, bad: int) -> None:
    async with serve() as served:
        await served.load(ple, None)
        got = []
        call = served.stub.Gather(gather_of("ple", [*range(9000), bad]))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            got += [message async for message in call]
        assert raised.value.code() is Code.OUT_OF_RANGE
        assert f"rows[9000] is {bad}" in str(raised.value.details())
        assert not got
        assert served.metric("gathers_total", transport="rpc", outcome="out_of_range") == 1
        assert served.metric("rows_total", transport="rpc") == 0


async def test_wrong_shapes_and_fields_are_invalid_arguments_that_name_the_field(
    serve: Serve, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    good = some_windows(1, demo.order_max - 1)

    def changed(**fields: bytes) -> pb.LookupRequest:
        message = message_of(good)
        for name, value in fields.items():
            setattr(message, name, value)
        return pb.LookupRequest(ref=pb.ModelRef(model="demo"), windows=message)

    async with serve() as served:
        await served.load(demo, token_map)
        ref = pb.ModelRef(model="demo")
        too_many = np.zeros((1 << 17) + 1, np.int64)
        gather, lookup_of, load = served.stub.Gather, served.stub.Lookup, served.stub.LoadTable
        cases: list[tuple[Any, Any, str]] = [
            (gather, pb.GatherRequest(ref=ref, layer=1, rows=b"1234567"), "rows"),
            (gather, gather_of("demo", [0], layer=2), "layer 2"),
            (gather, gather_of("demo", too_many, layer=1), "rows: at most"),
            (lookup_of, changed(tokens=b"123"), "tokens"),
            (lookup_of, changed(tokens=good.tokens[:-1].tobytes()), "starts"),
            (lookup_of, changed(starts=b""), "starts"),
            (lookup_of, changed(lookback=b""), "lookback"),
            (lookup_of, changed(dead=b"\x01"), "dead"),
            (lookup_of, changed(dead=b"\x02" * good.token_count), "dead"),
            (lookup_of, changed(lookback_dead=b"\x00"), "lookback_dead"),
            (lookup_of, changed(tokens=np.full(good.token_count, 500).tobytes()), "500"),
            (lookup_of, pb.LookupRequest(ref=ref, layers=[1, 1], windows=message_of(good)), "each one once"),
            (lookup_of, pb.LookupRequest(ref=ref, layers=[7], windows=message_of(good)), "layer 7"),
            (load, pb.LoadTableRequest(manifest_json=demo.to_json()), "source"),
            (load, pb.LoadTableRequest(random=pb.RandomSource()), "manifest"),
            (load, pb.LoadTableRequest(manifest_json=b"{}", random=pb.RandomSource()), "manifest"),
            (load, pb.LoadTableRequest(checkpoint=pb.CheckpointSource()), "checkpoint.path"),
            (load, pb.LoadTableRequest(token_map=b"123", random=pb.RandomSource()), "token_map"),
        ]  # fmt: skip
        for method, request, says in cases:
            code, text, _ = await served.failure(method(request))
            assert code is Code.INVALID_ARGUMENT, text
            assert says in text


async def test_a_manifest_with_tables_is_refused(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        manifest = (await served.load(ple, None)).manifest_json
        request = pb.LoadTableRequest(manifest_json=manifest, random=pb.RandomSource())
        code, text, _ = await served.failure(served.stub.LoadTable(request))
        assert (code, "tables" in text) == (Code.INVALID_ARGUMENT, True)


async def test_a_fingerprint_that_does_not_fit_is_refused_by_field(
    serve: Serve, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    async with serve() as served:
        await served.load(demo, token_map)
        ref, fits = pb.ModelRef(model="demo"), {"row_bytes": "64", "token_map": str(demo.token_map)}
        await served.stub.OpenModel(pb.OpenModelRequest(ref=ref, expected_fingerprint=fits))
        request = pb.OpenModelRequest(ref=ref, expected_fingerprint=fits | {"row_bytes": "320"})
        code, text, details = await served.failure(served.stub.OpenModel(request))
        assert code is Code.FAILED_PRECONDITION
        assert details["treadle-field"] == "row_bytes"
        assert "'320', got '64'" in text


async def test_no_room_under_table_bytes_max_is_refused_before_anything_is_allocated(
    serve: Serve, ple: EngramModel, tmp_path: Path
) -> None:
    async with serve(table_bytes_max=PLE_BYTES + 1_000_000) as served:
        await served.load(ple, None)
        request = pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource(seed=1))
        code, text, details = await served.failure(served.stub.LoadTable(request))
        assert code is Code.RESOURCE_EXHAUSTED
        assert f"needs {PLE_BYTES} bytes" in text
        assert "leaves 1000000" in text
        assert "treadle-retry-after-seconds" not in details  # only making room helps
        assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == ["ple", "pool.lock"]
        assert served.metric("loads_total", outcome="refused") == 1


async def test_versions_whose_list_would_not_fit_a_message_are_refused(serve: Serve, ple: EngramModel) -> None:
    async with serve(list_bytes_max=3 * len(ple.to_json())) as served:
        for seed in range(2):
            await served.load(ple, None, seed=seed, keep=True)
        request = pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource(seed=2))
        code, text, _ = await served.failure(served.stub.LoadTable(request))
        assert (code, "remove a version" in text) == (Code.RESOURCE_EXHAUSTED, True)


async def test_a_lookup_of_more_rows_than_the_limit_is_refused(serve: Serve, ple: EngramModel) -> None:
    count = LOOKUP_ROWS_MAX // 16 + 1
    windows = Windows(np.zeros(count, np.int64), np.array([0, count], np.int32), np.full((1, 2), -1, np.int64))
    async with serve() as served:
        await served.load(ple, None)
        request = pb.LookupRequest(ref=pb.ModelRef(model="ple"), windows=message_of(windows))
        code, text, _ = await served.failure(served.stub.Lookup(request))
        assert (code, f"at most {count - 1}" in text) == (Code.INVALID_ARGUMENT, True)


async def test_no_room_on_the_file_system_is_refused_naming_both_sizes(serve: Serve, tmp_path: Path) -> None:
    huge = qwen_ple_model("huge", prime_base=1 << 33, row=RowLayout(4096, 2048, "bf16"))
    async with serve() as served:
        request = pb.LoadTableRequest(manifest_json=huge.to_json(), random=pb.RandomSource())
        code, text, _ = await served.failure(served.stub.LoadTable(request))
        assert code is Code.RESOURCE_EXHAUSTED
        assert str(tmp_path / "segments") in text
        assert shutil.disk_usage(tmp_path).free > int(text.split("has ")[1].split()[0]) // 2


async def test_gathers_beyond_the_limit_are_refused_with_a_time_to_come_back(serve: Serve, ple: EngramModel) -> None:
    async with serve(gathers_max=1) as served:
        await served.load(ple, None)
        long = served.stub.Gather(gather_of("ple", np.zeros(1 << 17)))
        first = await long.read()
        assert first.data
        code, text, details = await served.failure(served.stub.Gather(gather_of("ple", [0])))
        assert code is Code.RESOURCE_EXHAUSTED
        assert text == "another gather is in progress; try again in 0.05 s"
        assert float(details["treadle-retry-after-seconds"]) > 0
        long.cancel()


async def test_a_gather_past_its_deadline_ends(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await served.load(ple, None)
        code, _, _ = await served.failure(served.stub.Gather(gather_of("ple", np.zeros(1 << 17)), timeout=0.001))
        assert code is Code.DEADLINE_EXCEEDED


async def test_a_watcher_hears_the_list_at_once_and_each_change(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        watch = served.stub.WatchModels(pb.WatchModelsRequest())
        assert list((await watch.read()).models) == []
        assert served.metric("watchers") == 1
        version = (await served.load(ple, None)).ref.version
        assert [(model.ref.version, model.current) for model in (await watch.read()).models] == [(version, True)]
        await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="ple")))
        assert list((await watch.read()).models) == []


async def test_watchers_beyond_the_limit_are_refused_and_a_left_place_is_free_again(serve: Serve, eventually: Eventually) -> None:
    async with serve(watchers_max=2) as served:
        watches = [served.stub.WatchModels(pb.WatchModelsRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        code, text, details = await served.failure(served.stub.WatchModels(pb.WatchModelsRequest()))
        assert text == "2 watches are in progress, the limit is 2; try again in 1 s"
        assert (code, float(details["treadle-retry-after-seconds"]) > 0) == (Code.RESOURCE_EXHAUSTED, True)
        watches[0].cancel()
        await eventually(lambda: served.pool.readers.watchers == 1, "the watcher that left is gone")
        await served.stub.WatchModels(pb.WatchModelsRequest()).read()


async def test_a_draining_pool_takes_no_new_work_and_ends_watches(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await served.load(ple, None)
        watch = served.stub.WatchModels(pb.WatchModelsRequest())
        await watch.read()
        await served.pool.drain()
        ref = pb.ModelRef(model="ple")
        calls: list[Any] = [
            watch, served.stub.OpenModel(pb.OpenModelRequest(ref=ref)), served.stub.Gather(gather_of("ple", [0])),
            served.stub.LoadTable(pb.LoadTableRequest(random=pb.RandomSource())), served.stub.RemoveModel(pb.RemoveModelRequest(ref=ref)),
        ]  # fmt: skip
        for call in calls:
            assert (await served.failure(call))[0] is Code.UNAVAILABLE
        assert (await served.stub.Status(pb.StatusRequest())).draining


async def test_status_tells_build_protocol_memory_and_pages(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    async with serve(table_bytes_max=1 << 30) as served:
        await served.load(ple, None)
        status = await served.stub.Status(pb.StatusRequest())
        assert (status.build_version, status.proto_version) == ("test", PROTO_VERSION)
        assert (status.table_bytes, status.table_bytes_max) == (PLE_BYTES, 1 << 30)
        assert status.segment_dir == str(tmp_path / "segments")
        assert status.page_bytes in (4096, 2 << 20)
        assert served.metric("table_bytes", tier=tier_of(tmp_path)) == PLE_BYTES
        assert served.metric("page_bytes") == status.page_bytes
        assert served.metric("models_resident") == 1


async def test_one_load_at_a_time(serve: Serve, ple: EngramModel) -> None:
    big = qwen_ple_model("big", prime_base=20_000, row=ple.row)
    async with serve() as served:
        first = served.stub.LoadTable(pb.LoadTableRequest(manifest_json=big.to_json(), random=pb.RandomSource()))
        await first.read()
        request = pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource())
        code, text, details = await served.failure(served.stub.LoadTable(request))
        assert (code, details["treadle-retry-after-seconds"]) == (Code.RESOURCE_EXHAUSTED, "5.0")
        assert text == "another load is in progress; try again in 5 s"
        assert [event.WhichOneof("event") for event in await served.rest(first)][-1] == "loaded"


async def test_a_caller_who_leaves_takes_his_load_with_him(
    serve: Serve, ple: EngramModel, tmp_path: Path, eventually: Eventually
) -> None:
    big = qwen_ple_model("big", prime_base=50_000, row=ple.row)
    async with serve() as served:
        load = served.stub.LoadTable(pb.LoadTableRequest(manifest_json=big.to_json(), random=pb.RandomSource()))
        while not (await load.read()).progress.bytes_done:
            pass
        load.cancel()
        await eventually(lambda: served.metric("loads_total", outcome="cancelled") == 1, "the load is cancelled")
        assert [path.name for path in (tmp_path / "segments").iterdir()] == ["pool.lock"]
        await served.load(ple, None)  # the place is free again
