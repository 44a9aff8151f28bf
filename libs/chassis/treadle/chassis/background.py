"""Work beside the serving, which no bug in it may end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

AGAIN_SECONDS = 1.0


async def keep_going(
    log: logging.Logger, what: str, work: Callable[[], Awaitable[None]], again_seconds: float = AGAIN_SECONDS
) -> None:
    """Await `work`; where it raises, log that as a bug in `what` and begin it again. Ends with the work, or cancelled."""
    while True:
        try:
            await work()
            return
        except Exception as error:
            log.error("work in the background failed, and begins again", exc_info=error, extra={"what": what})
            await asyncio.sleep(again_seconds)
