"""Threads that compute while the event loop waits: the pool's one bounded executor, and its turnstiles.

A cancelled caller leaves only when the thread that works on its buffers has ended, so nothing is unmapped under a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from treadle.contract import ResourceExhausted

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Compute:
    """`threads` threads for numpy, checksums and files."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="engram-pool")

    async def run(self, work: Callable[Arguments, Result], /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        """`work(*arguments)` in a thread. When cancelled, first waits for the thread to end."""
        future = self._executor.submit(lambda: work(*arguments, **options))
        return await _uninterrupted(asyncio.wrap_future(future))

    def close(self) -> None:
        """Wait for the threads and end them."""
        self._executor.shutdown()


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
    """Lets `most` through at once and refuses the next one, named `what`, at once."""

    def __init__(self, what: str, most: int, retry_after_seconds: float) -> None:
        self._what, self._most, self._retry_after_seconds, self.inside = what, most, retry_after_seconds, 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be inside for the duration. Raises ResourceExhausted when it is full."""
        if self.inside >= self._most:
            raise ResourceExhausted(f"{self.inside} {self._what}, the limit is {self._most}", self._retry_after_seconds)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
