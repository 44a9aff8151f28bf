"""Compares every checksum of a version's segments and weights, in a thread that can be told to stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

from engram_pool.domain.compute import Compute
from engram_pool.domain.progress import PROGRESS_SECONDS, Progress
from engram_pool.domain.storing import StoredVersion
from treadle.contract import DataLoss


class Damaged(DataLoss):
    """The chunk of one layer does not fit its checksum."""

    def __init__(self, layer: int, chunk: int, reason: str) -> None:
        super().__init__(reason)
        self.layer, self.chunk = layer, chunk


def check_chunk(stored: StoredVersion, layer: int, chunk: int) -> None:
    """Raise Damaged unless the chunk is what was written."""
    try:
        stored.segments[layer].check_chunk(chunk)
    except DataLoss as error:
        raise Damaged(layer, chunk, str(error)) from error


class Verification:
    """One pass over the segments of `stored`, by layer, then its fusion weights. The caller keeps them mapped until `run` has ended."""

    def __init__(self, stored: StoredVersion) -> None:
        self._stored = stored
        self._chunks = [(layer, chunk) for layer, segment in stored.segments.items() for chunk in segment.chunks]
        self._total = sum(stored.segments[layer].chunk(chunk).size for layer, chunk in self._chunks)
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
        done, segments = 0, self._stored.segments
        for segment in segments.values():
            segment.check_frame()
        for place, (layer, chunk) in enumerate(self._chunks):
            if place + 1 < len(self._chunks):
                ahead_layer, ahead = self._chunks[place + 1]
                segments[ahead_layer].will_need(ahead)
            check_chunk(self._stored, layer, chunk)
            done += segments[layer].chunk(chunk).size
            self._at = Progress(done, self._total, f"layer {layer}")
            if self._caller_left.is_set():
                return
        if self._stored.fusion is not None:
            self._stored.fusion.verify()
