"""The owners of a fabric as a pool knows them, without any source of news."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from engram_pool.domain.directory import HEARTBEAT_SECONDS, KEPT_SECONDS, STALE_SECONDS, Directory
from treadle.contract import ResourceExhausted, Unavailable
from treadle.contract.owners import Door, Holding, Owner
from treadle.contract.placement import OWNERS_MAX

HELD = (Holding("m", "ab" * 32, {2: [(0, 10)]}),)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def names(directory: Directory) -> list[str]:
    return [owner.name for owner in directory.listing().owners]


async def test_what_a_pool_tells_of_itself_is_newer_than_all_it_said_before() -> None:
    first, second = Directory("a"), Directory("a")
    await first.tell("h:1", [Door("socket", "h:2")], HELD)
    told = first.itself
    await first.tell("h:1", [Door("socket", "h:2")], HELD)
    assert first.itself is told  # the same again is no news
    await second.tell("h:1", [], ())  # another process, started later
    assert told is not None
    assert second.itself is not None
    assert second.itself.epoch > told.epoch
    await second.leave()
    assert (second.itself.leaving, second.itself.reachable) == (True, True)


async def test_an_older_entry_is_not_believed() -> None:
    directory = Directory("a")
    await directory.learn(Owner("b", "h:2", epoch=5, leaving=True))
    await directory.learn(Owner("b", "h:1", epoch=4))
    assert directory.listing().owners == (Owner("b", "h:2", epoch=5, leaving=True),)


async def test_an_owner_that_is_lost_stays_on_the_list_and_goes_when_it_does_not_come_back() -> None:
    clock = Clock()
    directory = Directory("a", lasting=("c",), clock=clock)
    for name in ("b", "c"):
        await directory.learn(Owner(name, "h:1", holdings=HELD))
        await directory.lose(name)
    assert [(owner.reachable, owner.holdings) for owner in directory.listing().owners] == [(False, HELD)] * 2
    clock.now += KEPT_SECONDS - 1
    await directory.look()
    assert names(directory) == ["b", "c"]
    clock.now += 2
    await directory.look()
    assert names(directory) == ["c"]  # settings name it: it stays
    await directory.learn(Owner("b", "h:1", holdings=HELD))
    assert names(directory) == ["b", "c"]


async def test_one_that_said_it_leaves_is_gone_when_it_is_lost() -> None:
    directory = Directory("a")
    await directory.learn(Owner("b", "h:1", leaving=True))
    await directory.lose("b")
    assert names(directory) == []


async def test_a_directory_that_does_not_answer_is_stale_and_forgets_nobody() -> None:
    clock = Clock()
    directory = Directory("a", clock=clock)
    assert not directory.stale
    await directory.heard()
    await directory.learn(Owner("b", "h:1"))
    await directory.lose("b")
    clock.now += STALE_SECONDS + KEPT_SECONDS
    await directory.look()
    assert (directory.listing().stale, names(directory)) == (True, ["b"])
    assert directory.age_seconds == STALE_SECONDS + KEPT_SECONDS
    await directory.learn(Owner("b", "h:1", epoch=1))
    await directory.heard()
    assert directory.listing().stale is False
    assert names(directory) == ["b"]


async def test_an_entry_under_our_own_name_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory("a")
    await directory.tell("h:1", [], ())
    await directory.learn(Owner("a", "h:9", epoch=1 << 62))
    assert [owner.endpoint for owner in directory.listing().owners] == ["h:1"]
    assert "another pool calls itself as this one does" in caplog.text


async def test_owners_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory("self")
    for number in range(OWNERS_MAX + 3):
        await directory.learn(Owner(f"o{number}", "h:1"))
    assert len(names(directory)) == OWNERS_MAX - 1
    assert "beyond the limit" in caplog.text


async def test_a_watch_tells_at_once_after_each_change_and_in_silence_that_it_lives() -> None:
    directory = Directory("a")
    async with aclosing(directory.watch()) as lists:
        first = await anext(lists)
        assert first is not None
        assert first.owners == ()
        begun = asyncio.get_running_loop().time()
        assert await anext(lists) is None
        assert asyncio.get_running_loop().time() - begun >= 0.9 * HEARTBEAT_SECONDS
        await directory.learn(Owner("b", "h:1"))
        told = await anext(lists)
        assert told is not None
        assert [owner.name for owner in told.owners] == ["b"]
        await directory.close()
        with pytest.raises(Unavailable):
            await anext(lists)


async def test_watches_are_bounded() -> None:
    directory = Directory("a", watchers_max=1)
    async with aclosing(directory.watch()) as one, aclosing(directory.watch()) as other:
        await anext(one)
        with pytest.raises(ResourceExhausted, match="in progress"):
            await anext(other)
