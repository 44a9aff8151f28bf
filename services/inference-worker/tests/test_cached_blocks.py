"""What watchers of the prefix cache are told, against what lies in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.domain.cached_blocks import MESSAGE_BLOCKS, BlockChanges, BlockLog, CachedBlock
from inference_worker.domain.errors import Draining
from inference_worker.domain.prefix_cache import PrefixCache
from treadle.contract.errors import ResourceExhausted


class Told:
    """What a watcher believes to be there."""

    def __init__(self) -> None:
        self.names: dict[bytes, bytes] = {}
        self.clears = 0

    def apply(self, changes: BlockChanges) -> None:
        if changes.cleared:
            self.names.clear()
            self.clears += 1
        for name in changes.removed:
            del self.names[name]
        for block in changes.stored:
            assert not block.parent or block.parent in self.names, "a parent is told before its children"
            self.names[block.name] = block.parent


def block(number: int, parent: int | None = None) -> CachedBlock:
    return CachedBlock(b"%d" % number, b"" if parent is None else b"%d" % parent, (number,))


async def read(watch: AsyncGenerator[BlockChanges, None], told: Told, names: set[bytes]) -> None:
    """Read until exactly `names` are believed to be there."""
    async with asyncio.timeout(10):
        while True:
            told.apply(await anext(watch))
            if set(told.names) == names:
                return


async def test_a_watcher_is_told_what_is_there_and_then_what_changes() -> None:
    log, told = BlockLog(), Told()
    for number in range(MESSAGE_BLOCKS + 5):
        log.stored(block(number, number - 1 if number else None))
    watch = log.watch()
    first = await anext(watch)
    assert len(first.stored) == MESSAGE_BLOCKS
    assert not first.snapshot_complete
    told.apply(first)
    second = await anext(watch)
    assert second.snapshot_complete
    assert len(second.stored) == 5
    told.apply(second)

    def change() -> None:
        log.removed(b"%d" % (MESSAGE_BLOCKS + 4))
        log.stored(block(999, 3))

    writer = threading.Thread(target=change)
    writer.start()
    await read(watch, told, {b"%d" % number for number in range(MESSAGE_BLOCKS + 4)} | {b"999"})
    writer.join()
    await watch.aclose()


async def test_an_empty_cache_has_a_snapshot_too_and_silence_has_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_worker.domain.cached_blocks.HEARTBEAT_SECONDS", 0.01)
    watch = BlockLog().watch()
    assert await anext(watch) == BlockChanges(snapshot_complete=True)
    assert await anext(watch) == BlockChanges()
    await watch.aclose()


async def test_a_watcher_that_does_not_keep_up_is_told_everything_anew() -> None:
    log, told = BlockLog(changes_max=3), Told()
    watch = log.watch()
    told.apply(await anext(watch))
    for number in range(10):
        log.stored(block(number))
    log.removed(b"4")
    await read(watch, told, {b"%d" % number for number in range(10) if number != 4})
    assert told.clears == 1
    await watch.aclose()


async def test_watchers_are_few_and_a_closed_log_ends_them() -> None:
    log = BlockLog(watchers_max=1)
    watch = log.watch()
    await anext(watch)
    with pytest.raises(ResourceExhausted, match="1 watch the blocks already"):
        await anext(log.watch())
    log.close()
    with pytest.raises(Draining):
        await anext(watch)
    with pytest.raises(Draining):  # and its place is free again
        await anext(log.watch())


@dataclass(frozen=True)
class Room:
    """A block that holds nothing."""

    nbytes: int = 10


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=6)), max_size=40), st.integers(10, 80))
def test_what_is_told_is_what_lies_in_the_cache_and_no_block_is_without_its_parent(
    sequences: list[tuple[int, list[int]]], bytes_max: int
) -> None:
    async def run() -> None:
        log, told = BlockLog(changes_max=8), Told()
        cache: PrefixCache[Room] = PrefixCache(bytes_max, log.removed)
        watch = log.watch()
        told.apply(await anext(watch))
        for start, tokens in sequences:
            chain = [bytes([start, *tokens[:length]]) for length in range(1, len(tokens) + 1)]
            cache.match(chain)
            for place in range(len(chain)):
                if chain[place] not in cache and cache.put(chain[: place + 1], Room()):
                    log.stored(CachedBlock(chain[place], chain[place - 1] if place else b"", (tokens[place],)))
            cache.touch(chain)
            there = {bytes([each, *more]) for each in range(4) for more in _all(6) if bytes([each, *more]) in cache}
            assert cache.byte_count == 10 * len(there) == 10 * len(log) <= bytes_max
            if there != set(told.names):
                await read(watch, told, there)
        await watch.aclose()

    asyncio.run(run())


def _all(length_max: int) -> list[list[int]]:
    """All words of 0 and 1 of length 1 to `length_max`."""
    found: list[list[int]] = [[]]
    for word in found:
        if len(word) < length_max:
            found += [[*word, 0], [*word, 1]]
    return found[1:]
