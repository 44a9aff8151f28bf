"""The workers that register themselves in Redis, as a list for the domain's directory (`treadle.chassis.leases`).

Redis is never asked on the way of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from inference_gateway.domain.directory import Directory, Listed
from treadle.chassis.leases import Leases
from treadle.client.worker_entry import KIND, entry_from_bytes
from treadle.contract.errors import InvalidArgument, Unavailable

log = logging.getLogger("treadle.gateway.directory")
WRONG_MAX = 256  # names whose wrong entries are remembered, so that each is said once


class RedisWorkers:
    """Reads the list and hears of its changes. Raises InvalidArgument for a URL that is none. `run` until cancelled, then `close`."""

    def __init__(self, url: str) -> None:
        self._leases = Leases(url, KIND)
        self._wrong: dict[str, bytes] = {}

    async def run(self, directory: Directory) -> None:
        """Keep `directory` told until cancelled, whatever Redis does."""
        listening = asyncio.create_task(self._leases.listen())
        try:
            while True:
                try:
                    directory.heard(self._listed((await self._leases.read()).found))
                except Unavailable:
                    directory.silent()
                except Exception:  # it must outlive its own bugs: without it no worker is ever found
                    log.exception("bug in following the directory")
                await self._leases.wait_news()
        finally:
            listening.cancel()
            await asyncio.wait({listening})

    async def close(self) -> None:
        """Close the connections."""
        await self._leases.close()

    def _listed(self, found: Mapping[str, bytes]) -> dict[str, Listed]:
        listed = {}
        for name, data in found.items():
            try:
                entry = entry_from_bytes(data)
                if entry.name != name:
                    raise InvalidArgument(f"it tells of {entry.name!r}")
            except InvalidArgument as error:
                if self._wrong.get(name) != data and len(self._wrong) < WRONG_MAX:
                    self._wrong[name] = data
                    log.error("an entry in Redis is none: left out", extra={"worker": name, "reason": str(error)})
                continue
            listed[name] = Listed(name, entry.address, entry.epoch, entry.draining)
        return listed
