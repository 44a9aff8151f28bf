"""Damage is found in the background, and repaired with the chunk's own bytes or taken out of service."""

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
from numpy.typing import NDArray

from engram_pool.domain.origins import CheckpointOrder, GrownOrder, PeerOrder, RandomOrder, Source, origin_text, read_origin
from treadle.contract import EngramModel, InvalidArgument, RowLayout, Unavailable
from treadle.contract.families import qwen_ple_model
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve, Served, V41Checkpoint
    from tests.flipping import flip_byte
else:
    from flipping import flip_byte

Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
FAST = 1 << 34
ROWS_AT = 2 << 20


@pytest.fixture(scope="session")
def wide() -> EngramModel:
    """One layer of about 40,000 rows of 960 bytes: ten chunks."""
    return qwen_ple_model("wide", prime_base=2_600, row=RowLayout(960, 480, "bf16"))


def segment_path(served: Served) -> Path:
    ((segment,),) = ([*resident.stored.segments.values()] for resident in served.pool.residents())
    return segment.path


async def opens(served: Served, model: str) -> grpc.StatusCode:
    try:
        await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model=model)))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_bad_chunk_is_found_and_made_again_from_its_seed(serve: Serve, wide: EngramModel) -> None:
    async with serve(repairs=True, scrub_bytes_per_second=FAST) as served:
        await served.load(wide, None, seed=4)
        handle = await asyncio.to_thread(lambda: served.fabric.engram.open("wide", transport="mapped"))
        path = segment_path(served)
        await served.scrubber.run_once()
        checked = served.scrubber.figures.checked
        assert checked == 10
        row = (3 * CHUNK_BYTES + 777) // 960
        before = handle.gather(0, np.array([[row]])).copy()
        flip_byte(path, ROWS_AT + 3 * CHUNK_BYTES + 777)
        assert not np.array_equal(handle.gather(0, np.array([[row]])), before)
        await served.scrubber.run_once()
        figures = served.scrubber.figures
        assert (figures.checked, figures.bad, figures.repaired) == (2 * checked, 1, 1)
        assert np.array_equal(handle.gather(0, np.array([[row]])), before)  # mapped readers need not open again
        assert await opens(served, "wide") is grpc.StatusCode.OK
        scrub = (await served.stub.Status(pb.StatusRequest())).scrub
        assert (scrub.chunks_bad_total, scrub.chunks_repaired_total) == (1, 1)
        assert abs(scrub.pass_ended_at_seconds - time.time()) < 60
        assert served.metric("scrub_chunks_total", outcome="repaired") == 1
        assert served.metric("segments_corrupt_total") == 1
        handle.close()


async def test_damage_that_nobody_can_repair_takes_the_version_out_of_service(
    serve: Serve, v41_checkpoint: V41Checkpoint, token_map: NDArray[np.int32], tmp_path: Path
) -> None:
    async with serve(repairs=True, scrub_bytes_per_second=FAST) as served:
        request = pb.LoadTableRequest(
            checkpoint=pb.CheckpointSource(path=str(v41_checkpoint.folder)), token_map=token_map.tobytes()
        )
        loaded = [event async for event in served.stub.LoadTable(request)][-1].loaded
        path = served.pool.residents()[0].stored.segments[3].path
        flip_byte(path, (64 << 10) + 1000)
        await served.scrubber.run_once()
        assert served.scrubber.figures.repaired == 1  # from the checkpoint
        flip_byte(path, (64 << 10) + 1000)
        for file in v41_checkpoint.folder.glob("*.safetensors"):
            content = bytearray(file.read_bytes())
            content[-300:] = bytes(300)  # another checkpoint in the same place now
            content[len(content) // 2] ^= 1
            content[3_000] ^= 1
            file.write_bytes(content)
        await served.scrubber.run_once()
        assert served.scrubber.figures.repaired == 1
        assert await opens(served, loaded.ref.model) is grpc.StatusCode.NOT_FOUND
        assert len(list((tmp_path / "segments").glob(".corrupt-*"))) == 1


async def test_a_peer_has_the_bytes(serve: Serve, wide: EngramModel, tmp_path: Path) -> None:
    async with serve(folder=tmp_path / "peer") as peer:
        await peer.load(wide, None, seed=4)
        async with serve(repairs=True, peers=("127.0.0.1:9", peer.address), scrub_bytes_per_second=FAST) as served:
            await served.load(wide, None, seed=4)
            (served.pool.residents()[0].stored.lock_path.parent / "origin.json").unlink()
            good = segment_path(served).read_bytes()
            for at in (5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 100_000, 9 * CHUNK_BYTES):
                flip_byte(segment_path(served), ROWS_AT + at)
            await served.scrubber.run_once()
            assert (served.scrubber.figures.bad, served.scrubber.figures.repaired) == (2, 2)
            assert segment_path(served).read_bytes() == good


async def test_two_pools_repair_each_other(serve: Serve, wide: EngramModel, tmp_path: Path) -> None:
    """Also while both are out of service: a reader of tables compares digests itself."""
    async with serve(folder=tmp_path / "one", repairs=True) as one, serve(folder=tmp_path / "two") as two:
        for served in (one, two):
            await served.load(wide, None, seed=4)
        flip_byte(segment_path(one), ROWS_AT + CHUNK_BYTES)
        flip_byte(segment_path(two), ROWS_AT + 2 * CHUNK_BYTES)
        two.pool.residents()[0].corrupt = True
        stored = one.pool.residents()[0].stored
        data = await asyncio.to_thread(lambda: two.fabric.engram.read_table("wide", 0, CHUNK_BYTES, CHUNK_BYTES, stored.version))
        assert stored.segments[0].fits(1, np.frombuffer(data, dtype=np.uint8))


async def test_while_a_chunk_is_being_repaired_new_calls_meet_data_loss(
    serve: Serve, wide: EngramModel, eventually: Eventually
) -> None:
    async with serve(scrub_bytes_per_second=FAST) as served:
        await served.load(wide, None, seed=4)
        begun, go_on = threading.Event(), threading.Event()

        def mend(*_: Any) -> None:
            begun.set()
            assert go_on.wait(20)

        served.pool.repair_with(mend)
        flip_byte(segment_path(served), ROWS_AT)
        scrubbing = asyncio.create_task(served.scrubber.run_once())
        await eventually(begun.is_set, "the repair has begun")
        assert await opens(served, "wide") is grpc.StatusCode.DATA_LOSS
        gather = pb.GatherRequest(ref=pb.ModelRef(model="wide"), rows=bytes(8))
        assert (await served.failure(served.stub.Gather(gather)))[0] is grpc.StatusCode.DATA_LOSS
        assert len((await served.stub.ListModels(pb.ListModelsRequest())).models) == 1  # it has not left
        go_on.set()
        await scrubbing
        assert await opens(served, "wide") is grpc.StatusCode.OK


async def test_a_verification_repairs_what_it_finds_and_says_so(serve: Serve, wide: EngramModel) -> None:
    async with serve(repairs=True) as served:
        await served.load(wide, None, seed=4)
        flip_byte(segment_path(served), ROWS_AT + 2 * CHUNK_BYTES)
        request = pb.VerifyModelRequest(ref=pb.ModelRef(model="wide"))
        code, text, _ = await served.failure(served.stub.VerifyModel(request))
        assert code is grpc.StatusCode.DATA_LOSS
        assert "chunk 2" in text
        assert [m async for m in served.stub.VerifyModel(request)][-1].progress.bytes_done > 0
        assert await opens(served, "wide") is grpc.StatusCode.OK


async def test_a_truncated_file_is_seen_by_its_size_and_set_aside(serve: Serve, wide: EngramModel) -> None:
    async with serve(repairs=True, scrub_bytes_per_second=FAST) as served:
        await served.load(wide, None, seed=4)
        os.truncate(segment_path(served), ROWS_AT)
        await served.scrubber.run_once()  # a touch of the mapping would have killed us
        assert await opens(served, "wide") is grpc.StatusCode.NOT_FOUND


async def test_the_rate_is_kept_and_gathers_go_first(serve: Serve, wide: EngramModel) -> None:
    async with serve(scrub_bytes_per_second=20 * CHUNK_BYTES) as served:
        await served.load(wide, None, seed=4)
        begun = time.monotonic()
        await served.scrubber.run_once()
        assert time.monotonic() - begun >= 10 / 20  # eleven steps, the first at once
        busy = True
        served.scrubber._busy = lambda: busy
        pass_of_the_busy = asyncio.create_task(served.scrubber.run_once())
        checked = served.scrubber.figures.checked
        done, _ = await asyncio.wait([pass_of_the_busy], timeout=0.3)
        assert not done
        assert served.scrubber.figures.checked == checked
        busy = False
        await pass_of_the_busy
        assert served.scrubber.figures.checked == checked + 10


async def test_no_rate_means_no_scrubbing(serve: Serve, wide: EngramModel) -> None:
    async with serve(scrub_bytes_per_second=0) as served:
        await served.load(wide, None, seed=4)
        await served.scrubber.run_forever()  # ends at once
        assert served.scrubber.figures.checked == 0
        with pytest.raises(InvalidArgument, match="at least 0"):
            type(served.scrubber)(served.pool, None, None, bytes_per_second=-1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        CheckpointOrder(Path("/a b"), {"1.rows": "x"}),
        RandomOrder(7),
        GrownOrder(Path("/g"), "kjv"),
        PeerOrder(("h:1", "h:2"), "m", "v"),
    ],
)
def test_origins_are_read_back_as_they_were(source: Source) -> None:
    assert read_origin(origin_text(source)) == source


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"kind":"elsewhere"}', b'{"kind":"random","seed":[]}', b"\xff", b'{"kind":"checkpoint"}']
)
def test_an_origin_that_is_damaged_is_none(text: bytes) -> None:
    assert read_origin(text) is None


def test_an_origin_of_endless_names_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the limit is"):
        origin_text(CheckpointOrder(Path("/x"), {str(n): "y" * 1000 for n in range(400)}))


async def test_a_version_that_is_replaced_under_the_scrubber_does_not_end_it(serve: Serve, wide: EngramModel) -> None:
    async with serve(scrub_bytes_per_second=FAST) as served:
        await served.load(wide, None, seed=4)
        before = served.pool.residents()
        request = pb.LoadTableRequest(
            manifest_json=wide.to_json(),
            random=pb.RandomSource(seed=4),
            placement=pb.Placement(owners=["a", "b"], owner="a", replicas=1),
        )
        assert [event async for event in served.stub.LoadTable(request)][-1].loaded.ref.version == before[0].version
        await served.pool.reap()  # unmaps the one before
        with pytest.raises(Unavailable):
            await served.scrubber._scrub(before[0])
        await served.scrubber.run_once()
        assert served.scrubber.figures.bad == 0
