"""The owners of a fabric in Redis, by leases: `treadle:engram:owner:NAME` for each (`treadle.chassis.leases`).

Redis is never asked on the way to a row, and what it has lost its owners write again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from engram_pool.domain.directory import Directory
from treadle.chassis.leases import RENEW_SECONDS, Entries, Leases
from treadle.client.engram.owners import owner_bytes, owner_from_bytes
from treadle.contract import InvalidArgument, Unavailable
from treadle.contract.placement import OWNERS_MAX

log = logging.getLogger("engram_pool")
KIND = "engram:owner"


class RedisDirectory:
    """Keeps `directory` and the Redis at `url` true to each other. `run` until cancelled, then `leave`, then `close`."""

    def __init__(self, url: str, directory: Directory) -> None:
        self._directory, self._leases = directory, Leases(url, KIND)

    async def run(self) -> None:
        """Renew this pool's lease and follow the others', until cancelled. An outage is a warning, then a stale directory."""
        self._directory.expect_news()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._read())
            tasks.create_task(self._leases.listen())

    async def leave(self) -> None:
        """Take this pool's entry out, at its end."""
        with suppress(Unavailable):
            await self._leases.remove(self._directory.name)

    async def close(self) -> None:
        """Close the connections."""
        await self._leases.close()

    async def _renew(self) -> None:
        told = -1
        while True:
            seen, entry = self._directory.generation, self._directory.itself
            if entry is not None:
                with suppress(Unavailable):  # the reader sees the same outage, and says so
                    await self._leases.put(entry.name, owner_bytes(entry), news=entry.epoch != told)
                    told = entry.epoch
            until = asyncio.get_running_loop().time() + RENEW_SECONDS
            while self._directory.itself is entry and (left := until - asyncio.get_running_loop().time()) > 0:
                if await self._directory.wait_changed(seen, left):
                    seen = self._directory.generation

    async def _read(self) -> None:
        while True:
            try:
                await self._take_in(await self._leases.read())
                await self._directory.heard()
            except Unavailable:
                await self._directory.look()
            await self._leases.wait_news()

    async def _take_in(self, entries: Entries) -> None:
        own = self._directory.name
        found = [(name, entry) for name, entry in entries.found.items() if name != own]
        for name in sorted(entries.listed - entries.found.keys() - {own}):
            await self._directory.lose(name)
        if len(found) >= OWNERS_MAX:  # of those who live: names of dead owners hide nobody
            log.error("more owners in Redis than a fabric has", extra={"owners": len(found), "limit": OWNERS_MAX})
            found = found[: OWNERS_MAX - 1]
        for name, entry in found:
            try:
                owner = owner_from_bytes(entry)
                if owner.name != name:
                    raise InvalidArgument(f"it tells of {owner.name!r}")
            except InvalidArgument as error:
                log.error("an entry in Redis is none: left out", extra={"owner": name, "reason": str(error)})
                continue
            await self._directory.learn(owner)
        for owner in self._directory.listing().owners:
            if owner.name not in entries.listed and owner.name != own:
                await self._directory.lose(owner.name)
