"""The owners of a fabric in Redis: a key with a lease for each, a set of their names, a channel that tells of changes.

`treadle:engram:owner:NAME` holds an entry and goes LEASE_SECONDS after its owner renewed it last; `treadle:engram:owners` is the
set of names, off which every reader takes those without an entry; the channel of that name says which entry changed. All is read
again every REREAD_SECONDS, so a lost message costs no more than that. Redis is never asked on the way to a row, and what it has
lost its owners write again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress

import redis.asyncio as redis
from redis.exceptions import RedisError

from engram_pool.domain.directory import Directory
from treadle.client.engram.owners import owner_bytes, owner_from_bytes
from treadle.contract import InvalidArgument
from treadle.contract.placement import OWNERS_MAX

log = logging.getLogger("engram_pool")
PREFIX = "treadle:engram:owner:"
NAMES = "treadle:engram:owners"
LEASE_SECONDS = 4.0  # an owner that was killed is off the list this soon, if nobody noticed before
RENEW_SECONDS = 1.0  # three renewals may fail
REREAD_SECONDS = 1.0
CALL_SECONDS = 1.0  # a Redis that hangs is a Redis that is down


class RedisDirectory:
    """Keeps `directory` and the Redis at `url` true to each other. `run` until cancelled, then `leave`, then `close`."""

    def __init__(self, url: str, directory: Directory) -> None:
        self._directory, self._heard = directory, asyncio.Event()
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=CALL_SECONDS, socket_connect_timeout=CALL_SECONDS, max_connections=8, protocol=2,
            )  # fmt: skip
            # A subscription waits for long; it must not end as a call that hangs does.
            self._listener = redis.Redis.from_url(url, socket_connect_timeout=CALL_SECONDS, max_connections=2, protocol=2)
        except (ValueError, RedisError) as error:
            raise InvalidArgument(f"redis_url: {type(error).__name__}; redis://HOST:PORT/0 expected") from error

    async def run(self) -> None:
        """Renew this pool's lease and follow the others', until cancelled. An outage is a warning, then a stale directory."""
        self._directory.expect_news()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._read())
            tasks.create_task(self._listen())

    async def leave(self) -> None:
        """Take this pool's entry out, at its end."""
        name = self._directory.name
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(CALL_SECONDS), self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(PREFIX + name)
                pipe.srem(NAMES, name)
                pipe.publish(NAMES, name)
                await pipe.execute()

    async def close(self) -> None:
        """Close the connections."""
        for each in (self._redis, self._listener):
            with suppress(RedisError, OSError, TimeoutError):
                await each.aclose()

    async def _renew(self) -> None:
        told = -1
        while True:
            seen, entry = self._directory.generation, self._directory.itself
            if entry is not None:
                with suppress(RedisError, OSError, TimeoutError):  # the reader sees the same outage, and says so
                    async with asyncio.timeout(CALL_SECONDS), self._redis.pipeline(transaction=True) as pipe:
                        pipe.set(PREFIX + entry.name, owner_bytes(entry), px=round(LEASE_SECONDS * 1000))
                        pipe.sadd(NAMES, entry.name)
                        if entry.epoch != told:
                            pipe.publish(NAMES, entry.name)
                        await pipe.execute()
                    told = entry.epoch
            until = asyncio.get_running_loop().time() + RENEW_SECONDS
            while self._directory.itself is entry and (left := until - asyncio.get_running_loop().time()) > 0:
                if await self._directory.wait_changed(seen, left):
                    seen = self._directory.generation

    async def _read(self) -> None:
        while True:
            self._heard.clear()
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await self._read_all()
                await self._directory.heard()
            except (RedisError, OSError, TimeoutError):
                await self._directory.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(REREAD_SECONDS):
                    await self._heard.wait()

    async def _read_all(self) -> None:
        listed = sorted(_bytes(name).decode("utf-8", "replace") for name in await self._redis.smembers(NAMES))
        names = [name for name in listed if name != self._directory.name]
        entries = await self._redis.mget([PREFIX + name for name in names]) if names else []
        found = [(name, data) for name, data in zip(names, entries, strict=True) if data is not None]
        gone = [name for name, data in zip(names, entries, strict=True) if data is None]
        for name in gone:
            await self._directory.lose(name)
        if len(found) >= OWNERS_MAX:  # of those who live: names of dead owners hide nobody
            log.error("more owners in Redis than a fabric has", extra={"owners": len(found), "limit": OWNERS_MAX})
            found = found[: OWNERS_MAX - 1]
        for name, data in found:
            try:
                owner = owner_from_bytes(_bytes(data))
                if owner.name != name:
                    raise InvalidArgument(f"it tells of {owner.name!r}")
            except InvalidArgument as error:
                log.error("an entry in Redis is none: left out", extra={"key": PREFIX + name, "reason": str(error)})
                continue
            await self._directory.learn(owner)
        for owner in self._directory.listing().owners:
            if owner.name not in listed and owner.name != self._directory.name:
                await self._directory.lose(owner.name)
        await self._forget(gone)

    async def _forget(self, names: list[str]) -> None:
        """Take names off the set whose owners were killed: who leaves does so itself. One that comes back meanwhile stays."""
        if not names:
            return
        keys = [PREFIX + name for name in names]
        with suppress(RedisError):  # what was read is true all the same; the next read tries again
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(*keys)
                still = [name for name, data in zip(names, await pipe.mget(keys), strict=True) if data is None]
                pipe.multi()  # type: ignore[no-untyped-call]
                if still:
                    pipe.srem(NAMES, *still)
                await pipe.execute()

    async def _listen(self) -> None:
        while True:
            with suppress(RedisError, OSError, TimeoutError):
                async with self._listener.pubsub(ignore_subscribe_messages=True) as news:
                    await news.subscribe(NAMES)
                    async with aclosing(news.listen()) as messages:
                        async for _ in messages:
                            self._heard.set()
            await asyncio.sleep(REREAD_SECONDS)


def _bytes(answer: bytes | str) -> bytes:
    """What Redis answers where nothing is decoded; the client's types know no better."""
    return answer if isinstance(answer, bytes) else answer.encode()
