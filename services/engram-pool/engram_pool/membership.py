"""Joins this pool to the fabric's other owners, and leaves them. Part of the entry point: it knows settings and adapters."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from engram_pool.adapters.owner_peers import follow_peers
from engram_pool.adapters.peer_pools import read_key
from engram_pool.domain.directory import Directory
from engram_pool.domain.pool import Pool
from engram_pool.domain.presence import Presence
from engram_pool.settings import Settings
from treadle.chassis.background import keep_going
from treadle.chassis.settings import WrongSetting, split_address
from treadle.client.endpoint import Endpoint
from treadle.contract import Unavailable

if TYPE_CHECKING:
    from engram_pool.adapters.redis_directory import RedisDirectory

log = logging.getLogger("engram_pool")
ANY_HOST = ("0.0.0.0", "[::]", "::")
REDIS_URL_VARIABLE = "TREADLE_REDIS_URL"


class Membership:
    """`begin` once the pool listens, `leave` when it is to stop, `end` when it has.

    Raises Unavailable where a Redis is named and its client is not installed, WrongSetting where others could not reach this pool.
    """

    def __init__(self, settings: Settings, pool: Pool, directory: Directory) -> None:
        endpoints = settings.owner_endpoints
        self._directory, self._tasks = directory, list[asyncio.Task[None]]()
        self._peers = {name: _peer(settings, address) for name, address in endpoints.items() if name != settings.owner}
        self._presence = Presence(
            pool, directory, advertise=settings.advertise or endpoints.get(settings.owner, ""),
            leave_seconds_max=settings.leave_seconds_max,
        )  # fmt: skip
        url = "" if endpoints else settings.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")
        self._redis = _redis(url, directory) if url else None
        if url and not settings.advertise and split_address(settings.listen)[0] in ANY_HOST:
            raise WrongSetting(f"advertise: others cannot reach {settings.listen}; say at which host:port they reach this pool")

    async def begin(self, listen: str) -> None:
        """Tell of this pool and listen to others. listen: host:port."""
        await self._presence.tell(listen)
        self._start("presence", partial(self._presence.keep, listen))
        if self._peers:
            self._start("peers", partial(follow_peers, self._directory, self._peers))
        if self._redis is not None:
            self._start("redis", self._redis.run)

    async def leave(self) -> None:
        """Have clients go elsewhere; then end all watches."""
        await self._presence.leave()
        await self._directory.close()

    async def end(self) -> None:
        """Stop telling and listening."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._redis is not None:
            await self._redis.leave()
            await self._redis.close()

    def _start(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(keep_going(log, what, work)))


def _peer(settings: Settings, address: str) -> Endpoint:
    """Another owner, called as every peer is."""
    return Endpoint(
        address, read_key(settings.peer_key_file), settings.peer_tls_root_file, tls_cert_file=settings.tls_cert_file,
        tls_key_file=settings.tls_key_file,
    )  # fmt: skip


def _redis(url: str, directory: Directory) -> RedisDirectory:
    try:
        from engram_pool.adapters.redis_directory import RedisDirectory
    except ImportError as error:
        raise Unavailable("a Redis is named, and its client is not installed: pip install 'treadle-engram-pool[redis]'") from error
    return RedisDirectory(url, directory)
