"""Watches a pool's list of models on a thread of its own, and finds the pool again whenever it has gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramPool
from treadle.client.engram.pool_types import ResidentModel
from treadle.contract.errors import DeadlineExceeded, TreadleError

log = logging.getLogger("treadle.worker")
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 2.0
WATCH_SECONDS = 300.0  # a watch is renewed so often: a pool that went without a word is missed no longer


class Listener(Protocol):
    """Hears what the pool holds; `Catalogue` fits."""

    def update(self, resident: Sequence[ResidentModel]) -> None:
        """The list now, and again after each change."""

    def lost(self, reason: str) -> None:
        """The pool does not answer."""


class PoolWatch:
    """Tells a listener what a pool holds. A context manager: leaving it ends the watch."""

    def __init__(self, endpoint: Endpoint, listener: Listener) -> None:
        self._endpoint, self._listener = endpoint, listener
        self._lock, self._stopping, self._answered = threading.Lock(), threading.Event(), threading.Event()
        self._pool: EngramPool | None = None
        self._known = True  # what the log was told last: that it is there, or not
        self._thread = threading.Thread(target=self._run, name="treadle-pool-watch", daemon=True)

    def __enter__(self) -> PoolWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        with self._lock:
            if self._pool is not None:
                self._pool.close()
        self._thread.join()

    def wait_answered(self, seconds_max: float) -> None:
        """Wait until the pool has answered for the first time, or could not be reached."""
        self._answered.wait(seconds_max)

    def _run(self) -> None:
        pause = RETRY_SECONDS_MIN
        while not self._stopping.is_set():
            try:
                if self._follow():
                    pause = RETRY_SECONDS_MIN
            except Exception as error:  # a thread that ended would leave the worker with an old list for ever
                if not self._stopping.is_set():
                    log.exception("watching the engram pool failed")
                    self._lose(f"{type(error).__name__}: {error}")
            self._stopping.wait(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _follow(self) -> bool:
        """Watch until the pool goes or the watch is to be renewed; True if it answered at all."""
        heard = False
        with EngramPool(self._endpoint) as pool:
            with self._lock:
                if self._stopping.is_set():
                    return False
                self._pool = pool
            try:
                for resident in pool.watch(WATCH_SECONDS):
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
                    self._pool = None
        return heard

    def _find(self) -> None:
        if not self._known:
            log.info("engram pool found", extra={"pool": self._endpoint.address})
        self._known = True
        self._answered.set()

    def _lose(self, reason: str) -> None:
        if self._known:
            log.warning("engram pool lost", extra={"pool": self._endpoint.address, "reason": reason})
        self._known = False
        self._listener.lost(reason)
        self._answered.set()
