"""How far ahead of its copy a gather asks for rows: measured once, on the first version that can tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.compute import Compute
from engram_pool.domain.pool import Pool
from engram_pool.domain.storing import Rows
from treadle.contract import TreadleError
from treadle.contract.warm_state import WarmState
from treadle.kernels import calibrate_prefetch

log = logging.getLogger("engram_pool")
STRETCH_BYTES_MIN = 64 << 20  # rows of less lie in the processor's caches and say nothing of memory
POLL_SECONDS = 0.5


async def calibrate_when_warm(pool: Pool, compute: Compute, also: Callable[[Rows], None] | None = None) -> None:
    """Wait for a version to measure with, take 50 ms in a thread, and gather so from then on, in the whole process.

    also: measures something else before it on the same rows, bounded as well
    """
    while True:
        found = stretch_to_measure(pool.residents(), STRETCH_BYTES_MIN)
        if found is not None:
            break
        await asyncio.sleep(POLL_SECONDS)  # pages are entered by a thread that tells nobody
    resident, rows = found
    try:
        with resident.in_use():
            if also is not None:
                await compute.run(also, rows)
            chosen = await compute.run(calibrate_prefetch, rows)
    except TreadleError as error:
        log.info("prefetch distance stays as it is", extra={"reason": str(error)})
        return
    fields = {"model": resident.name, "version": resident.version, "rows_ahead": chosen.distance, "reason": chosen.reason}
    log.info("prefetch distance chosen", extra=fields)


def stretch_to_measure(residents: Iterable[Resident], bytes_min: int) -> tuple[Resident, Rows] | None:
    """A warm version and the longest stretch of rows of it that are here, uint8 [n, row_bytes], at least `bytes_min` of them.

    Rows of another owner are no part of it: reading them would take the memory that they are meant to leave.
    """
    for resident in residents:
        if resident.warm_state is not WarmState.WARM or resident.closing or resident.corrupt:
            continue
        for segment in resident.stored.segments.values():
            stretches = segment.held if segment.held is not None else ((0, segment.row_count),)
            first, last = max(stretches, key=lambda stretch: stretch[1] - stretch[0], default=(0, 0))
            if (last - first) * segment.row_bytes >= bytes_min:
                return resident, segment.rows[first:last]
    return None
