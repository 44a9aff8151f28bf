"""When calls are made: at random moments at a rate, whatever comes back (open loop), or so many at a time (closed loop)."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console
from rich.progress import Progress

from treadle_loadtests.calls import Seen

BAR_SECONDS = 0.5
Call = Callable[[int], Awaitable[Seen]]


async def at_rate(
    call: Call, per_second: float, seconds: float, seed: int = 0, *, enough: Callable[[], bool] = lambda: False
) -> list[Seen]:
    """Poisson arrivals, each waiting for nobody, for so long or until there are enough. Returns all once the last is over."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    tasks: list[Awaitable[Seen]] = []
    begun, at = loop.time(), 0.0
    while (at := at + chance.expovariate(per_second)) < seconds and not enough():
        await _sleep_until(begun + at)
        tasks.append(_begun(call(len(tasks))))
    return await _gathered(tasks)


async def at_moments(call: Call, moments: Sequence[float]) -> list[Seen]:
    """Call number n at moments[n] seconds from now; ascending."""
    begun, tasks = asyncio.get_running_loop().time(), list[Awaitable[Seen]]()
    for number, at in enumerate(moments):
        await _sleep_until(begun + at)
        tasks.append(_begun(call(number)))
    return await _gathered(tasks)


async def at_once(call: Call, callers: int, seconds: float, ramp_seconds: float) -> list[Seen]:
    """So many callers, each with its next call when the last is over; they begin one after the other."""
    loop = asyncio.get_running_loop()
    begun, seen = loop.time(), list[Seen]()

    async def caller(number: int) -> None:
        await _sleep_until(begun + ramp_seconds * number / callers)
        while loop.time() < begun + seconds:
            seen.append(await call(len(seen)))

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return seen


def _begun(call: Awaitable[Seen]) -> Awaitable[Seen]:
    return asyncio.ensure_future(call)


async def _gathered(tasks: Sequence[Awaitable[Seen]]) -> list[Seen]:
    return list(await asyncio.gather(*tasks))


async def _sleep_until(moment: float) -> None:
    left = moment - asyncio.get_running_loop().time()
    if left > 0:
        await asyncio.sleep(left)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection of this process meanwhile: the client would be late, and the gateway be blamed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@asynccontextmanager
async def bar(what: str, seconds: float) -> AsyncIterator[None]:
    """A bar of time on standard error while the body runs; nothing where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task, begun = progress.add_task(what, total=seconds), time.monotonic()

        async def advance() -> None:
            while True:
                progress.update(task, completed=min(seconds, time.monotonic() - begun), refresh=True)
                await asyncio.sleep(BAR_SECONDS)

        ticking = asyncio.ensure_future(advance())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.wait({ticking})
