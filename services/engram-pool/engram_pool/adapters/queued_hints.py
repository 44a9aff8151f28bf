"""A hint in the queue of the native doors, awaited on the event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from treadle.dataplane import Ticket


class QueuedHint:
    """Fits domain.ports.Nearing. Owns the ticket."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    async def arrived(self, seconds: float) -> bool:
        """See Nearing."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = self._ticket.fileno()
        loop.add_reader(descriptor, ended.set)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), seconds)
        finally:
            loop.remove_reader(descriptor)
        return self._ticket.wait(0)

    def end(self) -> None:
        """See Nearing."""
        self._ticket.cancel()
        self._ticket.close()
