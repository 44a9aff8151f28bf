"""What was deleted, and when: so that a replica that was away deletes its copy when it comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from asm_store.domain.compute import Compute, uninterrupted
from asm_store.domain.ports import Folder
from asm_store.domain.versions import Key

log = logging.getLogger("asm_store")
TOMBSTONES_MAX = 8192
TOMBSTONE_SECONDS = 90.0 * 86_400  # a replica that was away for longer brings its copies back


class Tombstones:
    """Of one event loop. A version published after its deletion is alive."""

    def __init__(self, folder: Folder, compute: Compute, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._compute, self._clock = folder, compute, clock
        self._at, self._writing = dict[Key, float](), asyncio.Lock()

    def take_in(self, found: Mapping[Key, float]) -> None:
        """What was on the disk at the start."""
        self._at = dict(found)

    def all(self) -> dict[Key, float]:
        """When each was deleted, seconds since the epoch."""
        return dict(self._at)

    def deleted_at(self, key: Key) -> float:
        """When it was deleted; 0: never."""
        return self._at.get(key, 0.0)

    def covers(self, key: Key, published_at_seconds: float) -> bool:
        """Whether a copy that was published then is deleted."""
        return key in self._at and self._at[key] >= published_at_seconds

    async def bury(self, deleted: Mapping[Key, float]) -> None:
        """Remember deletions, on the disk before anybody hears of them. Raises ResourceExhausted without room, and as the disk does: none is remembered."""
        async with self._writing:
            news = {key: at for key, at in deleted.items() if at > self.deleted_at(key)}
            if news:
                await uninterrupted(self._remember(_bounded((self._at | news).items(), self._clock() - TOMBSTONE_SECONDS)))

    async def _remember(self, at: dict[Key, float]) -> None:
        await self._compute.run(self._folder.write_tombstones, at)
        self._at = at


def _bounded(tombstones: Iterable[tuple[Key, float]], oldest: float) -> dict[Key, float]:
    newest_last = sorted((item for item in tombstones if item[1] >= oldest), key=lambda item: item[1])
    if len(newest_last) > TOMBSTONES_MAX:
        log.warning("the oldest deletions are forgotten", extra={"limit": TOMBSTONES_MAX})
    return dict(newest_last[-TOMBSTONES_MAX:])
