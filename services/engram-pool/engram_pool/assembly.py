"""The parts of one engram-pool process, made and joined as its settings say. Part of the entry point, as __main__ is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry

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
from engram_pool.domain.compute import Compute
from engram_pool.domain.directory import Directory
from engram_pool.domain.fusion_reading import FusionReading
from engram_pool.domain.gathering import Gathering
from engram_pool.domain.hinting import Hinting
from engram_pool.domain.loading import Loader
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Doors
from engram_pool.domain.repairing import Repairs
from engram_pool.domain.reserving import Reserving
from engram_pool.domain.scrubbing import Scrubber
from engram_pool.domain.table_reading import TableReading
from engram_pool.domain.tenancy import Bandwidth, NoReserve
from engram_pool.membership import Membership
from engram_pool.server import EngramPoolServer
from engram_pool.settings import Settings, Tier
from treadle.chassis.settings import split_address
from treadle.client import Fabric
from treadle.contract import Unavailable
from treadle.contract.owners import Door
from treadle.dataplane import Tenants
from treadle.dataplane.warming import PageWarmer
from treadle.kernels.dax import dax_facts
from treadle.kernels.dax_space import DaxSpace
from treadle.kernels.numa import check_policy

PROGRAM = "treadle-engram-pool"
logger = logging.getLogger("engram_pool")


@dataclass(frozen=True)
class Parts:
    """What one process is made of."""

    pool: Pool
    server: EngramPoolServer
    scrubber: Scrubber
    membership: Membership
    doors: Doors
    bandwidth: Bandwidth
    hinting: Hinting

    def listen(self, settings: Settings) -> None:
        """Open the native doors, once versions are there to be found."""
        if isinstance(self.doors, NativeDoors):
            limits = {"connections_max": settings.socket_connections_max, "reply_bytes_max": settings.socket_reply_bytes_max}
            self.doors.listen(settings.socket_addresses, **limits)
            _open_ring(self.doors, settings)

    async def drain(self) -> None:
        """Leave the directory first: clients go elsewhere while this pool still answers."""
        await self.membership.leave()
        await self.pool.drain()


def _row_stores(settings: Settings, *, in_memory: bool) -> RowStores:
    on_disk = settings.tier is Tier.DISK or (settings.tier is Tier.AUTO and not in_memory)
    return RowStores(on_disk=on_disk, disk_threads=settings.disk_threads, hot_bytes=settings.hot_rows_bytes)


def put_together(settings: Settings, registry: CollectorRegistry, compute: Compute, tenants: Tenants) -> Parts:
    """Everything but what listens. Raises InvalidArgument, NotFound and what else a wrong setting of the store means."""
    meters, store = PrometheusMeters(registry), _store(settings)
    doors, queue = open_native_doors(
        workers=settings.door_threads, tickets_max=settings.door_requests_max, admission=settings.door_admission, tenants=tenants,
        stores=partial(_row_stores, settings, in_memory=store.in_memory),
    )  # fmt: skip
    bandwidth = queue or NoReserve()
    pool = Pool(
        store, compute, meters, table_bytes_max=settings.table_bytes_max, watchers_max=settings.watchers_max,
        holds_max=settings.holds_max, versions_kept_max=settings.versions_kept_max, reap_grace_seconds=settings.reap_grace_seconds,
        doors=doors, warmer=PageWarmer(bytes_per_second=settings.warm_bytes_per_second),
    )  # fmt: skip
    loader = _loader(settings, pool, store, compute, meters)
    gathering = Gathering(pool, compute, meters, calls_max=settings.gathers_max, tenants=tenants, bandwidth=bandwidth)
    hinting = Hinting(pool, compute, doors, meters, tokens_max=settings.hint_tokens_max, tenants=len(tenants.limits))
    scrubber = Scrubber(pool, compute, meters, bytes_per_second=settings.scrub_bytes_per_second, busy=lambda: gathering.busy)
    directory = Directory(settings.owner, lasting=tuple(settings.owner_endpoints), watchers_max=settings.owner_watchers_max)
    meters.observe(pool)
    meters.observe_device(store.device_nodes)
    meters.observe_scrubber(scrubber)
    meters.observe_directory(directory)
    TenantMetrics(registry, tenants, queue)
    RingMetrics(registry, doors)
    DoorMetrics(registry, doors)
    server = EngramPoolServer(
        pool, loader, gathering, FusionReading(pool, compute, meters), TableReading(pool, compute), scrubber, directory,
        reserving=Reserving(bandwidth, compute), tenants=tenants, hinting=hinting, segment_dir=store.folder,
        gather_seconds_max=settings.gather_seconds_max, build_version=build_version(),
    )  # fmt: skip
    return Parts(pool, server, scrubber, Membership(settings, pool, directory), doors, bandwidth, hinting)


def _loader(settings: Settings, pool: Pool, store: SegmentFolder, compute: Compute, meters: PrometheusMeters) -> Loader:
    """What loads, and from the same sources repairs."""
    key = read_key(settings.peer_key_file)
    keys = dict.fromkeys(settings.peer_list, key) if key is not None else {}  # shown to peers of ours, to nobody a caller names
    call = partial(
        Fabric, tls_root_file=settings.peer_tls_root_file, tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file
    )
    open_peers = partial(open_peer_version, keys=keys, call=call)
    loader = Loader(
        pool, store, compute, meters, partial(open_checkpoint, allowed_folder=settings.checkpoint_dir),
        partial(open_grown, allowed_folder=settings.checkpoint_dir), open_peers, open_store,
    )  # fmt: skip
    pool.repair_with(Repairs(store, meters, loader.open_source, open_peers, peers=settings.peer_list).mend)
    return loader


def _store(settings: Settings) -> SegmentFolder:
    if settings.dax_device is None:
        if settings.numa:
            check_policy(settings.numa)
        return SegmentFolder(settings.segment_dir, FilePlaces(settings.numa))
    facts = dax_facts(settings.dax_device, sysfs=settings.dax_sysfs_root, size_bytes=settings.dax_bytes)
    space = DaxSpace(facts, host_id(settings.dax_host), shared=settings.dax_shared, take_over=settings.dax_take_over)
    if space.writable and space.directory.shared and not settings.dax_shared:
        logger.warning("other hosts may read this device: nothing on it is reused before a start with dax_take_over")
    try:
        return SegmentFolder(settings.segment_dir, DaxPlaces(space))
    except BaseException:
        space.close()
        raise


@asynccontextmanager
async def mooncake_door(settings: Settings, pool: Pool, registry: CollectorRegistry, callers: Callers) -> AsyncIterator[None]:
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


def _open_ring(doors: NativeDoors, settings: Settings) -> None:
    if settings.ring_path is None:
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


def build_version() -> str:
    """Version of the installed package; 0+source where it runs from its source."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "0+source"
