"""The engram-pool process: the one file that knows all its parts."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from engram_pool.adapters.door_metrics import DoorMetrics
from engram_pool.adapters.grown_folder import open_grown
from engram_pool.adapters.metrics import PrometheusMeters
from engram_pool.adapters.mooncake_callers import Callers
from engram_pool.adapters.mooncake_opening import open_mooncake_door
from engram_pool.adapters.mooncake_rows import open_store
from engram_pool.adapters.native_doors import NativeDoors, open_native_doors
from engram_pool.adapters.peer_pools import open_peer_version, read_key
from engram_pool.adapters.ring_metrics import RingMetrics
from engram_pool.adapters.row_stores import RowStores
from engram_pool.adapters.safetensors_checkpoint import open_checkpoint
from engram_pool.adapters.segment_folder import SegmentFolder
from engram_pool.adapters.segment_places import DaxPlaces, FilePlaces, host_id
from engram_pool.adapters.tenant_metrics import TenantMetrics
from engram_pool.adapters.tenants_file import read_tenants
from engram_pool.agent import serve_agent
from engram_pool.domain.compute import Compute
from engram_pool.domain.directory import Directory
from engram_pool.domain.fusion_reading import FusionReading
from engram_pool.domain.gathering import Gathering
from engram_pool.domain.loading import Loader
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Doors
from engram_pool.domain.repairing import Repairs
from engram_pool.domain.reserving import Reserving
from engram_pool.domain.scrubbing import Scrubber
from engram_pool.domain.table_reading import TableReading
from engram_pool.domain.tenancy import Bandwidth, NoReserve
from engram_pool.membership import Membership
from engram_pool.server import STATUS, EngramPoolServer, register
from engram_pool.settings import Settings, Tier, VerifyOnStart
from treadle.chassis import log
from treadle.chassis.server import read_keys, run_service
from treadle.chassis.settings import WrongSetting, load_settings, split_address
from treadle.contract import InvalidArgument, TreadleError, Unavailable
from treadle.contract.owners import Door
from treadle.dataplane import Tenants
from treadle.dataplane.warming import PageWarmer
from treadle.kernels.dax import dax_facts
from treadle.kernels.dax_space import DaxSpace
from treadle.kernels.numa import check_policy

PROGRAM = "treadle-engram-pool"
logger = logging.getLogger("engram_pool")
STOP_SECONDS_MAX = 45.0  # more than the stop's own patience with calls and readers; beyond it a thread hangs


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Exit code 2 for a wrong setting, 1 if the pool cannot start, each with one line."""
    settings = load_settings(Settings, area="ENGRAM", program=PROGRAM, argv=argv)
    log.configure(settings.log_level, settings.log_format)
    try:
        return asyncio.run(serve(settings))
    except KeyboardInterrupt:  # before it served; afterwards SIGINT drains
        return 130
    except (TreadleError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2 if isinstance(error, WrongSetting | InvalidArgument) else 1


@dataclass(frozen=True)
class _Parts:
    """What one process is made of."""

    pool: Pool
    server: EngramPoolServer
    scrubber: Scrubber
    membership: Membership
    doors: Doors
    bandwidth: Bandwidth

    def listen(self, settings: Settings) -> None:
        """Open the native doors, once versions are there to be found."""
        if isinstance(self.doors, NativeDoors):
            limits = {"connections_max": settings.socket_connections_max, "reply_bytes_max": settings.socket_reply_bytes_max}
            self.doors.listen(settings.socket_addresses, **limits)

    async def drain(self) -> None:
        """Leave the directory first: clients go elsewhere while this pool still answers."""
        await self.membership.leave()
        await self.pool.drain()


async def serve(settings: Settings) -> int:
    """Take in what is on disk, serve, and stop. Raises TreadleError if it cannot start."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    if settings.upstream_list:
        return await serve_agent(settings, registry, build_version())
    compute = Compute(settings.compute_threads)
    tenants = read_tenants(settings.tenants_file, read_keys(settings))
    parts = _put_together(settings, registry, compute, tenants)
    served = False  # a pool that never served deletes nothing
    try:
        await parts.pool.start(checksums=settings.verify_on_start is VerifyOnStart.FULL)
        parts.listen(settings)
        _open_ring(parts.doors, settings)
        background = [
            asyncio.create_task(parts.pool.reap_forever(settings.reap_interval_seconds)),
            asyncio.create_task(parts.scrubber.run_forever()),
        ]
        try:
            async with _mooncake_door(settings, parts.pool, registry, Callers(tenants, parts.bandwidth)):
                code = await run_service(
                    "engram-pool", settings, partial(register, pool_server=parts.server), area="engram", status=STATUS, registry=registry,
                    build_version=build_version(), on_ready=parts.membership.begin, on_drain=parts.drain,
                    key_digests=frozenset(tenants.tokens),
                )  # fmt: skip
            served = True
            return code
        finally:
            await parts.membership.end()
            for task in background:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    finally:
        stopping = asyncio.ensure_future(parts.pool.stop(keep_segments=settings.keep_segments or not served))
        done, _ = await asyncio.wait([stopping], timeout=STOP_SECONDS_MAX)
        compute.close()  # a stop that hangs in a thread ends here, with Unavailable
        if done:
            stopping.result()


def _open_ring(doors: Doors, settings: Settings) -> None:
    """Once versions are there to be found."""
    if settings.ring_path is None or not isinstance(doors, NativeDoors):
        return
    try:
        doors.open_ring(
            settings.ring_path, clients_max=settings.ring_clients_max, arena_bytes_max=settings.ring_arena_bytes_max,
            users=settings.ring_user_ids,
        )  # fmt: skip
    except Unavailable as error:
        if settings.ring_listen != "auto":
            raise
        logger.warning("there is no ring: give ring_listen a path that can be bound", extra={"reason": str(error)})


def _row_stores(settings: Settings, *, in_memory: bool) -> RowStores:
    on_disk = settings.tier is Tier.DISK or (settings.tier is Tier.AUTO and not in_memory)
    return RowStores(on_disk=on_disk, disk_threads=settings.disk_threads, hot_bytes=settings.hot_rows_bytes)


def _put_together(settings: Settings, registry: CollectorRegistry, compute: Compute, tenants: Tenants) -> _Parts:
    key = read_key(settings.peer_key_file)
    keys = dict.fromkeys(settings.peer_list, key) if key is not None else {}  # shown to peers of ours, to nobody a caller names
    open_peers = partial(open_peer_version, keys=keys, tls_root_file=settings.peer_tls_root_file)
    meters, store = PrometheusMeters(registry), _store(settings)
    doors, queue = open_native_doors(
        workers=settings.door_threads, tickets_max=settings.door_requests_max, admission=settings.door_admission, tenants=tenants,
        stores=partial(_row_stores, settings, in_memory=store.in_memory),
    )  # fmt: skip
    pool = Pool(
        store, compute, meters, table_bytes_max=settings.table_bytes_max, watchers_max=settings.watchers_max,
        holds_max=settings.holds_max, versions_kept_max=settings.versions_kept_max, reap_grace_seconds=settings.reap_grace_seconds,
        doors=doors,
        warmer=PageWarmer(bytes_per_second=settings.warm_bytes_per_second),
    )  # fmt: skip
    loader = Loader(
        pool, store, compute, meters, partial(open_checkpoint, allowed_folder=settings.checkpoint_dir),
        partial(open_grown, allowed_folder=settings.checkpoint_dir), open_peers, open_store,
    )  # fmt: skip
    pool.repair_with(Repairs(store, meters, loader.open_source, open_peers, peers=settings.peer_list).mend)
    bandwidth = queue or NoReserve()
    gathering = Gathering(pool, compute, meters, calls_max=settings.gathers_max, tenants=tenants, bandwidth=bandwidth)
    scrubber = Scrubber(pool, compute, meters, bytes_per_second=settings.scrub_bytes_per_second, busy=lambda: gathering.busy)
    directory = Directory(settings.owner, lasting=tuple(settings.owner_endpoints), watchers_max=settings.owner_watchers_max)
    meters.observe(pool)
    meters.observe_device(store.device_nodes)
    meters.observe_scrubber(scrubber)
    meters.observe_directory(directory)
    TenantMetrics(registry, tenants, queue)
    server = EngramPoolServer(
        pool, loader, gathering, FusionReading(pool, compute, meters), TableReading(pool, compute), scrubber, directory,
        reserving=Reserving(bandwidth, compute), tenants=tenants, segment_dir=store.folder,
        gather_seconds_max=settings.gather_seconds_max, build_version=build_version(),
    )  # fmt: skip
    RingMetrics(registry, doors)
    DoorMetrics(registry, doors)
    return _Parts(pool, server, scrubber, Membership(settings, pool, directory), doors, bandwidth)


def _store(settings: Settings) -> SegmentFolder:
    if settings.dax_device is None:
        if settings.numa:
            check_policy(settings.numa)
        return SegmentFolder(settings.segment_dir, FilePlaces(settings.numa))
    facts = dax_facts(settings.dax_device, sysfs=settings.dax_sysfs_root, size_bytes=settings.dax_bytes)
    space = DaxSpace(facts, host_id(settings.dax_host), shared=settings.dax_shared, take_over=settings.dax_take_over)
    try:
        return SegmentFolder(settings.segment_dir, DaxPlaces(space))
    except BaseException:
        space.close()
        raise


@asynccontextmanager
async def _mooncake_door(settings: Settings, pool: Pool, registry: CollectorRegistry, callers: Callers) -> AsyncIterator[None]:
    """The mooncake door, where it is asked for, open."""
    if not settings.mooncake_listen:
        yield
        return
    host, port = split_address(settings.mooncake_listen)
    door = await open_mooncake_door(
        pool, registry, host=host, port=port, protocol=settings.mooncake_protocol, slots=settings.mooncake_slots,
        direct=settings.mooncake_direct, callers=callers,
    )  # fmt: skip
    pool.add_door(Door("mooncake", door.address))
    try:
        yield
    finally:
        await asyncio.to_thread(door.close)


def build_version() -> str:
    """Version of the installed package; 0+source where it runs from its source."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "0+source"


if __name__ == "__main__":
    sys.exit(main())
