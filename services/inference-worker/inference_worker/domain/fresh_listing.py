"""Looks at a pool or store once more for those who miss something, as few times as will do.

Owns the one thread that asks, and who shares an answer. Does not know what a listing is, or what is done with it (`open_versions`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

from treadle.contract.errors import Unavailable


class FreshListing:
    """One look at a time; all who ask before it begins share it, so that any number of them costs the source little.

    look: asks the source, bounded in time, and lets what it holds be known; raises what keeps it from answering
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._lock = look, threading.Lock()
        self._next: Future[None] | None = None  # the look that has not begun
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treadle-source-look")

    def ask(self) -> Future[None]:
        """A look that begins from now on; done when what it found is known. Raises Unavailable after `close`."""
        with self._lock:
            if self._next is None:
                try:
                    self._next = self._thread.submit(copy_context().run, self._run)  # with the trace of who asked first
                except RuntimeError as error:
                    raise Unavailable("the worker is stopping") from error
            return self._next

    def close(self) -> None:
        """Begin no more looks; those that have not begun end as cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        with self._lock:
            self._next = None
        self._look()
