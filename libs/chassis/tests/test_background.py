"""Work beside the serving."""

from __future__ import annotations

import asyncio
import logging

import pytest

from treadle.chassis.background import keep_going


async def test_work_that_fails_is_logged_and_begins_again_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise LookupError("a bug")

    await keep_going(logging.getLogger("test"), "peers", work, again_seconds=0.0)
    assert begun == 3
    assert [(record.what, record.exc_info is not None) for record in caplog.records] == [("peers", True)] * 2  # type: ignore[attr-defined]


async def test_work_that_is_cancelled_stays_so() -> None:
    task = asyncio.ensure_future(keep_going(logging.getLogger("test"), "peers", asyncio.Event().wait, again_seconds=0.0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
