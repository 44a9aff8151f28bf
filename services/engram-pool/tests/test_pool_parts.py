"""Versions from other pools, and pools that keep an owner's part of a table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from engram_pool.adapters.peer_pools import open_peer_version, read_key
from engram_pool.domain.row_sources import RandomRows
from treadle.client.engram.pool_types import OwnerShare
from treadle.contract import EngramModel, InvalidArgument, RowLayout
from treadle.contract.families import qwen_ple_model
from treadle.contract.placement import Spread, held_by
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.kernels.segment import Segment

if TYPE_CHECKING:
    from tests.conftest import Grow, Serve, Served
    from tests.flipping import flip_byte
else:
    from flipping import flip_byte

OWNERS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture(scope="session")
def wide() -> EngramModel:
    """One layer of about 130,000 rows of 320 bytes: ten chunks, 16 heads of 2.5 MB."""
    return qwen_ple_model("wide", prime_base=8_000, row=RowLayout(320, 160, "bf16"))


@pytest.fixture(scope="session")
def wide_rows(wide: EngramModel) -> NDArray[np.uint8]:
    rows = np.empty((wide.rows_hashed(0), 320), dtype=np.uint8)
    RandomRows(wide, None, 7).read(0, 0, rows)
    return rows


@pytest.fixture
def pools(serve: Serve, tmp_path: Path) -> Any:
    """`async with pools(3) as (a, b, c)`: pools of their own folders."""

    @asynccontextmanager
    async def make(count: int, **settings: Any) -> AsyncIterator[list[Served]]:
        async with AsyncExitStack() as stack:
            folders = [tmp_path / f"pool-{number}" for number in range(count)]
            yield [await stack.enter_async_context(serve(folder=folder, **settings)) for folder in folders]

    return make


async def load(served: Served, request: pb.LoadTableRequest) -> pb.Model:
    events = [event async for event in served.stub.LoadTable(request)]
    loaded: pb.Model = events[-1].loaded
    return loaded


def from_peers(peers: list[Served], model: str, owner: str = "", replicas: int = 1) -> pb.LoadTableRequest:
    request = pb.LoadTableRequest(peers=pb.PeerSource(endpoints=[p.address for p in peers], ref=pb.ModelRef(model=model)))
    if owner:
        request.placement.CopyFrom(pb.Placement(owners=OWNERS, owner=owner, replicas=replicas, stretch_rows=10_000))
    return request


def share_of(model: EngramModel, owner: str, seed: int = 7, replicas: int = 1) -> pb.LoadTableRequest:
    placement = pb.Placement(owners=OWNERS, owner=owner, replicas=replicas, stretch_rows=10_000)
    return pb.LoadTableRequest(manifest_json=model.to_json(), random=pb.RandomSource(seed=seed), placement=placement)


async def held_of(served: Served, model: str) -> list[tuple[int, int]]:
    opened = await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model=model)))
    return [(held.first, held.last) for held in opened.segments[0].held]


async def gathered(served: Served, model: str, ids: NDArray[np.int64], layer: int = 0) -> bytes:
    request = pb.GatherRequest(ref=pb.ModelRef(model=model), layer=layer, rows=ids.astype("<i8").tobytes())
    return b"".join([answer.data async for answer in served.stub.Gather(request)])


def segments_of(served: Served) -> Iterator[Path]:
    for resident in served.pool.residents():
        yield from (Path(segment.path) for segment in resident.stored.segments.values())


async def test_a_version_comes_from_a_peer_with_its_token_map(pools: Any, v41: EngramModel, token_map: NDArray[np.int32]) -> None:
    async with pools(2) as (first, second):
        loaded = await first.load(v41, token_map, seed=3)
        copied = await load(second, from_peers([first], "v41"))
        assert copied.ref == loaded.ref
        assert copied.manifest_json == loaded.manifest_json
        windows = pb.Windows(
            tokens=np.array([3, 9, 4], dtype="<i8").tobytes(), starts=np.array([0, 3], dtype="<i4").tobytes(),
            lookback=np.full((1, 3), -1, dtype="<i8").tobytes(),
        )  # fmt: skip
        request = pb.LookupRequest(ref=pb.ModelRef(model="v41"), windows=windows)
        answers = [[(a.layer, a.data) async for a in pool.stub.Lookup(request)] for pool in (first, second)]
        assert answers[0] == answers[1]
        assert {layer for layer, _ in answers[0]} == {1, 3}


async def test_a_grown_memory_comes_with_weights_and_card(pools: Any, grow: Grow) -> None:
    grown = grow(1)
    async with pools(2) as (first, second):
        await load(first, pb.LoadTableRequest(grown=pb.GrownSource(path=str(grown.path))))
        await load(second, from_peers([first], "kjv"))
        opened = await second.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model="kjv")))
        assert opened.card_json == (grown.path / "card.json").read_bytes()
        weights = [m.data async for m in second.stub.ReadFusion(pb.ReadFusionRequest(ref=pb.ModelRef(model="kjv")))]
        assert b"".join(weights) == grown.fusion


async def test_owners_keep_their_stretches_under_one_version_and_all_rows_have_an_owner(
    pools: Any, wide: EngramModel, wide_rows: NDArray[np.uint8]
) -> None:
    async with pools(3) as (whole, one, two):
        version = (await whole.load(wide, None, seed=7)).ref.version
        assert await held_of(whole, "wide") == []
        held = {}
        for served, owner in ((one, "a"), (two, "b")):
            loaded = await load(served, share_of(wide, owner))
            assert loaded.ref.version == version
            held[owner] = await held_of(served, "wide")
            assert held[owner]
            (path,) = segments_of(served)
            with Segment(path) as segment:
                assert segment.stored_bytes < 0.8 * segment.file_bytes
                assert loaded.segment_bytes == segment.stored_bytes
                assert path.stat().st_blocks * 512 <= segment.stored_bytes + (64 << 10)
            ids = np.concatenate([np.arange(first, last) for first, last in held[owner]])
            assert await gathered(served, "wide", ids) == wide_rows[ids].tobytes()
            progress = [m async for m in served.stub.VerifyModel(pb.VerifyModelRequest(ref=pb.ModelRef(model="wide")))]
            assert progress[-1].progress.bytes_done == progress[-1].progress.bytes_total
        a, b = ({row for first, last in ranges for row in range(first, last)} for ranges in held.values())
        assert not a & b  # one replica each


async def test_a_row_of_another_owner_is_refused_and_nothing_reads_as_zeros(pools: Any, wide: EngramModel) -> None:
    async with pools(1) as (served,):
        await load(served, share_of(wide, "a"))
        held = await held_of(served, "wide")
        here, outside = held[0][0], held[0][1]
        request = pb.GatherRequest(ref=pb.ModelRef(model="wide"), rows=np.array([here, outside], dtype="<i8").tobytes())
        code, text, _ = await served.failure(served.stub.Gather(request))
        assert code is grpc.StatusCode.OUT_OF_RANGE
        assert f"rows[1] is {outside}" in text
        assert "ask the owner" in text
        tokens = np.arange(400, dtype="<i8")  # 6,400 rows: some belong to others
        windows = pb.Windows(
            tokens=tokens.tobytes(),
            starts=np.array([0, 400], dtype="<i4").tobytes(),
            lookback=np.full((1, 2), -1, dtype="<i8").tobytes(),
        )
        code, text, _ = await served.failure(served.stub.Lookup(pb.LookupRequest(ref=pb.ModelRef(model="wide"), windows=windows)))
        assert code is grpc.StatusCode.OUT_OF_RANGE
        with pytest.raises(InvalidArgument, match="holds a part of layer 0 only"):
            await served_open(served, "wide", "mapped")


async def served_open(served: Served, model: str, transport: str) -> None:
    handle = await asyncio.to_thread(lambda: served.fabric.engram.open(model, transport=transport))
    handle.close()


async def test_a_new_owner_takes_its_stretches_from_owners_of_parts(
    pools: Any, wide: EngramModel, wide_rows: NDArray[np.uint8]
) -> None:
    async with pools(3) as (one, two, new):
        # between them, two of six owners with five replicas each hold every stretch
        version = (await load(one, share_of(wide, "a", replicas=5))).ref.version
        await load(two, share_of(wide, "b", replicas=5))
        loaded = await load(new, from_peers([one, two], "wide", owner="c", replicas=5))
        assert loaded.ref.version == version
        held = await held_of(new, "wide")
        ids = np.concatenate([np.arange(first, last) for first, last in held])
        assert ids.size > wide_rows.shape[0] // 2
        assert await gathered(new, "wide", ids) == wide_rows[ids].tobytes()


async def test_the_same_version_with_other_rows_takes_the_place_of_the_one_before(
    pools: Any, wide: EngramModel, wide_rows: NDArray[np.uint8]
) -> None:
    async with pools(1) as (served,):
        before = await load(served, share_of(wide, "a"))
        held = await held_of(served, "wide")
        after = await load(served, share_of(wide, "a", replicas=6))
        assert after.ref == before.ref
        assert await held_of(served, "wide") == [(0, wide_rows.shape[0])]
        ids = np.arange(held[0][1], held[0][1] + 10)
        assert await gathered(served, "wide", ids) == wide_rows[ids].tobytes()
        await served.pool.reap()
        assert not list(Path(served.pool.residents()[0].stored.lock_path).parents[2].glob(".removing-*"))
        again = await load(served, share_of(wide, "a", replicas=6))  # nothing changes: it is here already
        assert again.loaded_at_seconds == after.loaded_at_seconds


async def test_a_damaged_peer_is_passed_over_and_alone_it_is_refused(pools: Any, wide: EngramModel) -> None:
    async with pools(3) as (bad, good, new):
        for served in (bad, good):
            await served.load(wide, None, seed=7)
        (path,) = segments_of(bad)
        flip_byte(path, 2 * (2 << 20) + 3 * CHUNK_BYTES)
        code, text, _ = await new.failure(new.stub.LoadTable(from_peers([bad], "wide")))
        assert code is grpc.StatusCode.DATA_LOSS
        assert "does not fit the version's digest" in text
        assert not new.pool.residents()
        assert new.metric("loads_total", outcome="failed") == 1
        await load(new, from_peers([bad, good], "wide"))


async def test_peers_that_have_nothing_are_named_with_their_reasons(pools: Any, wide: EngramModel) -> None:
    async with pools(2) as (empty, new):
        code, text, _ = await new.failure(new.stub.LoadTable(from_peers([empty], "wide")))
        assert code is grpc.StatusCode.NOT_FOUND
        assert empty.address in text
        request = pb.LoadTableRequest(peers=pb.PeerSource(endpoints=["127.0.0.1:9"], ref=pb.ModelRef(model="wide")))
        code, text, _ = await new.failure(new.stub.LoadTable(request))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.1:9" in text
        code, text, _ = await new.failure(new.stub.LoadTable(pb.LoadTableRequest(peers=pb.PeerSource())))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (pb.Placement(owners=["a", "b"], owner="c", replicas=1), "owner"),
        (pb.Placement(owners=["a", "b"], owner="a", replicas=3), "replicas"),
        (pb.Placement(owners=["a", "a"], owner="a", replicas=1), "different names"),
        (pb.Placement(owners=["a"], owner="a", replicas=1, stretch_rows=3), "stretch_rows"),
    ],
)
async def test_a_placement_that_makes_no_sense_is_refused(
    pools: Any, wide: EngramModel, placement: pb.Placement, message: str
) -> None:
    async with pools(1) as (served,):
        request = pb.LoadTableRequest(manifest_json=wide.to_json(), random=pb.RandomSource(), placement=placement)
        code, text, _ = await served.failure(served.stub.LoadTable(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message in text


async def test_table_bytes_are_read_out_as_they_lie(pools: Any, wide: EngramModel, wide_rows: NDArray[np.uint8]) -> None:
    async with pools(2) as (whole, part):
        await whole.load(wide, None, seed=7)
        ref = pb.ModelRef(model="wide")
        request = pb.ReadTableRequest(ref=ref, first_byte=CHUNK_BYTES - 100, byte_count=3 << 20)
        data = b"".join([m.data async for m in whole.stub.ReadTable(request)])
        assert data == wide_rows.reshape(-1)[CHUNK_BYTES - 100 :][: 3 << 20].tobytes()
        beyond = pb.ReadTableRequest(ref=ref, first_byte=wide_rows.nbytes - 5, byte_count=6)
        assert (await whole.failure(whole.stub.ReadTable(beyond)))[0] is grpc.StatusCode.OUT_OF_RANGE
        other_layer = pb.ReadTableRequest(ref=ref, layer=3, byte_count=6)
        assert (await whole.failure(whole.stub.ReadTable(other_layer)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        await load(part, share_of(wide, "a"))
        (path,) = segments_of(part)
        with Segment(path) as segment:
            absent = next(chunk for chunk in range(9) if chunk not in segment.chunks)
        missing = pb.ReadTableRequest(ref=ref, first_byte=absent * CHUNK_BYTES + 5, byte_count=6)
        code, text, _ = await part.failure(part.stub.ReadTable(missing))
        assert code is grpc.StatusCode.OUT_OF_RANGE
        assert f"chunk {absent} is not held here" in text


async def test_the_sdk_loads_shares_and_peers(pools: Any, wide: EngramModel) -> None:
    async with pools(2) as (first, second):
        share = OwnerShare("a", Spread(OWNERS, 6, 10_000))
        loaded = await asyncio.to_thread(lambda: first.fabric.engram.load_random(wide, seed=7, placement=share))
        one = OwnerShare("b", Spread(OWNERS, 1, 10_000))
        copied = await asyncio.to_thread(lambda: second.fabric.engram.load_peers([first.address], "wide", placement=one))
        assert copied.version == loaded.version
        described = await asyncio.to_thread(lambda: second.fabric.engram.describe("wide"))
        assert 0 < len(described.segments[0].held) < 20
        assert copied.segment_bytes < loaded.segment_bytes


async def test_an_owner_of_no_row_says_so_and_gathers_nothing(pools: Any, ple: EngramModel) -> None:
    owners = tuple(f"owner-{number}" for number in range(40))  # more than the 16 stretches of this table
    idle = next(owner for owner in owners if not held_by(owner, ple, Spread(owners, 1))[0].size)
    async with pools(1) as (served,):
        placement = pb.Placement(owners=owners, owner=idle, replicas=1)
        await load(served, pb.LoadTableRequest(manifest_json=ple.to_json(), random=pb.RandomSource(), placement=placement))
        assert await held_of(served, "ple") == [(0, 0)]  # nothing at all would mean every row
        request = pb.GatherRequest(ref=pb.ModelRef(model="ple"), rows=bytes(8))
        assert (await served.failure(served.stub.Gather(request)))[0] is grpc.StatusCode.OUT_OF_RANGE


def test_a_key_is_shown_to_the_peers_that_it_is_for_and_to_nobody_a_caller_names(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\nanother line\n")
    key = read_key(tmp_path / "key")
    assert key == "secret"
    with closing(open_peer_version(["ours:1", "stranger:1"], "m", "", keys={"ours:1": key})) as peers:
        shown = {endpoint: fabric.engram._endpoint.metadata for endpoint, fabric in peers._fabrics.items()}
    assert shown == {"ours:1": (("authorization", "Bearer secret"),), "stranger:1": ()}
    assert read_key(None) is None
    (tmp_path / "key").write_text("\n")
    for path in (tmp_path / "key", tmp_path / "none"):
        with pytest.raises(InvalidArgument, match="peer_key_file"):
            read_key(path)
