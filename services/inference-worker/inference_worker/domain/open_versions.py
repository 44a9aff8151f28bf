"""Which memories of one kind there are, which of them are open, and who uses them.

Owns versions (what a name means when a request is taken in), openings and their waiters, and when a memory is closed: its last
request is over, and it is no longer the version that new requests get; or its place (`places`) is needed. Does not know the kind
(`catalogue`: Engram memories, `prefix_catalogue`: long prefixes), watch the source (adapters), open a version (`memory_opening`,
`prefix_opening`) or run steps (the engine). Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Generic

from inference_worker.domain.fresh_listing import FreshListing
from inference_worker.domain.lease import Lease
from inference_worker.domain.places import Key, MemoryT, Place, Places, Waiter
from inference_worker.domain.ports import OpeningObserver, ResidentVersion, Source
from inference_worker.domain.resident_versions import Choice, Listing, ModelT, ResidentVersions, Words
from treadle.contract.errors import (
    DataLoss,
    FingerprintMismatch,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)

log = logging.getLogger("treadle.worker")
OPENINGS_MAX = 4  # at once: one that hangs leaves room for others
REFUSED = {  # why a choice was refused, as metrics say it; Unavailable: Words.absent; anything else is a wrong version
    NotFound: "unknown", FingerprintMismatch: "misfit", ResourceExhausted: "full",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standing(Generic[ModelT, MemoryT]):
    """One name as it stands.

    version:  the one that new requests get; current: as the source has it, None: it does not, any more
    memory:   that version where it is open
    open:     every version that is
    requests: that use the name now, whatever their version
    tally:    over all versions since the start
    refusal:  why it cannot be chosen; empty: it can
    """

    name: str
    version: str
    current: ResidentVersion[ModelT] | None
    memory: MemoryT | None
    open: tuple[MemoryT, ...]
    default: bool
    requests: int
    tally: int
    refusal: str


class OpenVersions(Generic[ModelT, MemoryT]):
    """The versions of one source.

    check:    raises FingerprintMismatch, naming the field, for a manifest that was made for another language model
    open_one: opens a version, or says why it cannot; raises nothing. On a thread of its own
    open_max: versions open at once, those being opened included; beyond it the least recently used without requests is closed
    default:  what requests get that do not choose; with a version: that one for ever, without: the current one
    """

    def __init__(
        self, source: Source[ModelT], check: Callable[[ModelT], None],
        open_one: Callable[[ResidentVersion[ModelT]], MemoryT | TreadleError], words: Words, *, open_max: int,
        default: Choice | None = None, observer: OpeningObserver | None = None,
    ) -> None:  # fmt: skip
        self._source, self._check, self._open_one, self._words = source, check, open_one, words
        self._observer = observer
        self._default = default if default is not None and default.model else None
        self._lock = threading.Lock()
        self._resident = ResidentVersions(source.address, check, words)
        self._places: Places[MemoryT] = Places(words, open_max, self._came_back)
        self._told, self._closed = 0, False  # how often the watch has spoken
        self._fresh = FreshListing(self._look_again)
        self._standing: Lease[MemoryT] | None = None  # keeps the default memory open, and says which version it is
        self._openers = ThreadPoolExecutor(OPENINGS_MAX, thread_name_prefix=f"treadle-{words.one}-open")

    @property
    def default_memory(self) -> MemoryT | None:
        """The memory that a request gets now which does not choose; None: none."""
        with self._lock:
            return self._standing.memory if self._standing is not None else None

    @property
    def source_answers(self) -> bool:
        """False while the source has not answered yet, or no longer does."""
        with self._lock:
            return self._resident.answers

    @property
    def open_count(self) -> int:
        """Versions that are open."""
        with self._lock:
            return sum(place.memory is not None for _, place in self._places.items())

    def take(self, choice: Choice | None) -> Future[Lease[MemoryT]]:
        """A lease on what a request chooses (None: the default), its version fixed now; done at once where that is open.

        What is not known is looked for with one fresh listing of the source: it may have come a moment ago.

        A waiter that is given up must be cancelled, and a lease that nobody wants released. Raises FingerprintMismatch naming
        the field in which a memory does not fit, InvalidArgument (a version that is none), ResourceExhausted (all places are in
        use), Unavailable (the source has never answered). The future raises these too, NotFound naming what there is, and what
        the opening did.
        """
        waiter: Future[Lease[MemoryT]] = Future()
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

    def adopt_default(self, memory: MemoryT) -> None:
        """Keep a memory that was opened before anybody could choose, as the default. It is closed with the others."""
        key = (memory.model.name, memory.version)
        with self._lock:
            self._places.adopt(key, memory)
            self._standing = self._places.lease(key)

    def update(self, resident: Sequence[ResidentVersion[ModelT]]) -> None:
        """What the source holds now: new requests get its current versions, and those out of use are closed."""
        self._adopt(Listing.of(resident, self._check))

    def lost(self, reason: str) -> None:
        """The source does not answer. What was known stays; what is open goes on."""
        with self._lock:
            self._told += 1
            self._resident.lost(reason)

    def standings(self) -> tuple[list[Standing[ModelT, MemoryT]], str]:
        """Every name in order; and, where the source has never answered, why, else nothing."""
        with self._lock:
            names = set(self._resident.names)
            if self._standing is not None:
                names.add(self._standing_key()[0])
            return [self._stands(name) for name in sorted(names)], "" if self._resident.heard else self._resident.unheard

    def close(self) -> None:
        """Close what is open; nobody may use any of it now. Openings still under way close what they open."""
        with self._lock:
            places, self._standing, self._closed = self._places.clear(), None, True
            waiters = [waiter.future for place in places for waiter in place.waiters]
            for place in places:
                place.waiters = []  # an opening that fails after this tells nobody twice
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(Unavailable("the worker is stopping"))
        self._fresh.close()
        self._openers.shutdown(wait=False, cancel_futures=True)
        self._places.finish_closing()
        for place in places:
            if place.memory is not None:
                place.memory.close()

    def _adopt(self, listing: Listing[ModelT], told: int | None = None) -> None:
        """Go by a listing from now on. told: not if the watch has spoken since it had done so that often: its word is newer."""
        with self._lock:
            if self._closed or (told is not None and told != self._told):
                return
            self._told += told is None
            in_use = self._places.names  # those too that have just been superseded and are closed now
            self._resident.replace(listing)
            released = self._move_default()
            self._close_superseded()
            self._open_ahead(in_use)
            self._places.forget_tallies(listing.versions)
        if released is not None:
            released.release()

    def _look_again(self) -> None:
        """Ask the source what it holds. Raises what keeps it from answering."""
        with self._lock:
            told = self._told
        self._adopt(Listing.of(self._source.resident(), self._check), told)

    def _take_again(
        self, choice: Choice | None, waiter: Future[Lease[MemoryT]], asked: Future[None], *, last: bool = False
    ) -> None:
        """After a fresh listing: the waiter has its lease, waits for an opening, or hears why not."""
        lease: Lease[MemoryT] | None = None
        error: TreadleError | None = None
        try:
            lease = self._lease_or_wait(choice, waiter, last=last)
        except NotFound as missing:
            trouble = None if asked.cancelled() else asked.exception()
            error = missing if trouble is None else _not_answered(missing, trouble, self._words)
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
            words = REFUSED | {Unavailable: self._words.absent}
            self._observer.choice_refused(next((word for kind, word in words.items() if isinstance(error, kind)), "wrong"))

    def _lease_or_wait(self, choice: Choice | None, waiter: Future[Lease[MemoryT]], *, last: bool = False) -> Lease[MemoryT] | None:
        """The lease where its memory is open; else None, and `waiter` will have it. Raises what `take` does, and NotFound."""
        with self._lock:
            if self._closed:
                raise Unavailable("the worker is stopping")
            if choice is None:
                return self._places.lease(self._standing_key()) if self._standing is not None else Lease[MemoryT]()
            if not choice.model:
                return Lease[MemoryT]()
            try:
                found = self._resident.resolve(choice)
            except (NotFound, Unavailable):
                if not self._stands_for(choice):
                    raise
                return self._places.lease(self._standing_key())
            key = (found.model.name, found.version)
            place = self._places.get(key) or self._begin_opening(found)
            if place.memory is not None:
                return self._places.lease(key)
            place.waiters.append(Waiter(waiter, None if last or choice.version else choice))
            return None

    def _stands_for(self, choice: Choice) -> bool:
        """Whether the default, which stays open, is what a choice means that the source does not have, or no longer."""
        name, version = self._standing_key() if self._standing is not None else ("", "")
        return choice.model == name and version.startswith(choice.version)

    def _begin_opening(self, found: ResidentVersion[ModelT]) -> Place[MemoryT]:
        """Take a place for a version and have it opened. Raises ResourceExhausted where every place is in use."""
        key = (found.model.name, found.version)
        place = self._places.add(key)
        self._openers.submit(copy_context().run, self._open, key, place, found)  # with the trace of who asked first
        return place

    def _open(self, key: Key, place: Place[MemoryT], found: ResidentVersion[ModelT]) -> None:
        """Runs on a thread of its own: whatever happens, the waiters hear of it."""
        opened = self._open_one(found)
        if isinstance(opened, TreadleError):
            self._not_opened(key, place, opened)
        else:
            self._opened(key, place, opened)

    def _opened(self, key: Key, place: Place[MemoryT], memory: MemoryT) -> None:
        given: list[tuple[Future[Lease[MemoryT]], Lease[MemoryT]]] = []
        with self._lock:
            if self._places.get(key) is not place:  # the catalogue was closed meanwhile
                memory.close()
                return
            place.memory = memory
            self._resident.is_sound(key[1])
            futures = [waiter.future for waiter in place.waiters]
            given = [(waiter, self._places.lease(key)) for waiter in futures if waiter.set_running_or_notify_cancel()]
            place.waiters = []
            released = self._move_default()
            self._close_superseded()
        for waiter, lease in given:
            waiter.set_result(lease)
        if released is not None:
            released.release()

    def _not_opened(self, key: Key, place: Place[MemoryT], error: TreadleError) -> None:
        with self._lock:
            self._places.drop(key, place)
            if isinstance(error, DataLoss | FingerprintMismatch):  # no later opening of this version will do better
                self._resident.is_unusable(key[1], str(error))
            waiters, place.waiters = place.waiters, []
        for waiter in waiters:
            if isinstance(error, NotFound) and waiter.again is not None:  # a swap may have been quicker than the opening
                self._ask_once_more(waiter.again, waiter.future, error)
            elif waiter.future.set_running_or_notify_cancel():
                waiter.future.set_exception(error)

    def _ask_once_more(self, choice: Choice, waiter: Future[Lease[MemoryT]], error: TreadleError) -> None:
        try:
            asking = self._fresh.ask()
        except Unavailable:  # the worker is stopping
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)
            return
        asking.add_done_callback(lambda asked: self._take_again(choice, waiter, asked, last=True))

    def _came_back(self, key: Key, place: Place[MemoryT]) -> None:
        with self._lock:
            place.leases -= 1
            if self._places.get(key) is place:
                self._close_superseded()

    def _move_default(self) -> Lease[MemoryT] | None:
        """Let the default follow its model's current version once that is open; returns the old lease, to be released unlocked."""
        if self._standing is None or self._default is None or self._default.version:
            return None
        current = self._resident.current(self._default.model)
        place = None if current is None else self._places.get((self._default.model, current.version))
        if current is None or place is None or place.memory is None or self._standing_key()[1] == current.version:
            return None
        old, self._standing = self._standing, self._places.lease((self._default.model, current.version))
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
                log.info("a new version is not opened ahead", extra={"kind": self._words.kind, "model": name, "reason": str(error)})

    def _close_superseded(self) -> None:
        """Close what is open, without requests, and not what a new request would get."""
        for (name, version), place in self._places.items():
            if place.memory is None or place.leases or not self._resident.heard:
                continue
            current = self._resident.current(name)
            if current is None or current.version != version:
                self._places.shut((name, version))

    def _standing_key(self) -> Key:
        assert self._standing is not None
        assert self._standing.memory is not None
        return self._standing.memory.model.name, self._standing.memory.version

    def _stands(self, name: str) -> Standing[ModelT, MemoryT]:
        standing = self._standing_key() if self._standing is not None else ("", "")
        is_default = name == standing[0]
        current = self._resident.current(name)
        version = current.version if current is not None else standing[1] if is_default else ""
        place = self._places.get((name, version))
        own = [other for (other_name, _), other in self._places.items() if other_name == name]
        memories = tuple(other.memory for other in own if other.memory is not None)
        return Standing(
            name, version, current, place.memory if place is not None else None, memories, is_default,
            sum(other.leases for other in own) - is_default, self._places.tally(name) + sum(memory.tally for memory in memories),
            self._resident.refusal(version) if version else self._resident.pointless(name),
        )  # fmt: skip


def _not_answered(missing: NotFound, trouble: BaseException, words: Words) -> Unavailable:
    return Unavailable(f"{missing}; the {words.source}, asked again, did not answer: {trouble}")
