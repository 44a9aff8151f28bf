"""Runs what is missing, most telling first, each run in a process of its own, several at once if asked.

Owns the order of starting, the time budget, and that children end with it. Does not know what a run does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.contract.errors import InvalidArgument
from treadle_bench.grow.runs import Kind, Run, marks_kept, marks_of, needs
from treadle_bench.grow.store import ON, Store

JOBS_MAX = 16
POLL_SECONDS = 0.5
END_SECONDS = 10.0  # for a child to end when asked to

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Folders that every run gets."""

    work: Path
    texts: Path
    model: Path


def is_done(run: Run, store: Store) -> bool:
    """True if every mark of a run was measured (states other than "on" are a part of the last mark, and are made before it ends)."""
    return all(store.has(run.domain, run.kind, run.seed, mark, ON) for mark in marks_kept(run)) and not _unfinished(run, store)


def is_met(need: Run, store: Store) -> bool:
    """True if a run has what others need of it: its last mark, as it is."""
    return store.has(need.domain, need.kind, need.seed, 0 if need.kind is Kind.FROZEN else marks_of(need)[-1], ON)


def drive(
    runs: Sequence[Run], place: Place, *, jobs: int = 1, budget_seconds: float | None = None, quick: bool = False, say: Say = print
) -> list[Run]:
    """Do the runs that are missing; returns those that failed or were not reached. Nothing starts once the budget is spent.

    A run in progress is let finish; Ctrl-C ends the children, and what they trained is gone on with next time.
    """
    if not 1 <= jobs <= JOBS_MAX:
        raise InvalidArgument(f"--jobs: 1 to {JOBS_MAX}, got {jobs}")
    store, began = Store(place.work), time.monotonic()
    left = [run for run in runs if not is_done(run, store)]
    say(f"{len(runs) - len(left)} of {len(runs)} runs are done already")
    failed: list[Run] = []
    active: dict[Run, subprocess.Popen[bytes]] = {}
    try:
        while left or active:
            spent = budget_seconds is not None and time.monotonic() - began >= budget_seconds
            ready = None if spent or len(active) >= jobs else _next_ready(left, failed, store)
            if ready is not None:
                left.remove(ready)
                active[ready] = _start(ready, place, quick=quick)
                say(f"{_clock(began)} started {ready.key}")
                continue
            if not active:
                break
            time.sleep(POLL_SECONDS)
            for run in [run for run, child in active.items() if child.poll() is not None]:
                code = active.pop(run).returncode
                say(f"{_clock(began)} {'done' if code == 0 else 'FAILED'} {run.key}")
                failed += [run] if code else []
    finally:
        for child in active.values():
            _end(child)
    return failed + left


def _unfinished(run: Run, store: Store) -> bool:
    """True if a memory's last mark lacks one of the states that are measured there."""
    from treadle_bench.grow.memory_run import states_of

    last = marks_of(run)[-1]
    return any(not store.has(run.domain, run.kind, run.seed, last, state) for state in states_of(run, last))


def _next_ready(left: Sequence[Run], failed: Sequence[Run], store: Store) -> Run | None:
    """The first run whose needs are met; one whose need failed never is."""
    for run in left:
        if all(is_met(need, store) for need in needs(run)) and not set(needs(run)) & set(failed):
            return run
    return None


def _start(run: Run, place: Place, *, quick: bool) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "treadle_bench.grow.one_run", run.key, "--work", str(place.work)),
        *("--texts", str(place.texts), "--model", str(place.model), "--stop-at", str(run.stop_at)),
    ]
    return subprocess.Popen([*command, "--quick"] if quick else command)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _clock(began: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    return f"{minutes:4d}:{seconds:02d}"
