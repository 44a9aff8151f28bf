"""The engram-pool process: from settings to serving, and to a clean stop. What it is made of: assembly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from engram_pool.adapters.mooncake_callers import Callers
from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.adapters.tenants_file import read_tenants
from engram_pool.agent import serve_agent
from engram_pool.assembly import PROGRAM, build_version, mooncake_door, put_together
from engram_pool.domain.calibration import calibrate_when_warm
from engram_pool.domain.compute import Compute
from engram_pool.server import STATUS, register
from engram_pool.settings import Settings, VerifyOnStart
from treadle.chassis import log
from treadle.chassis.server import read_keys, run_service
from treadle.chassis.settings import WrongSetting, load_settings
from treadle.contract import InvalidArgument, TreadleError

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
    if settings.upstream_list:
        return await serve_agent(settings, registry, build_version())
    compute = Compute(settings.compute_threads)
    tenants = read_tenants(settings.tenants_file, read_keys(settings))
    parts = put_together(settings, registry, compute, tenants)
    served = False  # a pool that never served deletes nothing
    try:
        await parts.pool.start(checksums=settings.verify_on_start is VerifyOnStart.FULL)
        parts.listen(settings)
        background = [
            asyncio.create_task(parts.pool.reap_forever(settings.reap_interval_seconds)),
            asyncio.create_task(parts.scrubber.run_forever()),
            asyncio.create_task(parts.hinting.run_forever()),
            asyncio.create_task(
                calibrate_when_warm(
                    parts.pool, compute, parts.doors.stores.measure_memory if isinstance(parts.doors, NativeDoors) else None
                )
            ),
        ]
        try:
            async with mooncake_door(settings, parts.pool, registry, Callers(tenants, parts.bandwidth)):
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


if __name__ == "__main__":
    sys.exit(main())
