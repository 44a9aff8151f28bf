"""One timer for many waits: each gets its whole time, and no more."""

from __future__ import annotations

import asyncio

import pytest

from inference_gateway.domain.patience import Patience


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_wait_in_time_gives_what_came() -> None:
    patience = Patience()
    assert [await patience.within(5, asyncio.sleep(0, result=number)) for number in range(3)] == [0, 1, 2]
    assert not patience.lost
    patience.close()


async def test_a_wait_that_is_too_long_is_interrupted_and_leaves_no_trace_in_the_task() -> None:
    patience, task = Patience(), asyncio.current_task()
    with pytest.raises(TimeoutError):
        await patience.within(0.01, never())
    assert patience.lost
    assert task is not None
    assert not task.cancelling()


async def test_every_wait_gets_its_whole_time_whenever_the_timer_was_set() -> None:
    patience, loop = Patience(), asyncio.get_running_loop()
    begun = loop.time()
    await patience.within(0.1, asyncio.sleep(0))
    await asyncio.sleep(0.06)
    with pytest.raises(TimeoutError):
        await patience.within(0.1, never())
    assert loop.time() - begun >= 0.155  # the timer of the first wait rang at 0.1


async def test_a_shorter_wait_behind_a_longer_one_ends_in_its_own_time() -> None:
    patience, loop = Patience(), asyncio.get_running_loop()
    await patience.within(60, asyncio.sleep(0))
    begun = loop.time()
    with pytest.raises(TimeoutError):
        await patience.within(0.01, never())
    assert loop.time() - begun < 5


async def test_time_between_two_waits_is_nobodys() -> None:
    patience = Patience()
    await patience.within(0.02, asyncio.sleep(0))
    await asyncio.sleep(0.05)  # the timer rings meanwhile
    assert await patience.within(5, asyncio.sleep(0, result="came")) == "came"
    assert not patience.lost


async def test_a_wait_can_be_lost_before_its_time() -> None:
    patience = Patience()
    asyncio.get_running_loop().call_soon(patience.lose)
    with pytest.raises(TimeoutError):
        await patience.within(60, never())
    patience.lose()  # nobody waits: nothing happens


@pytest.mark.parametrize("also_lost", [False, True])
async def test_a_cancellation_by_others_stays_one(also_lost: bool) -> None:
    patience = Patience()
    task = asyncio.create_task(patience.within(60, never()))
    await asyncio.sleep(0)
    task.cancel()
    if also_lost:
        patience.lose()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
