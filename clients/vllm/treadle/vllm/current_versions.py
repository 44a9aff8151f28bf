"""Which version of each memory is current, for requests that name none: watched on a thread, from the first time somebody asks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from treadle.client.engram import EngramPool
from treadle.client.engram.pool_types import ResidentModel
from treadle.contract.errors import DeadlineExceeded, TreadleError
from treadle.vllm.config import MemoryConfig

log = logging.getLogger("treadle.vllm")
WATCH_SECONDS = 300.0  # a watch is renewed so often: a pool that went without a word is missed no longer
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 2.0


class CurrentVersions:
    """The current versions of a pool's memories. Any thread; `of` never waits."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._versions: dict[str, str] = {}
        self._pool: EngramPool | None = None
        self._thread: threading.Thread | None = None
        self._answers = True  # what the log was told last

    def of(self, name: str) -> str:
        """The version that is current now, or was when the pool last answered; empty: not known (yet)."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="treadle-current-versions", daemon=True)
                self._thread.start()
            return self._versions.get(name, "")

    def close(self) -> None:
        """End the watch."""
        self._stopping.set()
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        pause = RETRY_SECONDS_MIN
        while not self._stopping.is_set():
            try:
                self._follow()
                pause = RETRY_SECONDS_MIN
            except DeadlineExceeded:
                pause = RETRY_SECONDS_MIN  # to be renewed
            except TreadleError as error:
                if self._answers and not self._stopping.is_set():
                    log.warning("the engram pool does not say which versions are current: %s", error)
                self._answers = False
            except Exception:  # a thread that ended would leave the engine with old versions for ever
                if not self._stopping.is_set():
                    log.exception("watching the engram pool failed")
            self._stopping.wait(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _follow(self) -> None:
        with EngramPool(self._config.endpoint) as pool:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._pool = pool
            try:
                for resident in pool.watch(WATCH_SECONDS):
                    self._answers = True
                    self._heard(resident)
            finally:
                with self._lock:
                    self._pool = None

    def _heard(self, resident: Iterable[ResidentModel]) -> None:
        current = {one.model.name: one.version for one in resident if one.current}
        with self._lock:
            self._versions = current
