"""Compares every checksum of a version's segments and weights, in a thread that can be told to stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from functools import partial

from engram_pool.domain.compute import Compute
from engram_pool.domain.ports import StoredVersion
from engram_pool.domain.progress import PROGRESS_SECONDS, Progress


class Verification:
    """One pass over the segments of `stored`, by layer, then its fusion weights. The caller keeps them mapped until `run` has ended."""

    def __init__(self, stored: StoredVersion) -> None:
        self._segments, self._fusion = stored.segments, stored.fusion
        self._total = sum(segment.row_count * segment.row_bytes for segment in stored.segments.values())
        self._at = Progress(0, self._total, "")
        self._caller_left = threading.Event()

    async def run(self, compute: Compute) -> AsyncGenerator[Progress, None]:
        """Progress a few times a second, and the end. Raises DataLoss at the first checksum that does not fit."""
        work = asyncio.ensure_future(compute.run(self._read))
        try:
            while not work.done():
                yield self._at
                await asyncio.wait([work], timeout=PROGRESS_SECONDS)
            await work
            yield Progress(self._total, self._total, "done")
        finally:
            self._caller_left.set()
            await asyncio.gather(work, return_exceptions=True)

    def _read(self) -> None:
        done = 0
        for layer, segment in self._segments.items():
            segment.verify(partial(self._report, layer, done))
            done += segment.row_count * segment.row_bytes
        if self._fusion is not None:
            self._fusion.verify()

    def _report(self, layer: int, before: int, bytes_done: int, _: int) -> None:
        self._at = Progress(min(before + bytes_done, self._total), self._total, f"layer {layer}")
        if self._caller_left.is_set():
            raise _CallerLeft


class _CallerLeft(Exception):
    """Nobody waits for the verification any more."""
