"""Keeps the index of a member's blocks true to what the member tells, and empty while it cannot be heard."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from inference_gateway.domain.member import Member
from treadle.contract.errors import TreadleError

log = logging.getLogger("treadle.gateway.blocks")
SILENCE_SECONDS_MAX = 10.0  # a worker tells something every 3 s, be it nothing
WATCH_SECONDS = 24 * 3600.0  # of one call; then the next begins with a snapshot
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.1, 3.0


async def follow_blocks(member: Member) -> None:
    """Follow until cancelled. Each start begins with all that is there, so that nothing old outlives a broken stream."""
    retry_seconds = RETRY_SECONDS_FIRST
    while True:
        status = member.watch.status
        if member.watch.not_ready_because() is None and status is not None and status.block_tokens:
            try:
                if await _follow_once(member):
                    retry_seconds = RETRY_SECONDS_FIRST
            except (TreadleError, TimeoutError) as error:
                log.debug("blocks cannot be heard", extra={"worker": member.name, "reason": f"{type(error).__name__}: {error}"})
            except Exception:  # the index is worth a better choice, never a request
                log.exception("bug in following blocks", extra={"worker": member.name})
        await asyncio.sleep(retry_seconds)
        retry_seconds = min(RETRY_SECONDS_MAX, retry_seconds * 2)


async def _follow_once(member: Member) -> bool:
    """Until the stream ends, by an error or not; whether everything was told once."""
    index, complete = member.blocks, False
    try:
        async with aclosing(member.worker.watch_blocks(WATCH_SECONDS)) as stream:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS_MAX):
                    index.apply(await anext(stream))
                complete = complete or index.complete
    except StopAsyncIteration:
        return complete
    finally:
        index.clear()
