"""News of the other owners from themselves: a fixed list of pools, each asked by its own watch. No directory is needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace

from engram_pool.domain.directory import Directory
from treadle.client.endpoint import Endpoint
from treadle.client.engram import AsyncEngramPool
from treadle.contract import TreadleError
from treadle.contract.owners import Owner

log = logging.getLogger("engram_pool")
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 1.0  # between two tries to reach an owner that does not answer


async def follow_peers(directory: Directory, endpoints: Mapping[str, Endpoint]) -> None:
    """Keep `directory` true about the owners in `endpoints`, by name; until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for name, endpoint in endpoints.items():
            await directory.learn(Owner(name, endpoint.address, reachable=False))
            tasks.create_task(_follow(directory, name, endpoint))


async def _follow(directory: Directory, name: str, endpoint: Endpoint) -> None:
    pool, retry_seconds = AsyncEngramPool(endpoint), RETRY_SECONDS_MIN
    try:
        while True:
            try:
                async with aclosing(pool.watch_owners(itself_only=True)) as lists:
                    async for listed in lists:
                        retry_seconds = RETRY_SECONDS_MIN
                        await _learn(directory, name, endpoint, listed.owners)
            except TreadleError as error:
                log.debug("an owner does not answer", extra={"owner": name, "reason": str(error)})
            await directory.lose(name)
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)
    finally:
        await pool.close()


async def _learn(directory: Directory, name: str, endpoint: Endpoint, told: tuple[Owner, ...]) -> None:
    for owner in told:
        if owner.name != name:
            log.error(
                "an owner calls itself otherwise than the list does: it is left out",
                extra={"owner": name, "endpoint": endpoint.address, "calls_itself": owner.name},
            )
            continue
        await directory.learn(replace(owner, endpoint=endpoint.address))  # as we reach it
