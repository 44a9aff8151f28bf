"""A store of dictionaries over the SDK: listed, opened version by version, and followed.

Its files are mapped where they lie; where that cannot be, by way of a cache on this host.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from treadle.client.asm import AsmStore, DictionaryCache, MappedDictionary, ReadManifests
from treadle.client.asm.mapped import Elsewhere
from treadle.client.asm.watching import PointerWatch
from treadle.client.endpoint import Endpoint
from treadle.contract.dictionary import Dictionary
from treadle.contract.errors import DeadlineExceeded, Unavailable

log = logging.getLogger("treadle.worker")
ANSWER_SECONDS_MAX = 1.0  # of each message of a list: a store that is well answers in milliseconds
LIST_SECONDS_MAX = 600.0  # of a whole list: the first reads the manifests of all versions
LOOK_AGAIN_SECONDS_MAX = 5.0  # the same where a request waits for it, and the manifests are known
NAMES_MAX = 16  # that are listed one by one where they have changed at once; more: all are listed
UNHEARD_SECONDS_MAX = 5.0  # a store that is well answers a watch at once; one that refuses it would be asked for ever
LOOK_SECONDS = 1.0  # between two looks whether the store still answers: it says something every second


@dataclass(frozen=True, slots=True)
class ListedDictionary:
    """A version that the store keeps; fits ResidentVersion."""

    model: Dictionary
    version: str
    current: bool


class StoreOfPrefixes:
    """The DictionaryStore of an endpoint; `close` ends the calls in progress, and there are no more."""

    def __init__(self, endpoint: Endpoint, cache: DictionaryCache | None = None, manifests: ReadManifests | None = None) -> None:
        """cache: for a store whose files cannot be opened here, its own from here on; None: such a one is refused.

        manifests: shared with whoever watches the store, so that none is read twice
        """
        self._endpoint, self._cache, self._manifests = endpoint, cache, manifests
        self._lock, self._closed = threading.Lock(), False
        self._calling: set[AsmStore] = set()

    @property
    def address(self) -> str:
        """See Source."""
        return self._endpoint.address

    def resident(self) -> list[ListedDictionary]:
        """See Source."""
        with self._called() as store:
            return _listed(store, seconds_max=LOOK_AGAIN_SECONDS_MAX)

    def open(self, name: str, version: str, expected: Mapping[str, str]) -> MappedDictionary:
        """See DictionaryStore. What is mapped outlives the store's process. One that has to copy it first goes on for the next try."""
        try:
            with self._called() as store:
                return store.open(name, version, expected, timeout_seconds=self._endpoint.timeout_seconds, cache=self._cache)
        except Elsewhere as error:
            raise Unavailable(f"{error}; this worker has none: asm_cache_bytes_max is 0") from error

    def close(self) -> None:
        """End what is in progress: a version that is being brought may have hours to go."""
        with self._lock:
            self._closed, calling = True, list(self._calling)
        for store in calling:
            store.close()
        if self._cache is not None:
            self._cache.close()

    @contextmanager
    def _called(self) -> Iterator[AsmStore]:
        with AsmStore(self._endpoint, self._manifests) as store:
            with self._lock:
                if self._closed:
                    raise Unavailable("the worker is stopping")
                self._calling.add(store)
            try:
                yield store
            except ValueError as error:  # gRPC's, of a channel that was closed under it
                if not self._closed:
                    raise
                raise Unavailable("the worker is stopping") from error
            finally:
                with self._lock:
                    self._calling.discard(store)


class StoreConnection:
    """A Connection to a store: its list, and what has changed of it whenever a pointer has moved.

    What it lists no more goes from the cache, once nobody uses it. All is listed again where a version has gone, and at each renewal of
    the watch: what comes and goes without a pointer is told by nobody.
    """

    def __init__(self, endpoint: Endpoint, cache: DictionaryCache | None = None, manifests: ReadManifests | None = None) -> None:
        """manifests: what outlives this connection knows of them."""
        self._endpoint, self._store, self._cache = endpoint, AsmStore(endpoint, manifests or ReadManifests()), cache
        self._listed: dict[str, list[ListedDictionary]] | None = None  # by name; None: not yet
        self._versions: set[str] | None = None  # that the cache may keep; None: it has been tidied since the last list of all
        self._lock, self._closed = threading.Lock(), False
        self._watch: PointerWatch | None = None

    def watch(self, seconds_max: float, /) -> Iterator[list[ListedDictionary]]:
        """See Connection."""
        self._store.status(min(seconds_max, ANSWER_SECONDS_MAX))  # the watch itself would wait for a store that is not there
        watch = self._store.watch()
        with self._lock:
            if self._closed:
                return
            self._watch = watch
        with _ended_with_its_store(watch, self._tidy, seconds_max) as late:
            for changed in watch:
                yield from self._lists({pointer.name for pointer in changed})
        if late.is_set():
            raise DeadlineExceeded(f"the watch of {self._endpoint.address} is to be renewed")
        if not self._closed:
            why = f": {watch.trouble}" if watch.trouble else ""
            raise Unavailable(f"{self._endpoint.address} does not answer a watch{why}")

    def close(self) -> None:
        """See Connection."""
        with self._lock:
            self._closed, watch = True, self._watch
        if watch is not None:
            watch.cancel()
        self._store.close()

    def _lists(self, names: Set[str]) -> Iterator[list[ListedDictionary]]:
        """What is kept now that these names have changed; first what it means for them, which takes the same time in any store."""
        if self._listed is not None and len(names) <= NAMES_MAX:
            before = self._listed
            self._listed = before | {name: self._list(name) for name in names}
            if self._versions is not None:  # something that has gone is still in use: what has come since has not gone
                self._versions = _versions(self._all())
            yield self._all()
            if all(_versions(before.get(name, ())) <= _versions(self._listed[name]) for name in names):
                return
        listed: dict[str, list[ListedDictionary]] = {}
        for each in self._list():
            listed.setdefault(each.model.name, []).append(each)
        self._listed = listed
        self._versions = _versions(self._all())
        yield self._all()

    def _all(self) -> list[ListedDictionary]:
        return [each for versions in (self._listed or {}).values() for each in versions]

    def _list(self, name: str = "") -> list[ListedDictionary]:
        try:
            return _listed(self._store, name, seconds_max=LIST_SECONDS_MAX)
        except DeadlineExceeded as error:  # that of a watch says that it is to be renewed: this one has failed
            raise Unavailable(f"{self._endpoint.address} does not list what it keeps in time: {error}") from error

    def _tidy(self) -> None:
        versions = self._versions
        if self._cache is not None and versions is not None:
            try:
                tidy = self._cache.keep_listed(self._endpoint.address, versions)
            except OSError as error:  # the folder's trouble, which openings tell; the watch goes on
                log.warning("the cache of dictionaries cannot be tidied", extra={"reason": str(error)})
                tidy = True
            if tidy and self._versions is versions:
                self._versions = None


@contextmanager
def _ended_with_its_store(
    watch: PointerWatch, look_too: Callable[[], None] = lambda: None, seconds_max: float = math.inf
) -> Iterator[threading.Event]:
    """End a watch, which waits for its store for ever, once that no longer answers, or has not for UNHEARD_SECONDS_MAX.

    look_too: called at every look
    Gives what is set where the watch was ended because `seconds_max` were over.
    """
    over, late, began = threading.Event(), threading.Event(), time.monotonic()

    def look() -> None:
        answered = False
        while not over.wait(LOOK_SECONDS):
            passed = time.monotonic() - began
            if not watch.connected and (answered or passed > UNHEARD_SECONDS_MAX):
                watch.cancel()
                return
            if passed > seconds_max:
                late.set()
                watch.cancel()
                return
            answered = answered or watch.connected
            look_too()

    looking = threading.Thread(target=look, name="treadle-store-look", daemon=True)
    looking.start()
    try:
        yield late
    finally:
        over.set()
        looking.join()


def _listed(store: AsmStore, name: str = "", *, seconds_max: float) -> list[ListedDictionary]:
    found = store.list(name, seconds_max, ANSWER_SECONDS_MAX)
    return [ListedDictionary(each.dictionary, each.version, each.current) for each in found]


def _versions(listed: Sequence[ListedDictionary]) -> set[str]:
    return {each.version for each in listed}
