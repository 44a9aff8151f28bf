"""Which Engram memories there are, which of them are open, and who uses them.

Owns versions (what a name means when a request is taken in), openings and their waiters, the bound on open memories, and when
one is closed: its last request is over, and it is no longer the version that new requests get; or the place is needed.
Does not watch the pool (adapters), open a version (`memory_opening`) or run steps (the engine). Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.fresh_listing import FreshListing
from inference_worker.domain.lease import Lease
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.memory_status import MemoryStatus
from inference_worker.domain.ports import MemoryPool, OpeningObserver, ResidentVersion
from inference_worker.domain.resident_versions import Choice, Listing, ResidentVersions
from treadle.contract.errors import (
    DataLoss,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)

log = logging.getLogger("treadle.worker")
OPENINGS_MAX = 4  # at once: one that hangs leaves room for others
BUSY_RETRY_SECONDS = 1.0  # when to come again where every place is in use
Key = tuple[str, str]  # name and version
REFUSED = {  # why a choice was refused, as metrics say it; anything else is a wrong version
    NotFound: "unknown", FingerprintMismatch: "misfit", ResourceExhausted: "full", Unavailable: "no_pool",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class _Place:
    """A version that is open, or being opened (`memory` is None then)."""

    memory: EngramMemory | None = None
    leases: int = 0
    waiters: list[Future[Lease]] = field(default_factory=list)


class Catalogue:
    """The memories of one pool.

    open_max: versions open at once, those being opened included; beyond it the least recently used without requests is closed
    default:  what requests get that do not choose; with a version: that one for ever, without: the current one
    """

    def __init__(
        self, pool: MemoryPool, opener: Opener, *, open_max: int, default: Choice | None = None,
        observer: OpeningObserver | None = None,
    ) -> None:  # fmt: skip
        if open_max < 1:
            raise InvalidArgument(f"engram_memories_max: at least 1, got {open_max}")
        self._pool, self._opener, self._open_max, self._observer = pool, opener, open_max, observer
        self._default = default if default is not None and default.model else None
        self._lock = threading.Lock()
        self._resident = ResidentVersions(pool.address, opener)
        self._places: OrderedDict[Key, _Place] = OrderedDict()  # the least recently used first
        self._tokens: dict[str, int] = {}  # of versions that are closed, by name
        self._told, self._closed = 0, False  # how often the watch has spoken
        self._fresh = FreshListing(self._look_again)
        self._standing: Lease | None = None  # keeps the default memory open, and says which version it is
        self._openers = ThreadPoolExecutor(OPENINGS_MAX, thread_name_prefix="treadle-memory-open")
        self._closers = ThreadPoolExecutor(1, thread_name_prefix="treadle-memory-close")

    @property
    def default_memory(self) -> EngramMemory | None:
        """The memory that a request gets now which does not choose; None: none."""
        with self._lock:
            return self._standing.memory if self._standing is not None else None

    @property
    def pool_answers(self) -> bool:
        """False while the pool has not answered yet, or no longer does."""
        with self._lock:
            return self._resident.answers

    @property
    def open_count(self) -> int:
        """Versions that are open."""
        with self._lock:
            return sum(place.memory is not None for place in self._places.values())

    def take(self, choice: Choice | None) -> Future[Lease]:
        """A lease on what a request chooses (None: the default), its version fixed now; done at once where that is open.

        What is not known is looked for with one fresh listing of the pool: it may have been loaded a moment ago.

        A waiter that is given up must be cancelled, and a lease that nobody wants released. Raises FingerprintMismatch naming
        the field in which a memory does not fit, InvalidArgument (a version that is none), ResourceExhausted (all places are in
        use), Unavailable (the pool has never answered). The future raises these too, NotFound naming what there is, and what
        the opening did.
        """
        waiter: Future[Lease] = Future()
        try:
            lease = self._lease_or_wait(choice, waiter)
        except NotFound:
            self._fresh.ask().add_done_callback(lambda asked: self._take_again(choice, waiter, asked))
            return waiter
        except TreadleError as error:
            self._count_refusal(error)
            raise
        if lease is not None:
            waiter.set_result(lease)
        return waiter

    def adopt_default(self, memory: EngramMemory) -> None:
        """Keep a memory that was opened before anybody could choose, as the default. It is closed with the others."""
        key = (memory.model.name, memory.version)
        with self._lock:
            self._places[key] = _Place(memory)
            self._standing = self._lease(key)

    def update(self, resident: Sequence[ResidentVersion]) -> None:
        """What the pool holds now: new requests get its current versions, and those out of use are closed."""
        self._adopt(Listing.of(resident, self._opener))

    def lost(self, reason: str) -> None:
        """The pool does not answer. What was known stays; what is open goes on."""
        with self._lock:
            self._told += 1
            self._resident.lost(reason)

    def memories(self) -> list[MemoryStatus]:
        """Every memory by name; where the pool has never answered, one without a name that says why."""
        with self._lock:
            names = set(self._resident.names)
            if self._standing is not None and self._standing.memory is not None:
                names.add(self._standing.memory.model.name)
            statuses = [self._status(name) for name in sorted(names)]
            if not self._resident.heard:
                statuses.append(MemoryStatus("", "", False, False, 0, 0, "", False, self._resident.unheard))
            return statuses

    def close(self) -> None:
        """Close what is open; nobody may use any of it now. Openings still under way close what they open."""
        with self._lock:
            places, self._places, self._standing, self._closed = self._places, OrderedDict(), None, True
            waiters = [waiter for place in places.values() for waiter in place.waiters]
            for place in places.values():
                place.waiters = []  # an opening that fails after this tells nobody twice
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(Unavailable("the worker is stopping"))
        self._fresh.close()
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._closers.shutdown(wait=True)
        for place in places.values():
            if place.memory is not None:
                place.memory.handle.close()

    def _adopt(self, listing: Listing, told: int | None = None) -> None:
        """Go by a listing from now on. told: not if the watch has spoken since it had done so that often: its word is newer."""
        with self._lock:
            if self._closed or (told is not None and told != self._told):
                return
            self._told += told is None
            in_use = {name for name, _ in self._places}  # those too that have just been superseded and are closed now
            self._resident.replace(listing)
            released = self._move_default()
            self._close_superseded()
            self._open_ahead(in_use)
            in_use = {name for name, _ in self._places}
            self._tokens = {name: count for name, count in self._tokens.items() if name in listing.versions or name in in_use}
        if released is not None:
            released.release()

    def _look_again(self) -> None:
        """Ask the pool what it holds. Raises what keeps it from answering."""
        with self._lock:
            told = self._told
        self._adopt(Listing.of(self._pool.resident(), self._opener), told)

    def _take_again(self, choice: Choice | None, waiter: Future[Lease], asked: Future[None]) -> None:
        """After a fresh listing: the waiter has its lease, waits for an opening, or hears why not."""
        lease: Lease | None = None
        error: TreadleError | None = None
        try:
            lease = self._lease_or_wait(choice, waiter)
        except NotFound as missing:
            trouble = None if asked.cancelled() else asked.exception()
            error = missing if trouble is None else Unavailable(f"{missing}; the pool, asked again, did not answer: {trouble}")
        except TreadleError as refused:
            error = refused
        if error is not None:
            self._count_refusal(error)
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)
        elif lease is not None:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(lease)
            else:
                lease.release()

    def _count_refusal(self, error: TreadleError) -> None:
        if self._observer is not None:
            self._observer.choice_refused(REFUSED.get(type(error), "wrong"))

    def _lease_or_wait(self, choice: Choice | None, waiter: Future[Lease]) -> Lease | None:
        """The lease where its memory is open; else None, and `waiter` will have it. Raises what `take` does, and NotFound."""
        with self._lock:
            if self._closed:
                raise Unavailable("the worker is stopping")
            if choice is None:
                return self._lease(self._standing_key()) if self._standing is not None else Lease()
            if not choice.model:
                return Lease()
            try:
                found = self._resident.resolve(choice)
            except (NotFound, Unavailable):
                if not self._stands_for(choice):
                    raise
                return self._lease(self._standing_key())
            key = (found.model.name, found.version)
            place = self._places.get(key) or self._begin_opening(found)
            if place.memory is not None:
                return self._lease(key)
            place.waiters.append(waiter)
            return None

    def _stands_for(self, choice: Choice) -> bool:
        """Whether the default, which stays open, is what a choice means that the pool does not have, or no longer."""
        name, version = self._standing_key() if self._standing is not None else ("", "")
        return choice.model == name and version.startswith(choice.version)

    def _begin_opening(self, found: ResidentVersion) -> _Place:
        """Take a place for a version and have it opened. Raises ResourceExhausted where every place is in use."""
        key = (found.model.name, found.version)
        while len(self._places) >= self._open_max:
            idle = next((old for old, place in self._places.items() if place.memory is not None and not place.leases), None)
            if idle is None:
                raise ResourceExhausted(
                    f"{len(self._places)} memories are in use, the limit is engram_memories_max = {self._open_max}; try again in "
                    f"{BUSY_RETRY_SECONDS:g} s", BUSY_RETRY_SECONDS,
                )  # fmt: skip
            self._shut(idle)
        place = self._places[key] = _Place()
        self._openers.submit(self._open, key, place, found)
        return place

    def _open(self, key: Key, place: _Place, found: ResidentVersion) -> None:
        """Runs on a thread of its own: whatever happens, the waiters hear of it."""
        opened = self._opener.try_open(self._pool, found, self._observer)
        if isinstance(opened, TreadleError):
            self._not_opened(key, place, opened)
        else:
            self._opened(key, place, opened)

    def _opened(self, key: Key, place: _Place, memory: EngramMemory) -> None:
        given: list[tuple[Future[Lease], Lease]] = []
        with self._lock:
            if self._places.get(key) is not place:  # the catalogue was closed meanwhile
                memory.handle.close()
                return
            place.memory = memory
            self._resident.is_sound(key[1])
            given = [(waiter, self._lease(key)) for waiter in place.waiters if waiter.set_running_or_notify_cancel()]
            place.waiters = []
            released = self._move_default()
            self._close_superseded()
        for waiter, lease in given:
            waiter.set_result(lease)
        if released is not None:
            released.release()

    def _not_opened(self, key: Key, place: _Place, error: TreadleError) -> None:
        with self._lock:
            if self._places.get(key) is place:
                del self._places[key]
            if isinstance(error, DataLoss | FingerprintMismatch):  # no later opening of this version will do better
                self._resident.is_unusable(key[1], str(error))
            waiters, place.waiters = place.waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)

    def _lease(self, key: Key) -> Lease:
        place = self._places[key]
        self._places.move_to_end(key)
        place.leases += 1
        return Lease(place.memory, self._returner(key, place))

    def _returner(self, key: Key, place: _Place) -> Callable[[], None]:
        def back() -> None:
            with self._lock:
                place.leases -= 1
                if self._places.get(key) is place:
                    self._close_superseded()

        return back

    def _move_default(self) -> Lease | None:
        """Let the default follow its model's current version once that is open; returns the old lease, to be released unlocked."""
        if self._standing is None or self._default is None or self._default.version:
            return None
        current = self._resident.current(self._default.model)
        place = None if current is None else self._places.get((self._default.model, current.version))
        if current is None or place is None or place.memory is None or self._standing_key()[1] == current.version:
            return None
        old, self._standing = self._standing, self._lease((self._default.model, current.version))
        return old

    def _open_ahead(self, names: Set[str]) -> None:
        """Open the new versions of what is open, or was until now, in an older one: the first request after a change waits for
        nothing."""
        pinned = self._default.model if self._default is not None and self._default.version else ""
        for name in names - {pinned}:
            current = self._resident.current(name)
            if current is None or self._resident.refusal(current.version) or (name, current.version) in self._places:
                continue
            try:
                self._begin_opening(current)
            except ResourceExhausted as error:  # its first request will try again
                log.info("a new version is not opened ahead", extra={"model": name, "reason": str(error)})

    def _close_superseded(self) -> None:
        """Close what is open, without requests, and not what a new request would get."""
        for (name, version), place in list(self._places.items()):
            if place.memory is None or place.leases or not self._resident.heard:
                continue
            current = self._resident.current(name)
            if current is None or current.version != version:
                self._shut((name, version))

    def _shut(self, key: Key) -> None:
        """Give a place back; the handle is closed on a thread that may take its time."""
        memory = self._places.pop(key).memory
        if memory is not None:
            self._tokens[key[0]] = self._tokens.get(key[0], 0) + memory.tokens
            log.info("engram closed", extra={"model": key[0], "version": key[1]})
            self._closers.submit(memory.handle.close)

    def _standing_key(self) -> Key:
        assert self._standing is not None
        assert self._standing.memory is not None
        return self._standing.memory.model.name, self._standing.memory.version

    def _status(self, name: str) -> MemoryStatus:
        standing = self._standing_key() if self._standing is not None else ("", "")
        is_default = name == standing[0]
        current = self._resident.current(name)
        version = current.version if current is not None else standing[1]
        place = self._places.get((name, version))
        memory = place.memory if place is not None else None
        own = [other for (other_name, _), other in self._places.items() if other_name == name]
        return MemoryStatus(
            name, version, is_default, memory is not None, sum(other.leases for other in own) - is_default,
            self._tokens.get(name, 0) + sum(other.memory.tokens for other in own if other.memory is not None),
            memory.transport if memory is not None else "",
            memory.fused if memory is not None else current is not None and self._opener.is_fused(current.model),
            self._resident.refusal(version),
        )  # fmt: skip
