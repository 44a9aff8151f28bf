"""Tells engram pools of prompts as soon as they are token ids, so that rows which lie far come nearer before a worker asks.

Owns the calls in flight. A request neither waits for a hint nor fails with it: what is too much, too slow or refused is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from treadle.client import Endpoint
from treadle.client.engram import AsyncEngramPool
from treadle.contract import TreadleError

log = logging.getLogger("treadle.gateway")
HINTS_IN_FLIGHT_MAX = 64
HINT_SECONDS_MAX = 0.5  # later the worker has asked for itself
HINT_TOKENS_MAX = 1 << 16  # as many as a pool takes; the first ones are wanted first
QUIET_SECONDS = 1.0  # a pool that had nothing to do for a memory, or did not answer, is left alone for so long
QUIET_MAX = 1024  # memories remembered for that


class PoolHints:
    """Fits domain.ports.Hints. Make it inside the loop that uses it; `await close()`.

    count: told how each hint ended, as `Figures.hint_ended`
    """

    def __init__(self, endpoints: Sequence[Endpoint], count: Callable[[str], None]) -> None:
        self._pools = {endpoint.address: AsyncEngramPool(endpoint) for endpoint in endpoints}
        self._count = count
        self._calls: set[asyncio.Task[None]] = set()
        self._quiet_until: dict[tuple[str, str, str], float] = {}  # by pool, memory and version

    def tell(self, memory: str, version: str, token_ids: Sequence[int]) -> None:
        """See Hints. Every pool is told: each brings near what it holds."""
        now = time.monotonic()
        for address in self._pools:
            if self._quiet_until.get((address, memory, version), 0.0) > now:
                self._count("quiet")
            elif len(self._calls) >= HINTS_IN_FLIGHT_MAX:
                self._count("left")
            else:
                call = asyncio.ensure_future(self._call(address, memory, version, token_ids[:HINT_TOKENS_MAX]))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """End what is in flight and let go of the pools."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for pool in self._pools.values():
            await pool.close()

    async def _call(self, address: str, memory: str, version: str, token_ids: Sequence[int]) -> None:
        try:
            taken = await self._pools[address].hint_tokens(memory, token_ids, version, timeout_seconds=HINT_SECONDS_MAX)
            outcome = "taken" if taken else "near"
        except (TreadleError, ValueError) as error:  # ValueError: an id that is none, which the worker will refuse
            log.debug("no hint", extra={"pool": address, "memory": memory, "reason": str(error)})
            outcome = "failed"
        self._count(outcome)
        if outcome != "taken":
            self._be_quiet((address, memory, version))

    def _be_quiet(self, about: tuple[str, str, str]) -> None:
        now = time.monotonic()
        if len(self._quiet_until) >= QUIET_MAX:
            self._quiet_until = {key: until for key, until in self._quiet_until.items() if until > now}
        if len(self._quiet_until) < QUIET_MAX:
            self._quiet_until[about] = now + QUIET_SECONDS
