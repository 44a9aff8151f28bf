"""Waiting for a pool that has another load in progress: `treadle pool load` takes its turn. Owns no call of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import typer

from treadle.contract import ResourceExhausted

TURN_SECONDS_MAX = 600.0  # grown memories load in seconds; who waits for a checkpoint of hundreds of GB wants to know
Result = TypeVar("Result")


def in_turn(
    load: Callable[[], Result],
    *,
    seconds_max: float = TURN_SECONDS_MAX,
    now_seconds: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[Result, float]:
    """`load()`, tried again whenever the pool says after how many seconds; what it gave, and the seconds it took itself.

    A line on standard error says that it waits. Raises what `load` raises; ResourceExhausted also after `seconds_max`.
    """
    first = now_seconds()
    waiting = False
    while True:
        begun = now_seconds()
        try:
            return load(), now_seconds() - begun
        except ResourceExhausted as error:
            again_seconds = error.retry_after_seconds  # None: only making room helps
            if again_seconds is None or begun + again_seconds > first + seconds_max:
                raise
            if not waiting:
                typer.echo(f"{error} (this command does so itself, for up to {seconds_max:g} s)", err=True)
            waiting = True
            wait(again_seconds)
