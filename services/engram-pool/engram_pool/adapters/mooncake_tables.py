"""Versions that the mooncake door holds for its clients, and their tables as Mooncake may read them directly.

One hold of the pool for each version, however many connections; taken and let go on the pool's event loop, used by threads. A
table that leaves is first unregistered, and unmapped only when no read that was begun in good faith can still be under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.pool import Pool
from engram_pool.domain.storing import Ranges
from treadle.client.engram.mooncake_engine import Engine
from treadle.client.engram.mooncake_source import DIRECT_SECONDS_MAX
from treadle.client.engram.mooncake_wire import IDENTITY_BYTES, identity
from treadle.contract import ResourceExhausted, TreadleError, Unavailable
from treadle.kernels import HashPlan

log = logging.getLogger("engram_pool.mooncake")
GRACE_SECONDS = 2 * DIRECT_SECONDS_MAX  # a direct read is believed up to DIRECT_SECONDS_MAX after it was begun
OPEN_SECONDS_MAX = 5.0
IDENTITY_PAGE_BYTES = 64 << 10
VERSIONS_MAX = IDENTITY_PAGE_BYTES // IDENTITY_BYTES


@dataclass(eq=False)
class HeldVersion:
    """A version that stays in memory while connections use it.

    tables:     by layer, u8 [rows, row_bytes], mapped as long as this object lives
    registered: layers that Mooncake may read directly
    place:      its record in the identity page; `generation` stands in it
    """

    resident: Resident
    place: int
    generation: int
    tables: dict[int, NDArray[np.uint8]]
    registered: tuple[int, ...] = ()
    users: int = 0
    ended: TreadleError | None = None
    on_end: set[Callable[[], None]] = field(default_factory=set)
    hold: Future[None] | None = None
    plans: dict[int, HashPlan] = field(default_factory=dict)

    def ranges(self, layer: int) -> Ranges | None:
        """The rows that this pool holds of a table; None: all. The others read as zeros, and are for another owner to gather."""
        return self.resident.stored.segments[layer].held

    def plan(self, layer: int) -> HashPlan:
        """How a layer's tokens become row ids; two threads may make the same one."""
        plan = self.plans.get(layer)
        if plan is None:
            segment = self.resident.stored.segments[layer]
            plan = self.plans[layer] = HashPlan.from_model(self.resident.model, layer, segment.token_map)
        return plan


class HeldVersions:
    """All versions that the door holds. `open` and `let_go` are called by the door's threads."""

    def __init__(
        self, pool: Pool, loop: asyncio.AbstractEventLoop, engine: Engine, page: NDArray[np.uint8], *, direct: bool
    ) -> None:
        """page: IDENTITY_PAGE_BYTES of registered memory; direct: register tables too"""
        self._pool, self._loop, self._engine, self._page, self._direct = pool, loop, engine, page, direct
        self.instance = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], HeldVersion] = {}
        self._places, self._generation = list(range(VERSIONS_MAX)), 0

    def open(self, model: str, version: str, on_end: Callable[[], None]) -> HeldVersion:
        """Hold a version for one more user. `on_end` is called, from another thread, when it is found corrupt or the pool stops.

        Raises NotFound, Unavailable, ResourceExhausted beyond VERSIONS_MAX.
        """
        with self._lock:
            held = self._held.get((model, version))
            if held is None or held.ended is not None:
                held = self._held[model, version] = self._hold(model, version)
            held.users += 1
            held.on_end.add(on_end)
            return held

    def let_go(self, held: HeldVersion, on_end: Callable[[], None], *, wait: threading.Event | None) -> None:
        """One user less; with the last one the version goes. `wait`: grace before it is unmapped, cut short by this event; None: none."""
        with self._lock:
            held.users -= 1
            held.on_end.discard(on_end)
            if held.users:
                return
            key = (held.resident.name, held.resident.version)
            if self._held.get(key) is held:
                del self._held[key]
            self._conceal(held)
        if wait is not None:
            wait.wait(GRACE_SECONDS)
        held.tables.clear()
        assert held.hold is not None
        held.hold.cancel()
        with self._lock:
            self._places.append(held.place)

    def address(self, held: HeldVersion, layer: int) -> int:
        """Where a table begins in this process."""
        return int(held.tables[layer].ctypes.data)

    def identity_address(self, held: HeldVersion) -> int:
        """Where its record is."""
        return int(self._page.ctypes.data) + held.place * IDENTITY_BYTES

    def _hold(self, model: str, version: str) -> HeldVersion:
        if not self._places:
            raise ResourceExhausted(f"{VERSIONS_MAX} versions are held for mooncake readers, the limit", 1.0)
        opened: Future[Resident] = Future()
        ended: Future[TreadleError] = Future()
        hold = asyncio.run_coroutine_threadsafe(self._keep(model, version, opened, ended), self._loop)
        try:
            resident = opened.result(OPEN_SECONDS_MAX)
        except TimeoutError as error:
            hold.cancel()
            raise Unavailable(f"the pool did not hold {model} {version} within {OPEN_SECONDS_MAX:g} s") from error
        self._generation += 1
        tables = {layer: segment.rows for layer, segment in resident.stored.segments.items()}
        held = HeldVersion(resident, self._places.pop(), self._generation, tables, hold=hold)
        self._show(held)
        ended.add_done_callback(lambda future: self._ended(held, future.result()))
        return held

    async def _keep(self, model: str, version: str, opened: Future[Resident], ended: Future[TreadleError]) -> None:
        """Hold the version until cancelled, or until the pool says why it cannot be held any longer."""
        try:
            async with aclosing(self._pool.readers.hold(model, version)) as holding:
                resident = await anext(holding)
                with resident.in_use():
                    opened.set_result(resident)
                    await anext(holding)
        except TreadleError as error:
            if opened.done():
                ended.set_result(error)
            else:
                opened.set_exception(error)

    def _show(self, held: HeldVersion) -> None:
        """Register the tables and write the record that vouches for them. A table that Mooncake refuses is gathered only."""
        layers = []
        for layer, table in held.tables.items() if self._direct else ():
            if held.ranges(layer) is not None:
                continue  # a direct reader could not tell a row from a hole
            try:
                self._engine.register(table.reshape(-1))
                layers.append(layer)
            except ResourceExhausted as error:
                log.warning("table not registered, its rows are gathered only", extra={"layer": layer, "reason": str(error)})
        held.registered = tuple(layers)
        record = identity(self.instance, held.resident.version, held.generation)
        self._record(held)[:] = np.frombuffer(record, dtype=np.uint8)

    def _conceal(self, held: HeldVersion) -> None:
        self._record(held)[:] = 0
        for layer in held.registered:
            with contextlib.suppress(Unavailable):  # it then stays registered and mapped
                self._engine.unregister(held.tables[layer].reshape(-1))

    def _record(self, held: HeldVersion) -> NDArray[np.uint8]:
        return self._page[held.place * IDENTITY_BYTES : (held.place + 1) * IDENTITY_BYTES]

    def _ended(self, held: HeldVersion, error: TreadleError) -> None:
        """On the event loop: the version is corrupt, or the pool stops. Direct readers must not go on."""
        held.ended = error
        self._record(held)[:] = 0
        for end in list(held.on_end):
            end()
