"""Who is there, in Redis: a key with a lease for each, a set of their names, a channel that tells of changes.

`treadle:KIND:NAME` holds an entry and goes LEASE_SECONDS after it was put last; `treadle:KINDs` is the set of names, off
which every reader takes those without an entry; the channel of that name says which entry changed. Readers read all again
every REREAD_SECONDS, so a lost message costs no more than that. Redis is never the only copy: what it has lost is put again
within RENEW_SECONDS by whom it is about. Owns the keys and the calls; what an entry says, and what an outage means, its users.

Needs the package `redis`: an optional dependency of the services that use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import redis.asyncio as redis
from redis.exceptions import RedisError

from treadle.contract.errors import InvalidArgument, Unavailable

LEASE_SECONDS = 4.0  # one that was killed is off the list this soon, if nobody noticed before
RENEW_SECONDS = 1.0  # three renewals may fail
REREAD_SECONDS = 1.0
CALL_SECONDS = 1.0  # a Redis that hangs is a Redis that is down


@dataclass(frozen=True, slots=True)
class Entries:
    """What a read found, rising by name. listed: all names; those without an entry are of the killed, and are taken off the set."""

    found: Mapping[str, bytes]
    listed: frozenset[str]


class Leases:
    """Entries of one kind. Made inside the loop that uses it; `listen` in a task of its own; `await close()`.

    kind: e.g. `engram:owner`
    Raises InvalidArgument for a URL that is none. All calls raise Unavailable while Redis does not answer.
    """

    def __init__(self, url: str, kind: str) -> None:
        self._prefix, self._names = f"treadle:{kind}:", f"treadle:{kind}s"
        self._heard = asyncio.Event()
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=CALL_SECONDS, socket_connect_timeout=CALL_SECONDS, max_connections=8, protocol=2,
            )  # fmt: skip
            # A subscription waits for long; it must not end as a call that hangs does.
            self._listener = redis.Redis.from_url(url, socket_connect_timeout=CALL_SECONDS, max_connections=2, protocol=2)
        except (ValueError, RedisError) as error:
            raise InvalidArgument(f"redis_url: {type(error).__name__}; redis://HOST:PORT/0 expected") from error

    async def put(self, name: str, entry: bytes, *, news: bool) -> None:
        """Put or renew an entry; news: tell readers now, for it says something else than before."""
        async with calling(), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._prefix + name, entry, px=round(LEASE_SECONDS * 1000))
            pipe.sadd(self._names, name)
            if news:
                pipe.publish(self._names, name)
            await pipe.execute()

    async def remove(self, name: str) -> None:
        """Take an entry out."""
        async with calling(), self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._prefix + name)
            pipe.srem(self._names, name)
            pipe.publish(self._names, name)
            await pipe.execute()

    async def read(self) -> Entries:
        """All entries that are there."""
        self._heard.clear()
        async with calling():
            names = sorted(_bytes(name).decode("utf-8", "replace") for name in await self._redis.smembers(self._names))
            entries = await self._redis.mget([self._prefix + name for name in names]) if names else []
            await self._forget([name for name, entry in zip(names, entries, strict=True) if entry is None])
        found = {name: _bytes(entry) for name, entry in zip(names, entries, strict=True) if entry is not None}
        return Entries(found, frozenset(names))

    async def wait_news(self, seconds: float = REREAD_SECONDS) -> None:
        """Until somebody tells of a change since the last read, or `seconds` are over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._heard.wait()

    async def listen(self) -> None:
        """Hear of changes until cancelled, whatever Redis does."""
        while True:
            with _cancellable(), suppress(RedisError, OSError, TimeoutError):
                async with self._listener.pubsub(ignore_subscribe_messages=True) as news:
                    await news.subscribe(self._names)
                    async with aclosing(news.listen()) as messages:
                        async for _ in messages:
                            self._heard.set()
            await asyncio.sleep(REREAD_SECONDS)

    async def close(self) -> None:
        """Close the connections."""
        for each in (self._redis, self._listener):
            with suppress(RedisError, OSError, TimeoutError):
                await each.aclose()

    async def _forget(self, names: list[str]) -> None:
        """Take names off the set whose owners were killed: who leaves does so itself. One that comes back meanwhile stays."""
        if not names:
            return
        keys = [self._prefix + name for name in names]
        with suppress(RedisError):  # what was read is true all the same; the next read tries again
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(*keys)
                still = [name for name, entry in zip(names, await pipe.mget(keys), strict=True) if entry is None]
                pipe.multi()  # type: ignore[no-untyped-call]
                if still:
                    pipe.srem(self._names, *still)
                await pipe.execute()


@asynccontextmanager
async def calling() -> AsyncIterator[None]:
    """A call of Redis within its time. Raises Unavailable."""
    try:
        with _cancellable():
            async with asyncio.timeout(CALL_SECONDS):
                yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"Redis does not answer: {type(error).__name__}") from error


@contextmanager
def _cancellable() -> Iterator[None]:
    """A body that is cancelled ends as cancelled. The client of Redis now and then loses a cancellation, and goes on."""
    task = asyncio.current_task()
    assert task is not None, "only tasks call Redis"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


def _bytes(answer: bytes | str) -> bytes:
    """What Redis answers where nothing is decoded; the client's types know no better."""
    return answer if isinstance(answer, bytes) else answer.encode()
