"""What this pool tells of itself to the fabric, from its first ready moment to its leaving."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress

from engram_pool.domain.directory import Directory
from engram_pool.domain.pool import Pool
from treadle.contract import Unavailable
from treadle.contract.owners import Door

log = logging.getLogger("engram_pool")
LEAVE_POLL_SECONDS = 0.02
LEAVE_HEARD_SECONDS = 1.0  # before that, nobody need have heard that this pool leaves


class Presence:
    """Keeps this pool's own entry in the directory true.

    leave_seconds_max: how long it answers on, after it said that it leaves, for clients that still hold a version
    """

    def __init__(self, pool: Pool, directory: Directory, *, advertise: str, leave_seconds_max: float) -> None:
        self._pool, self._directory = pool, directory
        self._advertise, self._leave_seconds_max = advertise, leave_seconds_max

    async def keep(self, listen: str) -> None:
        """Tell what is here, again after each change, until the pool stops. listen: host:port that this pool listens on."""
        with suppress(Unavailable):
            async with aclosing(self._pool.changes.each()) as changes:
                async for _ in changes:
                    await self.tell(listen)

    async def tell(self, listen: str) -> None:
        """Tell what is here now."""
        endpoint = self._advertise or listen
        doors = [reachable_door(door, endpoint) for door in self._pool.doors]
        await self._directory.tell(endpoint, doors, self._pool.holdings())

    async def leave(self) -> None:
        """Ask clients to go elsewhere, and answer on until none holds a version here any more.

        A pool that stands alone does not wait: its clients have nowhere to go.
        """
        await self._directory.leave()
        others = [owner for owner in self._directory.listing().owners if owner.name != self._directory.name and owner.reachable]
        if not others:
            return
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < self._leave_seconds_max:
            if waited >= min(LEAVE_HEARD_SECONDS, self._leave_seconds_max) and not self._pool.readers.holds:
                break
            await asyncio.sleep(LEAVE_POLL_SECONDS)
        log.info("left the fabric", extra={"seconds": round(waited, 3), "holds": self._pool.readers.holds})


def reachable_door(door: Door, endpoint: str) -> Door:
    """A door that listens on every address of this host is reached where the host's gRPC address is."""
    host, _, port = door.address.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::", ""):
        return door
    return Door(door.transport, f"{endpoint.rpartition(':')[0]}:{port}")
