"""Which blocks lie in the prefix cache, told to whoever routes requests: first all of them, then every change.

Owns the list and its watchers. Whoever owns the cache says what is stored and removed, from one thread; watchers wait on
the event loop. A watcher that does not keep up costs no more than CHANGES_MAX changes: then it is told everything anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

from inference_worker.domain.errors import Draining
from treadle.contract.errors import ResourceExhausted

WATCHERS_MAX = 16  # gateways; each holds its own list of changes
CHANGES_MAX = 4096  # that wait for one watcher
MESSAGE_BLOCKS = 128  # told at once: 128 blocks of 128 tokens of 5 bytes are 80 KiB
HEARTBEAT_SECONDS = 3.0  # a watcher that hears nothing for a few of these knows that something is wrong


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One block.

    name:   the same content has the same name, at most 32 bytes
    parent: name of the block before it; empty: it begins a sequence
    memory: what it was made with, as `treadle.contract.block_memory` writes it; empty: no memory
    """

    name: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    memory: str = ""


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What changed: first `cleared` (all that was told is gone), then `removed`, then `stored`; nothing of it: a sign of life."""

    stored: tuple[CachedBlock, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False
    snapshot_complete: bool = False


class BlockLog:
    """The blocks that are there, in the order in which they were stored: a parent before its children."""

    def __init__(self, *, watchers_max: int = WATCHERS_MAX, changes_max: int = CHANGES_MAX) -> None:
        self._watchers_max, self._changes_max = watchers_max, changes_max
        self._lock = threading.Lock()
        self._there: dict[bytes, CachedBlock] = {}
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._there)

    @property
    def names(self) -> tuple[bytes, ...]:
        """Of the blocks that are there."""
        return tuple(self._there)

    def stored(self, block: CachedBlock) -> None:
        """A block is in the cache now."""
        with self._lock:
            self._there.pop(block.name, None)
            self._there[block.name] = block
            self._tell(block)

    def removed(self, name: bytes) -> None:
        """A block is in the cache no more; one that was not there changes nothing."""
        with self._lock:
            if self._there.pop(name, None) is not None:
                self._tell(name)

    def cleared(self) -> None:
        """The cache is empty."""
        with self._lock:
            self._there.clear()
            for watcher in self._watchers:
                watcher.start_anew()

    def close(self) -> None:
        """End all watches: the worker stops."""
        with self._lock:
            self._closed = True
            for watcher in self._watchers:
                watcher.wake()

    async def watch(self) -> AsyncGenerator[BlockChanges, None]:
        """All blocks, the last message of them with `snapshot_complete`; then changes as they come, or a sign of life.

        Raises ResourceExhausted beyond `watchers_max`, Draining once the log is closed.
        """
        watcher = _Watcher(asyncio.get_running_loop(), self._changes_max)
        with self._lock:
            if len(self._watchers) >= self._watchers_max:
                raise ResourceExhausted(f"{self._watchers_max} watch the blocks already, the limit", HEARTBEAT_SECONDS)
            self._watchers.add(watcher)
        try:
            first = True
            while not self._closed:
                with self._lock:
                    anew, changes = watcher.take()
                    there = tuple(self._there.values()) if anew else ()
                if anew:
                    for message in _snapshot(there, cleared=not first):
                        yield message
                    first = False
                for message in _messages(changes):
                    yield message
                if not await watcher.wait(HEARTBEAT_SECONDS):
                    yield BlockChanges()
            raise Draining("the worker is stopping")
        finally:
            with self._lock:
                self._watchers.discard(watcher)

    def _tell(self, change: CachedBlock | bytes) -> None:
        for watcher in self._watchers:
            watcher.tell(change)


class _Watcher:
    """What one watcher has not been told yet. All but `wait` under the log's lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, changes_max: int) -> None:
        self._loop, self._changes_max, self._woken = loop, changes_max, asyncio.Event()
        self._changes: deque[CachedBlock | bytes] = deque()
        self._anew = True

    def tell(self, change: CachedBlock | bytes) -> None:
        if self._anew:
            return  # what there is then holds it
        if len(self._changes) >= self._changes_max:
            self.start_anew()
            return
        self._changes.append(change)
        if len(self._changes) == 1:
            self.wake()

    def start_anew(self) -> None:
        self._changes.clear()
        self._anew = True
        self.wake()

    def take(self) -> tuple[bool, list[CachedBlock | bytes]]:
        """Whether everything must be told, and what changed since the last take."""
        anew, changes = self._anew, list(self._changes)
        self._anew = False
        self._changes.clear()
        return anew, changes

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, seconds: float) -> bool:
        """True once there may be something to tell; False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True


def _snapshot(blocks: tuple[CachedBlock, ...], *, cleared: bool) -> Iterator[BlockChanges]:
    for first in range(0, max(1, len(blocks)), MESSAGE_BLOCKS):
        last = first + MESSAGE_BLOCKS >= len(blocks)
        yield BlockChanges(blocks[first : first + MESSAGE_BLOCKS], cleared=cleared and first == 0, snapshot_complete=last)


def _messages(changes: Iterable[CachedBlock | bytes]) -> Iterator[BlockChanges]:
    """Changes in their order: a message tells removals before what is stored, so a removal behind that begins the next."""
    stored: list[CachedBlock] = []
    removed: list[bytes] = []
    for change in changes:
        removes = isinstance(change, bytes)
        if (removes and stored) or len(stored) + len(removed) >= MESSAGE_BLOCKS:
            yield BlockChanges(tuple(stored), tuple(removed))
            stored, removed = [], []
        if isinstance(change, bytes):
            removed.append(change)
        else:
            stored.append(change)
    if stored or removed:
        yield BlockChanges(tuple(stored), tuple(removed))
