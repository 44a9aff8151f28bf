"""The places of open versions: how many there may be, who uses each, and what was counted of those that are closed.

Owns the bound and the leases. Does not know which versions there are or open one (`open_versions`), by whose lock it is guarded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from inference_worker.domain.lease import Lease
from inference_worker.domain.ports import Named
from inference_worker.domain.resident_versions import Choice, Words
from treadle.contract.errors import InvalidArgument, ResourceExhausted

log = logging.getLogger("treadle.worker")
BUSY_RETRY_SECONDS = 1.0  # when to come again where every place is in use
Key = tuple[str, str]  # name and version


class OpenMemory(Protocol):
    """What an open version of any kind is here."""

    @property
    def model(self) -> Named:
        """Its manifest."""

    @property
    def version(self) -> str: ...
    @property
    def tally(self) -> int:
        """What has been counted of it since it was opened; of closed versions it is summed by name."""

    def close(self) -> None:
        """Let go of it; nobody uses it."""


MemoryT = TypeVar("MemoryT", bound=OpenMemory)


@dataclass(frozen=True, slots=True, eq=False)
class Waiter(Generic[MemoryT]):
    """Who waits for an opening. again: what it chose, where that may mean another version once this one has gone; None: no more tries."""

    future: Future[Lease[MemoryT]]
    again: Choice | None


@dataclass(slots=True, eq=False)
class Place(Generic[MemoryT]):
    """A version that is open, or being opened (`memory` is None then)."""

    memory: MemoryT | None = None
    leases: int = 0
    waiters: list[Waiter[MemoryT]] = field(default_factory=list)


class Places(Generic[MemoryT]):
    """The places of one source's versions.

    places_max: versions open at once, those being opened included; beyond it the least recently used without requests is closed
    returned:   called when a lease is released, without the owner's lock: who counts it down
    """

    def __init__(self, words: Words, places_max: int, returned: Callable[[Key, Place[MemoryT]], None]) -> None:
        if places_max < 1:
            raise InvalidArgument(f"{words.open_max}: at least 1, got {places_max}")
        self._words, self._places_max, self._returned = words, places_max, returned
        self._places: OrderedDict[Key, Place[MemoryT]] = OrderedDict()  # the least recently used first
        self._tallies: dict[str, int] = {}  # of versions that are closed, by name
        self._closers = ThreadPoolExecutor(1, thread_name_prefix=f"treadle-{words.one}-close")

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def get(self, key: Key) -> Place[MemoryT] | None:
        """The place of a version; None: it has none."""
        return self._places.get(key)

    def items(self) -> list[tuple[Key, Place[MemoryT]]]:
        """All of them as they are now, the least recently used first."""
        return list(self._places.items())

    @property
    def names(self) -> set[str]:
        """Names of which some version has a place."""
        return {name for name, _ in self._places}

    def adopt(self, key: Key, memory: MemoryT) -> None:
        """Give a version that is open already a place, whatever the bound."""
        self._places[key] = Place(memory)

    def add(self, key: Key) -> Place[MemoryT]:
        """A place for a version that is to be opened. Raises ResourceExhausted where every place is in use."""
        while len(self._places) >= self._places_max:
            idle = next((old for old, place in self._places.items() if place.memory is not None and not place.leases), None)
            if idle is None:
                raise ResourceExhausted(
                    f"{len(self._places)} {self._words.many} are in use, the limit is {self._words.open_max} = {self._places_max}; "
                    f"try again in {BUSY_RETRY_SECONDS:g} s", BUSY_RETRY_SECONDS,
                )  # fmt: skip
            self.shut(idle)
        place = self._places[key] = Place[MemoryT]()
        return place

    def lease(self, key: Key) -> Lease[MemoryT]:
        """One more use of a version that is open."""
        place = self._places[key]
        self._places.move_to_end(key)
        place.leases += 1
        return Lease(place.memory, partial(self._returned, key, place))

    def shut(self, key: Key) -> None:
        """Give a place back; the memory is closed on a thread that may take its time."""
        memory = self._places.pop(key).memory
        if memory is not None:
            self._tallies[key[0]] = self._tallies.get(key[0], 0) + memory.tally
            log.info(f"{self._words.kind} closed", extra={"model": key[0], "version": key[1]})
            self._closers.submit(memory.close)

    def drop(self, key: Key, place: Place[MemoryT]) -> None:
        """Forget a version that could not be opened, unless its place is another's by now."""
        if self._places.get(key) is place:
            del self._places[key]

    def tally(self, name: str) -> int:
        """What was counted of the versions of a name that are closed."""
        return self._tallies.get(name, 0)

    def forget_tallies(self, known: Container[str]) -> None:
        """Keep the counts of names that are known, or have a place."""
        self._tallies = {name: count for name, count in self._tallies.items() if name in known or name in self.names}

    def clear(self) -> list[Place[MemoryT]]:
        """Give all places up; what is open in them is whoever asks to close, after `finish_closing`."""
        places, self._places = list(self._places.values()), OrderedDict()
        return places

    def finish_closing(self) -> None:
        """Wait until what was shut is closed. Without the owner's lock."""
        self._closers.shutdown(wait=True)
