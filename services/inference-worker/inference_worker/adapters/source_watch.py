"""Watches what a pool or store holds on a thread of its own, and finds it again whenever it has gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from treadle.contract.errors import DeadlineExceeded, TreadleError

log = logging.getLogger("treadle.worker")
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 2.0
WATCH_SECONDS = 300.0  # a watch is renewed so often: a source that went without a word is missed no longer
ItemT = TypeVar("ItemT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
ItemT_co = TypeVar("ItemT_co", covariant=True)


class Listener(Protocol[ItemT_contra]):
    """Hears what the source holds; `OpenVersions` fits."""

    def update(self, resident: Sequence[ItemT_contra]) -> None:
        """The list now, and again after each change."""

    def lost(self, reason: str) -> None:
        """The source does not answer."""


class Connection(Protocol[ItemT_co]):
    """One connection to the source. Closing it, from any thread, ends its watch."""

    def watch(self, seconds_max: float, /) -> Iterator[Sequence[ItemT_co]]:
        """The list now, and again after each change. Raises DeadlineExceeded once `seconds_max` are over, Unavailable."""

    def close(self) -> None:
        """Let go of it."""


class SourceWatch(Generic[ItemT]):
    """Tells a listener what a source holds. A context manager: leaving it ends the watch.

    connect: makes a connection; raises nothing that waiting would not mend
    name, address: in the log
    """

    def __init__(self, connect: Callable[[], Connection[ItemT]], listener: Listener[ItemT], *, name: str, address: str) -> None:
        self._connect, self._listener, self._name, self._address = connect, listener, name, address
        self._lock, self._stopping, self._answered = threading.Lock(), threading.Event(), threading.Event()
        self._connection: Connection[ItemT] | None = None
        self._known = True  # what the log was told last: that it is there, or not
        self._thread = threading.Thread(target=self._run, name=f"treadle-{name.split()[-1]}-watch", daemon=True)

    def __enter__(self) -> SourceWatch[ItemT]:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
        self._thread.join()

    def wait_answered(self, seconds_max: float) -> None:
        """Wait until the source has answered for the first time, or could not be reached."""
        self._answered.wait(seconds_max)

    def _run(self) -> None:
        pause = RETRY_SECONDS_MIN
        while not self._stopping.is_set():
            try:
                if self._follow():
                    pause = RETRY_SECONDS_MIN
            except Exception as error:  # a thread that ended would leave the worker with an old list for ever
                if not self._stopping.is_set():
                    log.exception(f"watching the {self._name} failed")
                    self._lose(f"{type(error).__name__}: {error}")
            self._stopping.wait(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _follow(self) -> bool:
        """Watch until the source goes or the watch is to be renewed; True if it answered at all."""
        heard, connection = False, self._connect()
        try:
            with self._lock:
                if self._stopping.is_set():
                    return False
                self._connection = connection
            for resident in connection.watch(WATCH_SECONDS):
                self._listener.update(resident)
                heard = True
                self._find()
        except DeadlineExceeded as error:
            if not heard:
                self._lose(str(error))
        except TreadleError as error:
            if not self._stopping.is_set():
                self._lose(str(error))
        finally:
            with self._lock:
                self._connection = None
            connection.close()
        return heard

    def _find(self) -> None:
        if not self._known:
            log.info(f"{self._name} found", extra={"address": self._address})
        self._known = True
        self._answered.set()

    def _lose(self, reason: str) -> None:
        if self._known:
            log.warning(f"{self._name} lost", extra={"address": self._address, "reason": reason})
        self._known = False
        self._listener.lost(reason)
        self._answered.set()
