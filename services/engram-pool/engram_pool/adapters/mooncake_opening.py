"""Opens the mooncake door of a pool: engine, registered memory, listener."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry

from engram_pool.adapters.mooncake_callers import Callers
from engram_pool.adapters.mooncake_door import SLOT_BYTES, MooncakeDoor, staging_memory
from engram_pool.adapters.mooncake_metrics import MooncakeMeters
from engram_pool.adapters.mooncake_slots import SlotRing
from engram_pool.adapters.mooncake_tables import IDENTITY_PAGE_BYTES, HeldVersions
from engram_pool.domain.pool import Pool
from treadle.client.engram.mooncake_engine import Engine

log = logging.getLogger("engram_pool.mooncake")


async def open_mooncake_door(
    pool: Pool, registry: CollectorRegistry, *, host: str, port: int, protocol: str, slots: int, direct: bool, callers: Callers
) -> MooncakeDoor:  # fmt: skip
    """Open it on the loop that `pool` lives on.

    host, port: of the listener, and the host of the engine: an address by which clients reach this machine; port 0: a free one
    Raises Unavailable if Mooncake is not installed or does not start, ResourceExhausted if memory cannot be registered, OSError.
    """
    engine = await asyncio.to_thread(Engine, host, protocol)
    memory = staging_memory(slots)
    engine.register(memory)
    ring, meters = SlotRing(memory[IDENTITY_PAGE_BYTES:], SLOT_BYTES), MooncakeMeters(registry)
    meters.observe(ring)
    versions = HeldVersions(pool, asyncio.get_running_loop(), engine, memory[:IDENTITY_PAGE_BYTES], direct=direct)
    door = MooncakeDoor(engine, versions, ring, meters, host=host, port=port, callers=callers)
    log.warning(
        "Mooncake listens on all addresses without keys: whoever reaches its ports reads and writes registered memory; guard them by a network rule",
        extra={"engine": engine.name, "door": door.address},
    )
    return door
