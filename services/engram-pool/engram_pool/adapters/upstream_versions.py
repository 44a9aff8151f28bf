"""Versions that other pools hold, served at this host's doors: fetched row by row when asked for, hot rows kept.

Owns the watch on the upstream pools and a connection for each version. Does not answer calls (agent_server).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from engram_pool.adapters.native_doors import NativeDoors
from treadle.client import Endpoint
from treadle.client.engram import AsyncEngramPool, EngramPool
from treadle.client.engram.pool_types import ResidentModel
from treadle.client.engram.socket_source import hash_plans, remote_layers
from treadle.contract import TreadleError, Unavailable
from treadle.dataplane import RemoteRows, ServedLayer

log = logging.getLogger("engram_pool")
RETRY_SECONDS = 0.5  # between two tries to reach an upstream pool
FETCH_SECONDS_MAX = 2.0  # a gather that the owners have not answered by then ends as a fault
LEAVE_SECONDS = 2.0  # how long requests in flight may keep a version that its owners have given up


class UpstreamVersions:
    """Follows what `endpoints` list, the first that answers, and publishes each version. Every one of them is asked for rows."""

    def __init__(self, endpoints: Sequence[Endpoint], doors: NativeDoors) -> None:
        self._endpoints, self._doors = list(endpoints), doors
        self._rows: dict[str, tuple[RemoteRows, tuple[int, ...]]] = {}

    async def follow_forever(self) -> None:
        """Until cancelled; an upstream pool that goes away leaves its versions in place, and is asked again."""
        while True:
            for endpoint in self._endpoints:
                pool = AsyncEngramPool(endpoint)
                try:
                    async for listing in pool.watch():
                        await asyncio.to_thread(self._take, listing)
                except TreadleError as error:
                    log.warning("upstream pool does not answer", extra={"pool": endpoint.address, "reason": str(error)})
                finally:
                    await pool.close()
                await asyncio.sleep(RETRY_SECONDS)

    def close(self) -> None:
        """Let go of every version; close the doors first."""
        for rows, _ in self._rows.values():
            rows.close()

    def _take(self, listing: Sequence[ResidentModel]) -> None:
        listed = {resident.version for resident in listing}
        for version in [version for version in self._rows if version not in listed]:
            self._leave(version)
        for resident in listing:
            if resident.version not in self._rows:
                try:
                    self._publish(resident)
                except TreadleError as error:  # asked for again at the next change
                    log.error("version not served", extra={"version": resident.version, "reason": str(error)})

    def _publish(self, resident: ResidentModel) -> None:
        model, key = resident.model, self._endpoints[0].key
        doors = [address for endpoint in self._endpoints for address in _socket_doors(endpoint)]
        if not doors:
            raise Unavailable("no upstream pool has a socket door that can be reached; see its setting socket_listen")
        plans = hash_plans(model, doors[0], token=key, timeout_seconds=self._endpoints[0].timeout_seconds)
        rows = RemoteRows(resident.version, model.fingerprint.digest, remote_layers(model, plans), token=key)
        for address in doors:
            rows.add_owner(address)
        layers = [
            ServedLayer(
                layer,
                plans[layer],
                self._doors.stores.of_others(resident.version, layer, rows.store(layer, FETCH_SECONDS_MAX)),
            )
            for layer in model.layers
        ]
        self._doors.versions.publish(resident.version, model.fingerprint.digest, layers)
        self._doors.share_hot_rows()
        self._rows[resident.version] = rows, model.layers
        log.info("upstream version served", extra={"model": model.name, "version": resident.version, "owners": len(doors)})

    def _leave(self, version: str) -> None:
        rows, layers = self._rows.pop(version)
        self._doors.versions.withdraw(version)
        self._doors.stores.retire(version, layers)
        self._doors.versions.wait_unread(version, LEAVE_SECONDS)
        rows.close()  # what is still in flight ends as a fault
        log.info("upstream version left", extra={"version": version})


def _socket_doors(endpoint: Endpoint) -> list[str]:
    """One address for each pool: its first socket door over TCP; a Unix socket only where there is no other."""
    try:
        with EngramPool(endpoint) as pool:
            addresses = [door.address for door in pool.status().doors if door.transport == "socket"]
    except TreadleError as error:
        log.warning("upstream pool does not answer", extra={"pool": endpoint.address, "reason": str(error)})
        return []
    host = endpoint.address.rpartition(":")[0]
    tcp = [f"{host}:{address.rpartition(':')[2]}" if address.startswith(("0.0.0.0:", "[::]:")) else address
           for address in addresses if not address.startswith("unix:")]  # fmt: skip
    return (tcp or addresses)[:1]
