"""Hints of tokens: what is taken, what becomes near, and that nobody with a deadline waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.adapters.row_stores import RowStores
from engram_pool.domain.storing import StoredVersion
from treadle.client import AsyncFabric, Fabric
from treadle.client.engram.pool_types import OwnerShare
from treadle.contract import EngramModel, InvalidArgument, NotFound, Unavailable, Windows
from treadle.contract.placement import Spread
from treadle.contract.warm_state import WarmState
from treadle.dataplane import IMPLEMENTATION, TenantLimits, Tenants
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.kernels import HashPlan, row_ids

if TYPE_CHECKING:
    from tests.conftest import Served, StartPool

Serve = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
TokenMap = NDArray[np.int32]
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 500, 150)]
native = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")


class Heard:
    """A Nearness that remembers which rows it was to bring; `go` lets them arrive."""

    def __init__(self) -> None:
        self.rows: dict[int, list[NDArray[np.int64]]] = {}
        self.go, self.near = asyncio.Event(), False
        self.error: Exception | None = None
        self.go.set()

    def brings_nearer(self, stored: StoredVersion, warm: WarmState) -> bool:
        return not self.near

    def bring_near(self, stored: StoredVersion, layer: int, rows: NDArray[np.int64]) -> Heard:
        if self.error is not None:
            raise self.error
        self.rows.setdefault(layer, []).append(rows)
        return self

    async def arrived(self, seconds: float) -> bool:
        await self.go.wait()
        return True

    def end(self) -> None:
        pass


def rows_of(model: EngramModel, layer: int, token_map: TokenMap) -> NDArray[np.int64]:
    windows = Windows.of_sequences([(PROMPT, 0)], model.order_max - 1)
    return row_ids(HashPlan.from_model(model, layer, token_map), windows).reshape(-1)


def hint(served: Served, **options: Any) -> Awaitable[int]:
    return asyncio.to_thread(partial(served.fabric.engram.hint_tokens, "demo", PROMPT, **options))


def outcomes(served: Served) -> dict[str, float]:
    counts = {name: served.metric("hint_tokens_total", outcome=name) for name in ("near", "full", "brought", "late", "failed")}
    return {name: count for name, count in counts.items() if count}


async def test_the_rows_of_a_whole_prompt_are_brought_near(
    serve: Serve, demo: EngramModel, token_map: TokenMap, eventually: Eventually
) -> None:
    heard = Heard()
    async with serve(nearness=heard) as served:
        await served.load(demo, token_map)
        assert await hint(served) == len(PROMPT)
        await eventually(lambda: outcomes(served) == {"brought": len(PROMPT)}, "all tokens brought near")
        for layer in demo.layers:
            np.testing.assert_array_equal(np.concatenate(heard.rows[layer]), rows_of(demo, layer, token_map))
        async with AsyncFabric(engram=served.address) as fabric:
            assert await fabric.engram.hint_tokens("demo", [1, 2, 3]) == 3


async def test_hints_that_wait_are_bounded_for_each_tenant_and_taken_in_turn(
    serve: Serve, demo: EngramModel, token_map: TokenMap, eventually: Eventually
) -> None:
    heard = Heard()
    heard.go.clear()
    async with serve(nearness=heard, tenants=Tenants((TenantLimits("other"),), {}), hint_tokens_max=300) as served:
        await served.load(demo, token_map)
        hinting = served.hinting
        prompt = np.array(PROMPT, dtype=np.int64)
        assert [hinting.hint("demo", "", prompt[:100], 1) for _ in range(3)] == [100, 50, 0], "its half of 300 tokens"
        assert hinting.hint("demo", "", prompt, 0) == 150, "the other tenant has its own half"
        await eventually(lambda: bool(heard.rows), "the first piece under way")
        heard.go.set()
        await eventually(lambda: outcomes(served) == {"brought": 300, "full": 150}, "all that was taken")
        sizes = [len(rows) // demo.columns for rows in heard.rows[demo.layers[0]]]
        assert sizes == [64, 64, 36, 64, 50, 22], "a piece of one, a piece of the other"
        assert hinting.hint("demo", "", prompt, 1) == 150, "there is room again"


async def test_nothing_is_taken_where_rows_are_as_near_as_they_come(serve: Serve, demo: EngramModel, token_map: TokenMap) -> None:
    heard = Heard()
    heard.near = True
    async with serve(nearness=heard) as served:
        await served.load(demo, token_map)
        assert await hint(served) == 0
        assert outcomes(served) == {"near": len(PROMPT)}


async def test_a_hint_that_makes_no_sense_is_refused(serve: Serve, demo: EngramModel, token_map: TokenMap) -> None:
    async with serve(nearness=Heard()) as served:
        await served.load(demo, token_map)
        with pytest.raises(NotFound):
            await asyncio.to_thread(served.fabric.engram.hint_tokens, "other", [1])
        with pytest.raises(InvalidArgument, match="not below 500"):
            await asyncio.to_thread(served.fabric.engram.hint_tokens, "demo", [1, 500])
        code, text, _ = await served.failure(
            served.stub.HintTokens(pb.HintTokensRequest(ref=pb.ModelRef(model="demo"), token_ids=[1] * 65537))
        )
        assert (code, "65536" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("error", [Unavailable("the version went"), ZeroDivisionError("a bug of ours")])
async def test_a_hint_that_fails_does_not_end_the_next(
    serve: Serve, demo: EngramModel, token_map: TokenMap, eventually: Eventually, error: Exception
) -> None:
    heard = Heard()
    heard.error = error
    async with serve(nearness=heard) as served:
        await served.load(demo, token_map)
        await hint(served)
        await eventually(lambda: outcomes(served) == {"failed": len(PROMPT)}, "the hint failed as a whole")
        heard.error = None
        await hint(served)
        await eventually(lambda: outcomes(served) == {"failed": len(PROMPT), "brought": len(PROMPT)}, "the next one")


async def test_a_version_leaves_while_hints_of_it_wait(
    serve: Serve, demo: EngramModel, token_map: TokenMap, eventually: Eventually
) -> None:
    heard = Heard()
    heard.go.clear()
    async with serve(nearness=heard) as served:
        await served.load(demo, token_map)
        await hint(served)
        await eventually(lambda: bool(heard.rows), "the first piece under way")
        removal = await served.pool.remove("demo", "")
        assert removal.awaiting_readers == 1, "it is read"
        heard.go.set()
        await eventually(lambda: sum(outcomes(served).values()) == len(PROMPT), "the hint ended")
        assert await served.pool.reap() == 1


@native
async def test_a_hint_makes_rows_of_a_disk_hot_and_a_part_of_a_table_brings_its_part(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: TokenMap, eventually: Eventually
) -> None:
    unique = sum(len(np.unique(rows_of(demo, layer, token_map))) for layer in demo.layers)
    for name, share in (("whole", None), ("part", OwnerShare("a", Spread(("a", "b"), 1)))):
        with start_pool(tmp_path / name, "--tier", "disk", "--hot-rows-bytes", str(1 << 20)) as process:
            pool = process.fabric.engram
            pool.load_random(demo, token_map, placement=share)
            assert pool.hint_tokens("demo", PROMPT) == len(PROMPT)
            await eventually(partial(_brought_all, process.metrics), "all tokens brought near")
            hot = _metric(process.metrics, "treadle_engram_hot_rows_inserted_total")
            assert hot == unique if share is None else 0.2 * unique < hot < 0.8 * unique


@native
async def test_hints_are_tickets_without_a_deadline(
    serve: Serve, demo: EngramModel, token_map: TokenMap, eventually: Eventually
) -> None:
    doors = NativeDoors(workers=1, tickets_max=64, stores=RowStores(on_disk=True))
    async with serve(doors=doors) as served:
        await served.load(demo, token_map)
        assert await hint(served) == len(PROMPT)
        await eventually(lambda: outcomes(served) == {"brought": len(PROMPT)}, "all tokens brought near")
        assert doors.queue.stats()["tickets_total"] == len(demo.layers) * 3, "each piece was a ticket of the queue"


def _brought_all(metrics: str) -> bool:
    return _metric(metrics, 'treadle_engram_hint_tokens_total{outcome="brought"}') == len(PROMPT)


def _metric(address: str, name: str) -> float:
    with urlopen(f"http://{address}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)


def test_a_pool_that_takes_no_hints_says_so(start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: TokenMap) -> None:
    with start_pool(tmp_path / "segments", "--tier", "disk", "--hint-tokens-max", "0") as process:
        process.fabric.engram.load_random(demo, token_map)
        assert process.fabric.engram.hint_tokens("demo", PROMPT) == 0
        with Fabric(engram=process.address) as fabric, fabric.engram.open("demo") as handle:
            assert handle.lookup(Windows.of_sequences([(PROMPT, 0)], demo.order_max - 1))
