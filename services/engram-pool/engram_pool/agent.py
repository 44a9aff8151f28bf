"""The engram-pool process as a host agent: no tables, the rows of other pools by the ring of this host. Puts its parts together."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import fields
from functools import partial

from prometheus_client import CollectorRegistry

from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.adapters.peer_pools import read_key
from engram_pool.adapters.ring_metrics import RingMetrics
from engram_pool.adapters.row_stores import RowStores
from engram_pool.adapters.segment_folder import make_segment_dir
from engram_pool.adapters.tenants_file import read_tenants
from engram_pool.adapters.upstream_versions import UpstreamVersions
from engram_pool.agent_server import AgentServer, register_agent
from engram_pool.server import STATUS
from engram_pool.settings import Settings
from treadle.chassis.server import read_keys, run_service
from treadle.chassis.settings import ServerSettings, WrongSetting
from treadle.client import Endpoint

PIECE_SECONDS = 0.01  # a piece is a request to an owner: as few as rows allow
PIECE_ROWS = 4096
THREADS_TIMES, THREADS_MAX = 8, 64  # threads for each of door_threads: they wait for owners, and hot rows must not wait behind them
USED = frozenset({
    *(setting.name for setting in fields(ServerSettings)), "segment_dir", "upstream", "peer_key_file", "peer_tls_root_file",
    "tenants_file", "hot_rows_bytes", "door_threads", "door_requests_max", "ring_listen", "ring_users", "ring_clients_max",
    "ring_arena_bytes_max",
})  # fmt: skip


async def serve_agent(settings: Settings, registry: CollectorRegistry, build_version: str) -> int:
    """Serve until a signal. Raises TreadleError if it cannot start."""
    if settings.ring_path is None:
        raise WrongSetting("upstream: a host agent serves by its ring; leave ring_listen on")
    _refuse_ignored(settings)
    key = read_key(settings.peer_key_file)
    endpoints = [
        Endpoint(
            address, key, settings.peer_tls_root_file, tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file
        )
        for address in settings.upstream_list
    ]
    tenants = read_tenants(settings.tenants_file, read_keys(settings))
    make_segment_dir(settings.segment_dir.absolute())
    doors = NativeDoors(
        workers=min(THREADS_MAX, THREADS_TIMES * settings.door_threads), tickets_max=settings.door_requests_max, piece_rows=PIECE_ROWS, piece_seconds=PIECE_SECONDS,
        tenants=tenants, stores=RowStores.remote(settings.hot_rows_bytes),
    )  # fmt: skip
    versions = UpstreamVersions(endpoints, doors)
    agent = AgentServer(endpoints, lambda: doors.open_doors, versions.check_served, build_version=build_version)
    following = asyncio.create_task(versions.follow_forever())
    try:
        doors.open_ring(
            settings.ring_path, clients_max=settings.ring_clients_max, arena_bytes_max=settings.ring_arena_bytes_max,
            users=settings.ring_user_ids,
        )  # fmt: skip
        RingMetrics(registry, doors)
        return await run_service(
            "engram-pool", settings, partial(register_agent, agent=agent), area="engram", status=STATUS, registry=registry,
            build_version=build_version, key_digests=frozenset(tenants.tokens),
        )  # fmt: skip
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await asyncio.to_thread(doors.close)
        versions.close()
        await agent.close()


def _refuse_ignored(settings: Settings) -> None:
    """Raise WrongSetting for what was set and would have no effect: most settings are of pools that hold tables."""
    off = {"socket_listen": "off"}  # as it is anyway
    ignored = [
        setting.name
        for setting in fields(settings)
        if setting.name not in USED and getattr(settings, setting.name) not in (setting.default, off.get(setting.name))
    ]
    if ignored:
        raise WrongSetting(
            f"{', '.join(ignored)}: without effect on a host agent (upstream is set), which holds no tables; leave them out"
        )
