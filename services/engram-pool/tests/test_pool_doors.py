"""What the pool tells its native doors: a version is served until its memory goes, and not a moment longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.domain.storing import StoredVersion
from treadle.contract import DataLoss, EngramModel, InvalidArgument
from treadle.contract.owners import Door
from treadle.dataplane import IMPLEMENTATION

Serve = Callable[..., AbstractAsyncContextManager[Any]]
TokenMap = NDArray[np.int32]


class Doors:
    """Remembers what it was told; `busy` versions have a request that reads them."""

    open_doors: Sequence[Door] = (Door("socket", "127.0.0.1:9"),)

    def __init__(self) -> None:
        self.served: dict[str, StoredVersion] = {}
        self.busy: set[str] = set()
        self.events: list[str] = []

    def publish(self, stored: StoredVersion) -> None:
        self.served[stored.version] = stored

    def withdraw(self, stored: StoredVersion) -> None:
        self.served.pop(stored.version, None)

    def read(self, stored: StoredVersion) -> bool:
        return stored.version in self.busy and stored.version not in self.served

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        if stored.version in self.busy:
            return False
        assert stored.segments[next(iter(stored.segments))].rows.size  # still mapped
        self.withdraw(stored)
        return True

    def drain(self) -> None:
        self.events.append("drain")

    def close(self) -> None:
        self.events.append("close")
        for stored in self.served.values():
            assert stored.segments[next(iter(stored.segments))].rows.size
        self.served.clear()


async def test_a_loaded_version_is_served_and_its_doors_are_told_to_callers(
    serve: Serve, demo: EngramModel, token_map: TokenMap
) -> None:
    doors = Doors()
    async with serve(doors=doors) as served:
        await served.load(demo, token_map)
        assert list(doors.served) == [model.version for model in await asyncio.to_thread(served.fabric.engram.list_models)]
        status = await asyncio.to_thread(served.fabric.engram.status)
        assert [(door.transport, door.address) for door in status.doors] == [("socket", "127.0.0.1:9")]
    assert doors.events == ["drain", "close"]


async def test_an_adopted_version_is_served_again(serve: Serve, demo: EngramModel, token_map: TokenMap) -> None:
    async with serve() as served:
        loaded = await served.load(demo, token_map)
    doors = Doors()
    async with serve(doors=doors):
        assert list(doors.served) == [loaded.ref.version]


async def test_a_removed_version_stays_while_a_request_reads_it(serve: Serve, demo: EngramModel, token_map: TokenMap) -> None:
    doors = Doors()
    async with serve(doors=doors) as served:
        loaded = await served.load(demo, token_map)
        doors.busy.add(loaded.ref.version)
        removal = await served.pool.remove("demo", "")
        assert removal.awaiting_readers == 1
        assert list(doors.served) == [loaded.ref.version]
        doors.busy.clear()
        assert await served.pool.reap() == 1
        assert not doors.served


async def test_a_corrupt_version_is_withdrawn_at_once_and_unmapped_when_the_last_request_ends(
    serve: Serve, demo: EngramModel, token_map: TokenMap
) -> None:
    doors = Doors()
    async with serve(doors=doors) as served:
        loaded = await served.load(demo, token_map)
        doors.busy.add(loaded.ref.version)
        segment = next(iter(doors.served[loaded.ref.version].segments.values()))
        with segment.path.open("r+b") as file:
            file.seek(segment.rows_offset_bytes)
            file.write(b"\xff" * 64)
        with pytest.raises(DataLoss):
            async for _ in served.pool.verify("demo", ""):
                pass
        assert not doors.served
        await served.pool.reap()
        assert segment.rows.size  # still mapped
        doors.busy.clear()
        await served.pool.reap()
        with pytest.raises(InvalidArgument, match="closed"):
            _ = segment.rows.size


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built")
async def test_native_doors_keep_nothing_mapped_that_was_let_go(serve: Serve, demo: EngramModel, token_map: TokenMap) -> None:
    doors = NativeDoors(workers=1, tickets_max=4)
    async with serve(doors=doors) as served:
        loaded = await served.load(demo, token_map)
        resident = served.pool.find("demo", "")
        segment = next(iter(resident.stored.segments.values()))
        assert not doors.read(resident.stored)
        await served.pool.remove("demo", loaded.ref.version)
        with pytest.raises(InvalidArgument, match="closed"):
            _ = segment.rows.size
        assert str(segment.path.parent) not in Path("/proc/self/maps").read_text()  # noqa: ASYNC240 - a file of the kernel's
