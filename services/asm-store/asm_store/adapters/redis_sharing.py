"""What replicas know together, in Redis: who is there and keeps what, pointers, pins, deletions.

Each replica has its part on its own disk; what Redis has lost is written again by whom it is about, and of two words the newer
holds. Redis is never asked on the way to a version that is here. A pointer is flipped by compare-and-set in Redis alone: while it
does not answer, none is. Keys: redis_words.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from asm_store.adapters import redis_words as words
from asm_store.domain.compute import Compute
from asm_store.domain.pointers import newer
from asm_store.domain.ports import Remote, Replica
from asm_store.domain.replicating import Replicating
from asm_store.domain.versions import Key, Pin, Pointer
from treadle.chassis.leases import CALL_SECONDS, RENEW_SECONDS, Entries, Leases, calling
from treadle.contract.errors import InvalidArgument, Overtaken, Unavailable

log = logging.getLogger("asm_store")
FLIPS_MAX = 16  # tries of a compare-and-set that others overtake
REPLICAS_MAX = 64
READ_AT_ONCE = 8  # versions of one call: each has 1 MiB of manifest at most, and is parsed for milliseconds
MEMBER_SECONDS = 90.0 * 86_400  # a replica that was away for longer is forgotten, with what it kept
SWAP = """
local now = redis.call('HGET', KEYS[1], ARGV[1])
if (now or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return 1
"""
DROP = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
return 1
"""
TAKE = """
local now = redis.call('GET', KEYS[1])
if now and now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""
CLAIM_SECONDS = 120  # from the claim of a name until its first version stands in Redis: a rename, and a word to Redis
CHANNEL = f"treadle:{words.KIND}s"  # the one that leases listen to


class RedisSharing:
    """The Sharing of one replica. `run` in a task, then `leave`, then `close`. Raises InvalidArgument for a URL that is none."""

    def __init__(self, url: str, name: str, compute: Compute) -> None:
        self.name, self._compute = name, compute
        self.others: tuple[Replica, ...] = ()
        self.stale = True  # until it has answered
        self._leases, self._run = Leases(url, words.KIND), secrets.token_hex(8)
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=CALL_SECONDS, socket_connect_timeout=CALL_SECONDS, max_connections=8, protocol=2,
            )  # fmt: skip
        except (ValueError, RedisError) as error:
            raise InvalidArgument(f"redis_url: {type(error).__name__}; redis://HOST:PORT/0 expected") from error
        self._mine: Replicating | None = None
        self._address, self._generation, self._told = "", 0, 0  # how often its list has changed, and anything of it
        self._put_counts = (-1, -1)  # both, as the lease was put last
        self._written = frozenset[bytes]()  # fields of its list, as last written or found
        self._deleted: dict[Key, float] = {}  # deletions that Redis has, as last seen or said
        self._seen: dict[str, words.Lease | None] = {}  # whose hash was read, at which lease; None: of one that is away
        self._changed = asyncio.Event()
        self._left = False  # its lease is not put again
        self._putting, self._reading = asyncio.Lock(), asyncio.Lock()

    def join(self, mine: Replicating, address: str) -> None:
        """Whom this replica speaks for, and where others reach it, host:port. Before `run`."""
        self._mine, self._address = mine, address

    def told(self) -> None:
        """See Sharing."""
        self._told += 1
        self._changed.set()

    async def refresh(self) -> None:
        """See Sharing."""
        with suppress(Unavailable):
            await self._read()

    async def flip(self, mine: Pointer, decide: Callable[[Pointer], Pointer]) -> Pointer:
        """See Sharing. Unavailable before `join`, too: a start that obeys a tombstone clears pointers before anybody is spoken to."""
        if self._mine is None:
            raise Unavailable("the store is starting and does not speak to Redis yet")
        await self._put()  # that others find what they will be told of
        await self._bury()
        for _ in range(FLIPS_MAX):
            async with calling():
                raw = await self._redis.hget(words.POINTERS, mine.name)
            now = newer(mine, words.read_hash("pointers", {mine.name: raw}, Pointer.from_json).get(mine.name) if raw else None)
            flipped = decide(now)
            if flipped == now and raw is not None:
                return now
            if await self._swap(flipped, raw or b""):
                return flipped
        raise Overtaken(f"{mine.name} is flipped by others again and again; try again")

    async def claim(self, name: str, tenant: str) -> bool:
        """See Sharing."""
        async with calling():
            return bool(await self._redis.eval(TAKE, 1, words.CLAIM + name, tenant, CLAIM_SECONDS))

    async def run(self) -> None:
        """Renew this replica's lease and follow the others', until cancelled. An outage is a warning, then a stale list."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._follow())
            tasks.create_task(self._leases.listen())

    async def leave(self) -> None:
        """Take this replica's lease out, at its end; what it keeps stays written down."""
        self._left = True
        async with self._putting:
            with suppress(Unavailable):
                await self._leases.remove(self.name)

    async def close(self) -> None:
        """Close the connections."""
        await self._leases.close()
        with suppress(RedisError, OSError, TimeoutError):
            await self._redis.aclose()

    async def _renew(self) -> None:
        while True:
            self._changed.clear()
            with suppress(Unavailable):  # the reader sees the same outage, and says so
                await self._put()
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._changed.wait()

    async def _follow(self) -> None:
        while True:
            try:
                await self._read()
                if self.stale:
                    log.info("Redis answers", extra={"replica": self.name})
                self.stale = False
            except Unavailable as error:
                if not self.stale:
                    log.warning("what replicas share cannot be read; what is here is served", extra={"reason": str(error)})
                self.stale = True
            await self._leases.wait_news()

    async def _put(self) -> None:
        """Write what this replica keeps, where that has changed or Redis has lost it, then its lease. Raises Unavailable."""
        assert self._mine is not None
        async with self._putting:
            kept = {words.kept_field(remote): remote for remote in self._mine.kept().values()}
            async with calling():
                known = await self._redis.hlen(words.KEPT + self.name)
            if known != len(self._written):  # Redis has lost it, or another run of ours wrote it
                async with calling():
                    self._written = frozenset(await self._redis.hkeys(words.KEPT + self.name))
            news, gone = kept.keys() - self._written, self._written - kept.keys()
            self._generation += bool(news or gone)  # whoever reads the lease reads the list again
            counts = self._generation, self._told
            for field in news:
                async with calling():
                    await self._redis.hset(words.KEPT + self.name, field, words.remote_bytes(kept[field]))
            if gone:
                async with calling():
                    await self._redis.hdel(words.KEPT + self.name, *gone)
            self._written = frozenset(kept)
            if self._left:
                return
            async with calling():
                await self._redis.hset(words.MEMBERS, self.name, str(time.time()))
            lease = words.Lease(self._address, self._run, counts[0])
            await self._leases.put(self.name, lease.to_json(), news=counts != self._put_counts)
            self._put_counts = counts

    async def _bury(self) -> None:
        """Write this replica's deletions that Redis does not have. Before the pointers that they clear: who hears of those, knows why."""
        assert self._mine is not None
        news = {key: at for key, at in self._mine.tombstones().items() if at > self._deleted.get(key, 0.0)}
        await self._write(words.DELETED, {key: repr(at).encode() for key, at in news.items()}, ())
        self._deleted |= news

    async def _read(self) -> None:
        """Who is there, what they keep, and what was said of pointers, pins and deletions. Raises Unavailable."""
        async with self._reading:
            await self._read_replicas(await self._leases.read())
            await self._exchange()

    async def _read_replicas(self, entries: Entries) -> None:
        async with calling():
            members = words.read_hash("members", await self._redis.hgetall(words.MEMBERS), words.read_seconds)
        leases = words.read_hash("leases", dict(entries.found), words.Lease.from_json)
        known = {replica.name: replica for replica in self.others}
        names = sorted({*members, *leases} - {self.name})
        for name in [name for name in names if name not in leases and members[name] < time.time() - MEMBER_SECONDS]:
            names.remove(name)
            async with calling():
                await self._redis.hdel(words.MEMBERS, name)
                await self._redis.delete(words.KEPT + name)
        if len(names) > REPLICAS_MAX:
            log.error("more replicas in Redis than a store has", extra={"replicas": len(names), "limit": REPLICAS_MAX})
            names = sorted(names, key=lambda name: name not in leases)[:REPLICAS_MAX]
        others = [await self._replica(name, leases.get(name), known.get(name)) for name in names]
        if tuple(others) != self.others:
            self.others = tuple(others)
            assert self._mine is not None
            await self._mine.others_changed()

    async def _replica(self, name: str, lease: words.Lease | None, before: Replica | None) -> Replica:
        """As told now; its list is read again where its lease says that it has changed."""
        if before is None or (lease is not None and self._seen.get(name) != lease):
            versions = await self._kept_by(name, before.versions if before is not None else {})
            self._seen[name] = lease
        else:
            versions = before.versions
        address = lease.address if lease is not None else before.address if before is not None else ""
        return Replica(name, address, lease is not None, versions)

    async def _kept_by(self, name: str, before: Mapping[Key, Remote]) -> Mapping[Key, Remote]:
        """What it keeps. Only what is not known is fetched, a few at once, and parsed in a thread: manifests are large, and lists long."""
        async with calling():
            fields = set(await self._redis.hkeys(words.KEPT + name))
        known = {field: remote for remote in before.values() if (field := words.kept_field(remote)) in fields}
        remotes, news = list(known.values()), sorted(fields - known.keys())
        for at in range(0, len(news), READ_AT_ONCE):
            some = news[at : at + READ_AT_ONCE]
            async with calling():
                values = await self._redis.hmget(words.KEPT + name, some)
            found = {field: value for field, value in zip(some, values, strict=True) if value is not None}
            remotes += (await self._compute.run(words.read_hash, f"kept by {name}", found, words.read_remote)).values()
        return {remote.record.key: remote for remote in sorted(remotes, key=lambda one: one.record.published_at_seconds)}

    async def _exchange(self) -> None:
        """Both ways, of each word the newer: what Redis has lost is written again."""
        assert self._mine is not None
        async with calling():
            found = [await self._redis.hgetall(name) for name in (words.POINTERS, words.PINS, words.DELETED)]
        pointers = words.read_hash("pointers", found[0], Pointer.from_json)
        pins = words.read_keys(words.read_hash("pins", found[1], Pin.from_json))
        deleted = words.read_keys(words.read_hash("deleted", found[2], words.read_seconds))
        raw = {field.decode("utf-8", "replace"): value for field, value in found[0].items()}
        self._deleted = dict(deleted)
        await self._bury()
        now = time.time()
        for name in [name for name, pointer in pointers.items() if pointer.is_over(now)]:
            del pointers[name]
            async with calling():
                await self._redis.eval(DROP, 1, words.POINTERS, name, raw[name])  # unless it means something again
        for pointer in self._mine.pointers():
            if pointer.is_over(now):
                continue
            if pointer.name not in pointers or pointers[pointer.name].revision < pointer.revision:
                await self._swap(pointer, raw.get(pointer.name, b""))  # overtaken: the next read sees by what
        obeyed = await self._mine.learn(pointers.values(), pins, deleted)
        said_at = {key: pin.changed_at_seconds for key, pin in pins.items()}
        later = {key: pin for key, pin in self._mine.pins().items() if pin.changed_at_seconds > said_at.get(key, 0.0)}
        await self._write(
            words.PINS,
            {key: pin.to_json() for key, pin in later.items() if not _is_over(pin)},
            [k for k in pins if _is_over(pins[k])],
        )
        if obeyed:  # else what is not among them was not forgotten here, but never known
            await self._write(words.DELETED, {}, [key for key in deleted if key not in self._mine.tombstones()])

    async def _write(self, name: str, entries: Mapping[Key, bytes], over: Sequence[Key]) -> None:
        """Entries of a hash, and those of it that mean nothing any more."""
        async with calling():
            if over:
                await self._redis.hdel(name, *map(words.key_text, over))
            if entries:
                await self._redis.hset(name, mapping={words.key_text(key): value for key, value in entries.items()})
                await self._redis.publish(CHANNEL, self.name)

    async def _swap(self, pointer: Pointer, before: bytes) -> bool:
        async with calling():
            return bool(await self._redis.eval(SWAP, 1, words.POINTERS, pointer.name, before, pointer.to_json(), CHANNEL))


def _is_over(pin: Pin) -> bool:
    """Whether it pins nothing, and was said so long ago that every replica that comes back has heard it."""
    return pin.until_seconds < time.time() and pin.changed_at_seconds < time.time() - MEMBER_SECONDS
