"""Pointers as they move: what a name means now, told again after a restart of the store only where it differs.

Owns what is known, silence, and the wait before the store is asked again. Who opens the new version is the caller's.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client.asm.records import Pointer
from treadle.client.endpoint import Endpoint
from treadle.contract.errors import AccessDenied, InvalidArgument, ProtocolMismatch, TreadleError

WATCH_SECONDS_MAX = 24 * 3600.0  # one call; then the next begins
BEHIND_SECONDS = 10.0  # a replica that was cut off has caught up by then; a store that began anew has not
SILENCE_SECONDS = 5.0  # the store says something every second: a host that is cut off sends no error
BACKOFF_SECONDS_FIRST, BACKOFF_SECONDS_MAX = 0.1, 2.0
POINTERS_MAX = 1 << 20  # of one store
ENDING = (AccessDenied, InvalidArgument, ProtocolMismatch)  # asking again brings the same


class PointerBook:
    """What names mean, as far as was told. Not safe for several threads.

    A revision below the known one, of a replica that has not heard of the last flip, is told once it has stood for BEHIND_SECONDS: then
    the store counts from the beginning again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.known: dict[str, Pointer] = {}
        self._clock, self._behind = clock, dict[str, tuple[float, Pointer]]()  # by name: since when, and what is said
        self._snapshot: dict[str, Pointer] | None = {}
        self._told = False

    def restart(self) -> None:
        """The next messages are a first list again."""
        self._snapshot = {}

    def take(self, message: pb.WatchResponse) -> tuple[Pointer, ...] | None:
        """What changed; None while nothing is to be told. The first list is told even where it is empty.

        Raises InvalidArgument beyond POINTERS_MAX.
        """
        told = [Pointer.of(pointer) for pointer in message.pointers]
        if self._snapshot is None:
            return (*self._changed(told), *self._overdue()) or None
        self._snapshot |= {pointer.name: pointer for pointer in told}
        if len(self._snapshot) > POINTERS_MAX:
            raise InvalidArgument(f"the store tells of more than {POINTERS_MAX} names; watch some by name")
        if not message.snapshot_complete:
            return None
        snapshot, self._snapshot = self._snapshot, None
        gone = [Pointer(name, "", was.revision) for name, was in self.known.items() if name not in snapshot and was.version]
        changed = (*self._changed([*snapshot.values(), *gone]), *self._overdue())
        self.known = {
            name: self.known[name] for name in snapshot
        }  # who is gone has been told so, and is forgotten: names come and go
        self._behind = {name: said for name, said in self._behind.items() if name in snapshot}
        first, self._told = not self._told, True
        return changed if changed or first else None

    def _changed(self, told: Sequence[Pointer]) -> tuple[Pointer, ...]:
        changed = []
        for pointer in told:
            known = self.known.get(pointer.name, pointer)
            if pointer.revision < known.revision:
                self._behind[pointer.name] = self._behind.get(pointer.name, (self._clock(), pointer))[0], pointer
                continue
            self._behind.pop(pointer.name, None)
            if pointer != self.known.get(pointer.name):
                changed.append(pointer)
                self.known[pointer.name] = pointer
        return tuple(changed)

    def _overdue(self) -> tuple[Pointer, ...]:
        since = self._clock() - BEHIND_SECONDS
        overdue = tuple(pointer for began, pointer in self._behind.values() if began <= since)
        for pointer in overdue:
            del self._behind[pointer.name]
            self.known[pointer.name] = pointer
        return overdue


class Backoff:
    """How long to wait before the next attempt: longer each time, spread, so that many clients do not come at once."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """chance: a number in [0, 1)."""
        self._chance, self._seconds = chance, BACKOFF_SECONDS_FIRST

    def next_seconds(self) -> float:
        """The next wait."""
        seconds, self._seconds = self._seconds, min(2 * self._seconds, BACKOFF_SECONDS_MAX)
        return seconds * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """It went well."""
        self._seconds = BACKOFF_SECONDS_FIRST


class PointerWatch:
    """A watch: iterate it in one thread, `cancel` it from any. It ends by `cancel`, with its store's `close`, or with an error that asking
    again repeats.

    Each item is what changed: first all pointers, in one item, also where there are none; then changes. A store that is away is asked
    again and again meanwhile; `connected` says whether it answers now, `trouble` why it last did not.
    """

    def __init__(self, endpoint: Endpoint, method: Callable[..., Any], names: Sequence[str]) -> None:
        self._endpoint, self._method, self._request = endpoint, method, pb.WatchRequest(names=names)
        self._over, self._heard = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._telling = False  # the caller is at work on an item: meanwhile nothing is heard, and that is no silence
        self.connected, self.trouble = False, ""

    def __iter__(self) -> Generator[tuple[Pointer, ...], None, None]:
        """Changes as they come. Raises AccessDenied, InvalidArgument, ProtocolMismatch."""
        book, backoff = PointerBook(), Backoff()
        alarm = threading.Thread(target=self._listen, name="treadle-pointer-watch", daemon=True)
        alarm.start()
        try:
            while not self._over.is_set():
                book.restart()
                try:
                    for message in self._answers():
                        backoff.reset()
                        if (changed := book.take(message)) is not None:
                            yield changed
                except ENDING:
                    raise
                except TreadleError as error:
                    self.trouble = str(error)  # it restarts, cannot be reached or has no room: asked again
                self.connected = False
                self._over.wait(backoff.next_seconds())
        finally:
            self.cancel()
            alarm.join()

    def cancel(self) -> None:
        """End it."""
        with self._lock:
            self._over.set()
            call = self._call
        self._heard.set()
        if call is not None:
            call.cancel()

    def _answers(self) -> Generator[pb.WatchResponse, None, None]:
        with self._lock:
            if self._over.is_set():
                return
            try:
                self._call = self._method(self._request, timeout=WATCH_SECONDS_MAX, metadata=self._endpoint.metadata)
            except ValueError:  # the channel was closed under the watch: it is over
                self._over.set()
                return
        self._heard.set()
        try:
            for message in self._endpoint.answers_of(self._call):
                self.connected = self._telling = True
                yield message
                self._heard.set()
                self._telling = False
        finally:
            self._telling = False
            self._call.cancel()

    def _listen(self) -> None:
        """Cancel a call that nothing is heard of."""
        while not self._over.is_set():
            self._heard.clear()
            if self._over.is_set():  # `cancel` came just before: its word has been cleared
                return
            self._heard.wait(SILENCE_SECONDS)
            # In this order: who has just been told sets both, `_heard` first.
            if not self._telling and not self._heard.is_set() and (call := self._call) is not None:
                call.cancel()
