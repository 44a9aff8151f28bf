"""This worker's entry in the directory: put when it serves, renewed, changed to draining at once, taken out at the end.

A directory that is down costs nothing but that gateways do not hear: the worker serves on, and is put again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace

from treadle.chassis.leases import RENEW_SECONDS, Leases
from treadle.client.worker_entry import KIND, WorkerEntry, entry_bytes
from treadle.contract.errors import Unavailable

log = logging.getLogger("treadle.worker")


class Registration:
    """`begin` once the worker listens, `leave` when it is to stop, `end` when it has. On the event loop.

    Raises InvalidArgument for a URL that is none.
    """

    def __init__(self, url: str) -> None:
        self._leases = Leases(url, KIND)
        self._entry: WorkerEntry | None = None
        self._changed = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self, name: str, address: str, model: str) -> None:
        """Tell of this worker from now on. Raises InvalidArgument for fields that no entry can have."""
        self._entry = WorkerEntry(name, address, model, time.time_ns())
        self._renewing = asyncio.create_task(self._renew())

    def leave(self) -> None:
        """Have gateways send new requests elsewhere, now."""
        if self._entry is not None:
            self._entry = replace(self._entry, draining=True)
            self._changed.set()

    async def end(self) -> None:
        """Take the entry out and close."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        if self._entry is not None:
            with suppress(Unavailable):
                await self._leases.remove(self._entry.name)
        await self._leases.close()

    async def _renew(self) -> None:
        told, heard = None, True
        while True:
            entry = self._entry
            assert entry is not None, "begin made it"
            self._changed.clear()
            try:
                await self._leases.put(entry.name, entry_bytes(entry), news=entry != told)
                if not heard or told is None:
                    log.info("registered", extra={"worker": entry.name, "address": entry.address})
                told, heard = entry, True
            except Unavailable as error:
                if heard:
                    log.warning("the directory cannot be told of this worker", extra={"reason": str(error)})
                heard = False
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._changed.wait()
