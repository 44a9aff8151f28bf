"""The engram-pool process: the one file that knows all its parts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from engram_pool.adapters.grown_folder import open_grown
from engram_pool.adapters.metrics import PrometheusMeters
from engram_pool.adapters.mooncake_opening import open_mooncake_door
from engram_pool.adapters.mooncake_rows import open_store
from engram_pool.adapters.safetensors_checkpoint import open_checkpoint
from engram_pool.adapters.segment_folder import SegmentFolder
from engram_pool.domain.compute import Compute
from engram_pool.domain.fusion_reading import FusionReading
from engram_pool.domain.gathering import Gathering
from engram_pool.domain.loading import Loader
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Door
from engram_pool.server import STATUS, EngramPoolServer, register
from engram_pool.settings import Settings, VerifyOnStart
from treadle.chassis import log
from treadle.chassis.server import read_keys, run_service
from treadle.chassis.settings import WrongSetting, load_settings, split_address
from treadle.contract import InvalidArgument, TreadleError

PROGRAM = "treadle-engram-pool"
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


async def serve(settings: Settings) -> int:
    """Take in what is on disk, serve, and stop. Raises TreadleError if it cannot start."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    compute = Compute(settings.compute_threads)
    pool, server = _put_together(settings, registry, compute)
    served = False  # a pool that never served deletes nothing
    try:
        await pool.start(checksums=settings.verify_on_start is VerifyOnStart.FULL)
        reaper = asyncio.create_task(pool.reap_forever(settings.reap_interval_seconds))
        try:
            async with _doors(settings, pool, registry, server):
                code = await run_service(
                    "engram-pool", settings, partial(register, pool_server=server), area="engram", status=STATUS, registry=registry,
                    build_version=build_version(), on_drain=pool.drain,
                )  # fmt: skip
            served = True
            return code
        finally:
            reaper.cancel()
            with suppress(asyncio.CancelledError):
                await reaper
    finally:
        stopping = asyncio.ensure_future(pool.stop(keep_segments=settings.keep_segments or not served))
        done, _ = await asyncio.wait([stopping], timeout=STOP_SECONDS_MAX)
        compute.close()  # a stop that hangs in a thread ends here, with Unavailable
        if done:
            stopping.result()


def _put_together(settings: Settings, registry: CollectorRegistry, compute: Compute) -> tuple[Pool, EngramPoolServer]:
    meters, store = PrometheusMeters(registry), SegmentFolder(settings.segment_dir)
    pool = Pool(
        store, compute, meters, table_bytes_max=settings.table_bytes_max, watchers_max=settings.watchers_max,
        holds_max=settings.holds_max, versions_kept_max=settings.versions_kept_max, reap_grace_seconds=settings.reap_grace_seconds,
    )  # fmt: skip
    loader = Loader(
        pool, store, compute, meters, partial(open_checkpoint, allowed_folder=settings.checkpoint_dir),
        partial(open_grown, allowed_folder=settings.checkpoint_dir), open_store,
    )  # fmt: skip
    gathering = Gathering(pool, compute, meters, calls_max=settings.gathers_max)
    meters.observe(pool)
    return pool, EngramPoolServer(
        pool, loader, gathering, FusionReading(pool, compute, meters), segment_dir=store.folder, gather_seconds_max=settings.gather_seconds_max, build_version=build_version()
    )  # fmt: skip


@asynccontextmanager
async def _doors(settings: Settings, pool: Pool, registry: CollectorRegistry, server: EngramPoolServer) -> AsyncIterator[None]:
    """The doors beside gRPC, open."""
    if not settings.mooncake_listen:
        yield
        return
    host, port = split_address(settings.mooncake_listen)
    door = await open_mooncake_door(
        pool, registry, host=host, port=port, protocol=settings.mooncake_protocol, slots=settings.mooncake_slots,
        direct=settings.mooncake_direct, keys=read_keys(settings),
    )  # fmt: skip
    server.doors.append(Door("mooncake", door.address))
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
