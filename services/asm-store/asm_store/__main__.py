"""The asm-store process: from settings to serving, and to a clean stop. What it is made of: assembly."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from asm_store.adapters.tenants_file import read_tenants
from asm_store.assembly import PROGRAM, build_version, put_together
from asm_store.domain.compute import Compute
from asm_store.server import STATUS, register
from asm_store.settings import Settings, VerifyOnStart
from treadle.chassis import log
from treadle.chassis.server import run_service
from treadle.chassis.settings import WrongSetting, load_settings
from treadle.contract import InvalidArgument, TreadleError


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. Exit code 2 for a wrong setting, 1 if the store cannot start, each with one line."""
    settings = load_settings(Settings, area="ASM", program=PROGRAM, argv=argv)
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
    bytes_max = settings.tenant_bytes_max or settings.file_bytes_max
    tenants = read_tenants(settings.tenants_file, nobody=settings.tenant, bytes_max=bytes_max)
    compute = Compute(settings.compute_threads)
    try:
        parts = put_together(settings, registry, compute, tenants)
        try:
            await parts.store.start(digests=settings.verify_on_start is VerifyOnStart.FULL)
            return await run_service(
                "asm-store", settings, partial(register, store_server=parts.server), area="asm", status=STATUS, registry=registry,
                build_version=build_version(), on_ready=parts.begin, on_drain=parts.drain, key_digests=frozenset(tenants.callers),
            )  # fmt: skip
        finally:
            await parts.end()
    finally:
        compute.close()


if __name__ == "__main__":
    sys.exit(main())
