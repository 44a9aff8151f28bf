"""Threads that compute while the event loop waits: the store's one bounded executor, and its turnstiles.

A cancelled caller leaves only when the thread that works for it has ended, so nothing is taken apart under a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from treadle.contract.errors import ResourceExhausted, Unavailable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Check = Callable[[], None]


class Compute:
    """`threads` threads, 2 at least, for numpy, checksums and files. Long work never takes the last: opens, lists and lookups go on."""

    def __init__(self, threads: int) -> None:
        self._long = asyncio.Semaphore(threads - 1)
        self._executor = ThreadPoolExecutor(threads, "asm-store")

    async def run(self, work: Callable[Arguments, Result], /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        """`work(*arguments)` in a thread. When cancelled, first waits for the thread to end."""
        loop = asyncio.get_running_loop()
        return await uninterrupted(loop.run_in_executor(self._executor, partial(work, *arguments, **options)))

    async def run_long(
        self, work: Callable[Arguments, Result], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """The same for what reads or writes whole files: it waits until a thread beside the last is free."""
        async with self._long:
            return await self.run(work, *arguments, **options)

    async def run_stoppable(
        self, work: Callable[Concatenate[Check, Arguments], Result], /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """The same for `work(check, *arguments)`, which calls `check` between its steps: once the caller leaves that raises Unavailable.

        So that who leaves, or is sent away, waits for a step and not for the whole.
        """
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise Unavailable("nobody waits for it any more")

        running = asyncio.ensure_future(self.run_long(partial(work, check), *arguments, **options))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            left.set()
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # taken note of
            raise

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Await `work` as one step that a cancellation cannot split: it arrives after the step."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # taken note of: the cancellation is what the caller hears
        raise


class Turnstile:
    """Lets `most` through at once and refuses the next one at once; `many`: what passes; setting: what bounds it."""

    def __init__(self, many: str, setting: str, most: int, retry_after_seconds: float) -> None:
        self._many, self._setting, self._most = many, setting, most
        self._retry_after_seconds, self.inside = retry_after_seconds, 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Be inside for the duration. Raises ResourceExhausted when it is full, saying when to try again."""
        if self.inside >= self._most:
            raise ResourceExhausted(
                f"{self.inside} {self._many} are in progress, the limit {self._setting}; try again in {self._retry_after_seconds:g} s",
                self._retry_after_seconds,
            )
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
