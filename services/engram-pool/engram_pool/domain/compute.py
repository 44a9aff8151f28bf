"""Threads that compute while the event loop waits: the pool's one bounded executor, and its turnstiles.

A cancelled caller leaves only when the thread that works on its buffers has ended, so nothing is unmapped under a thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from treadle.contract import ResourceExhausted, Unavailable

log = logging.getLogger("engram_pool")
CLOSE_SECONDS = 5.0  # at the end, how long threads may take; a read from a dead disk takes for ever

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Compute:
    """`threads` threads for numpy, checksums and files. Daemons: one that hangs in the kernel does not keep the process."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        self._threads = [threading.Thread(target=self._serve, name=f"engram-pool-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[Arguments, Result], /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        """`work(*arguments)` in a thread. When cancelled, first waits for the thread to end."""
        return await _uninterrupted(asyncio.wrap_future(self._submit(partial(work, *arguments, **options))))

    async def run_or_leave(self, work: Callable[[], Result], give_back: Callable[[Result], None]) -> Result:
        """`work()` in a thread. When cancelled, leaves at once; what the thread brings then goes to `give_back`, in the thread."""
        future = self._submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(partial(_give_back, give_back))
            raise

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the threads, waiting at most `seconds`. Who still waits for one that does not end gets Unavailable."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            log.error("threads do not end; the process leaves them behind", extra={"threads": hanging})
        for future in list(self._pending):
            with suppress(InvalidStateError):  # it ended just now
                future.set_exception(Unavailable("the pool stopped before this ended"))

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody cancels it: a thread works on the caller's buffers
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._jobs.put(partial(_complete, future, work))
        return future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _complete(future: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work` into `future`; nothing for one that `close` has given up."""
    with suppress(InvalidStateError):
        try:
            result = work()
        except BaseException as error:  # whatever it is, the caller hears it
            future.set_exception(error)
        else:
            future.set_result(result)


def _give_back(give_back: Callable[[Result], None], future: Future[Result]) -> None:
    if future.exception() is None:
        give_back(future.result())


async def to_the_end(work: Awaitable[Result]) -> Result:
    """Await `work` as one step that a cancellation cannot split: it arrives after the step."""
    return await _uninterrupted(asyncio.ensure_future(work))


async def _uninterrupted(future: asyncio.Future[Result]) -> Result:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # taken note of: the cancellation is what the caller hears
        raise


class Turnstile:
    """Lets `most` through at once and refuses the next one at once; `one`, `many`: what passes, e.g. load, loads."""

    def __init__(self, one: str, many: str, most: int, retry_after_seconds: float) -> None:
        self._one, self._many, self._most = one, many, most
        self._retry_after_seconds, self.inside = retry_after_seconds, 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be inside for the duration. Raises ResourceExhausted when it is full, saying when to try again."""
        if self.inside >= self._most:
            busy = f"{self.inside} {self._many} are in progress, the limit is {self._most}"
            if self._most == 1:
                busy = f"another {self._one} is in progress"
            raise ResourceExhausted(f"{busy}; try again in {self._retry_after_seconds:g} s", self._retry_after_seconds)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
