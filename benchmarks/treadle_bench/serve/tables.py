"""The measurements of `treadle bench serve`: which workers run beside each other, and what is compared.

Owns the variants and their pairing. Every figure is taken in rounds that alternate with those of its baseline, whose worker is
alive all the time; a worker that has no round sleeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from treadle.nn import model_fetch
from treadle_bench.report import Goal, Row, interleave, rows_of
from treadle_bench.serve import hosts
from treadle_bench.serve.driving import Fleet, Round, Shape
from treadle_bench.serve.pools import Pool, pool_with_table
from treadle_bench.serve.processes import EMBEDDED, HERE, Place, WorkerSpec, key_file, key_of, worker_process

BASELINE, LOCAL, MAPPED, SOCKET, MOONCAKE = "no engram", "local", "mapped", "socket", "mooncake"
SHAPE, SHAPE_QUICK = Shape(batch=8, prompt=64, new=32), Shape(batch=2, prompt=32, new=8)
ROUNDS, ROUNDS_QUICK, WARM_ROUNDS = 10, 2, 1
NO_MOONCAKE = "mooncake.engine cannot be loaded"  # as a worker says it
ADDED_SECONDS = 2e-3  # of latency between a worker and its pool
STALL_GOAL, HIDDEN_GOAL = 0.01, 0.05
Rounds = Mapping[str, Sequence[Round]]


@dataclass(frozen=True, slots=True)
class Run:
    """What all measurements of one engine share."""

    engine: str
    command: tuple[str, ...]
    model_dir: Path
    key: Path
    shape: Shape
    rounds: int

    def worker(self, transport: str, pool: str = "", place: Place = HERE) -> WorkerSpec:
        """A worker of this engine."""
        return WorkerSpec(self.engine, transport, pool, place, self.command)


@dataclass(slots=True)
class Result:
    """Rows and goals as they come, and what could not be measured. mooncake: whether pool and worker can load it."""

    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    mooncake: bool = True


def measure(*, quick: bool, engine: str = EMBEDDED, command: Sequence[str] = (), model_dir: Path | None = None) -> Result:
    """Tables 2 and 3 and the added latency, for one engine. command: what starts a worker, if not this environment's."""
    folder, result = model_dir or model_fetch.fetch("smollm2-135m"), Result()
    with key_file() as key:
        run = Run(
            engine, tuple(command) or (sys.executable, "-m", "inference_worker"), folder, key,
            SHAPE_QUICK if quick else SHAPE, ROUNDS_QUICK if quick else ROUNDS,
        )  # fmt: skip
        reason = hosts.why_not()
        _look_for_mooncake(result)
        with pool_with_table(folder, key, mooncake=result.mooncake) as pool:
            _one_worker(run, pool, result)
            _two_workers(run, pool, result)
        if reason is not None:
            result.skipped.append(reason)
            return result
        with (
            hosts.three_hosts() as (near, far, farther),
            pool_with_table(folder, key, near, mooncake=result.mooncake) as pool,
        ):
            _two_hosts(run, pool, near, far, result)
            _added_latency(run, pool, far, farther, result)
    return result


def _one_worker(run: Run, pool: Pool, result: Result) -> None:
    """Table 2: one worker without Engram, with a copy of its own, and with rows from the pool by each transport."""
    with ExitStack() as stack:
        local = stack.enter_context(_fleet(run, [run.worker(LOCAL, pool.address)]))
        for name in (BASELINE, MAPPED, SOCKET, *([MOONCAKE] if result.mooncake else [])):
            spec = run.worker("off") if name == BASELINE else run.worker(name, pool.address)
            with ExitStack() as round_stack:
                try:
                    other = round_stack.enter_context(_fleet(run, [spec]))
                except RuntimeError as error:
                    if name != MOONCAKE or NO_MOONCAKE not in str(error):
                        raise
                    result.mooncake = False  # as with vLLM, which lives in an environment of its own
                    result.skipped.append(f"{run.engine}: rows by mooncake: {_line_with(NO_MOONCAKE, str(error))}")
                    continue
                rounds = _paired(run, {LOCAL: local, name: other}, f"{run.engine}: {name}")
            result.rows += _compared(run, rounds, {"workers": 1, "hosts": 1}, LOCAL, skip_baseline=name != BASELINE)
            if name == MAPPED:
                result.goals.append(_stall_goal(run, rounds[MAPPED]))


def _two_workers(run: Run, pool: Pool, result: Result) -> None:
    """Table 3, one host: two workers on one pool against two with a copy each, and against one worker on the pool."""
    with ExitStack() as stack:
        fleets = {
            "1 x mapped": stack.enter_context(_fleet(run, [run.worker(MAPPED, pool.address)])),
            "2 x local": stack.enter_context(_fleet(run, [run.worker(LOCAL, pool.address)] * 2)),
            "2 x mapped": stack.enter_context(_fleet(run, [run.worker(MAPPED, pool.address)] * 2)),
        }
        rounds = _paired(run, fleets, f"{run.engine}: two workers")
    result.rows += _compared(run, rounds, {"workers": 2, "hosts": 1}, "2 x local")
    row = next(row for row in result.rows if row.name == "2 x mapped" and row.unit == "tok/s")
    upper = row.ratio_ci95[1] if row.ratio_ci95 is not None else row.ratio or 0.0
    text = f"{run.engine}: two workers on one pool / two with a copy each, tokens/s: upper end of the 95 % interval"
    result.goals.append(Goal(text, upper, 1.0, at_least=True))


def _two_hosts(run: Run, pool: Pool, near: Place, far: Place, result: Result) -> None:
    """Table 3, two hosts: one worker on each, the far one's rows over the network."""
    with ExitStack() as stack:
        here = run.worker(MAPPED, pool.address, near)
        fleets = {"mapped + mapped, 1 host": stack.enter_context(_fleet(run, [here, here]))}
        for transport in (SOCKET, *([MOONCAKE] if result.mooncake else [])):
            there = run.worker(transport, pool.address, far)
            fleets[f"mapped + {transport}, 2 hosts"] = stack.enter_context(_fleet(run, [here, there]))
        rounds = _paired(run, fleets, f"{run.engine}: two hosts")
    result.rows += _compared(run, rounds, {"workers": 2, "hosts": "1, 2"}, "mapped + mapped, 1 host")


def _added_latency(run: Run, pool: Pool, far: Place, farther: Place, result: Result) -> None:
    """Rows by socket from another host, with 2 ms more on the way: what of them a step still feels."""
    with ExitStack() as stack:
        for door in pool.doors:
            stack.enter_context(hosts.farther(farther, door, ADDED_SECONDS))
        fleets = {
            name: stack.enter_context(_fleet(run, [run.worker(SOCKET, pool.address, place)]))
            for name, place in ((SOCKET, far), ("socket + 2 ms", farther))
        }
        rounds = _paired(run, fleets, f"{run.engine}: 2 ms more")
    result.rows += _compared(run, rounds, {"workers": 1, "hosts": 2}, SOCKET)
    took = float(np.median([each.gather_seconds for each in rounds["socket + 2 ms"]]))
    if took < ADDED_SECONDS:
        raise RuntimeError(f"lookups took {1e3 * took:.3g} ms: the added latency was not on their way, so this shows nothing")
    stalls = [each.stall_seconds / each.tickets for each in rounds["socket + 2 ms"] if each.tickets]
    text = f"{run.engine}: median stall of a ticket with 2 ms more / 2 ms"
    result.goals.append(Goal(text, float(np.median(stalls)) / ADDED_SECONDS, HIDDEN_GOAL))


@contextmanager
def _fleet(run: Run, specs: Sequence[WorkerSpec]) -> Iterator[Fleet]:
    with ExitStack() as stack:
        addresses = [stack.enter_context(worker_process(spec, run.model_dir, run.shape.batch, run.key)) for spec in specs]
        fleet = stack.enter_context(Fleet(addresses, key_of(run.key)))
        for number in range(WARM_ROUNDS):  # buffers, connections, learned deadlines
            fleet.round(replace(run.shape, new=max(2, run.shape.new // 4)), seed=-1 - number & 0xFFFF)
        yield fleet


def _paired(run: Run, fleets: Mapping[str, Fleet], what: str) -> Rounds:
    """Rounds of all fleets in turn, the same prompts for each in a round."""
    kept: dict[str, list[Round]] = {name: [] for name in fleets}

    def variant(name: str, fleet: Fleet) -> Callable[[int], float]:
        def one(number: int) -> float:
            kept[name].append(fleet.round(run.shape, seed=number))
            return kept[name][-1].tokens_per_second

        return one

    interleave({name: variant(name, fleet) for name, fleet in fleets.items()}, run.rounds, seed=7, what=what)
    missing = [name for name, rounds in kept.items() if any(each.degraded or each.rows_missing for each in rounds)]
    if missing:
        raise RuntimeError(f"rows were missing with {', '.join(missing)}: these figures would be of another answer")
    return kept


def _compared(run: Run, rounds: Rounds, where: Mapping[str, Any], baseline: str, *, skip_baseline: bool = False) -> list[Row]:
    """Throughput, first token and gaps against the baseline, and each variant's stall."""
    params = {"engine": run.engine, **where, "batch": run.shape.batch, "prompt": run.shape.prompt, "new": run.shape.new}
    figures: list[tuple[str, str, Callable[[Round], float]]] = [
        ("throughput", "tok/s", lambda each: each.tokens_per_second),
        ("first token, median", "ms", lambda each: 1e3 * float(np.median(each.first))),
        ("gap, median", "ms", lambda each: 1e3 * float(np.median(each.gaps))),
        ("gap, p99", "ms", lambda each: 1e3 * float(np.percentile(each.gaps, 99))),
    ]
    rows: list[Row] = []
    for what, unit, value in figures:
        samples = {name: [value(each) for each in of] for name, of in rounds.items()}
        rows += rows_of(samples, {"of": what, **params}, unit, baseline)
    rows += [_stall_row(name, of, params) for name, of in rounds.items() if sum(each.tickets for each in of)]
    return [row for row in rows if not (skip_baseline and row.name == baseline)]


def _stall_row(name: str, rounds: Sequence[Round], params: Mapping[str, Any]) -> Row:
    stalls = [1e6 * each.stall_seconds / each.tickets for each in rounds if each.tickets]
    tickets, in_time = sum(each.tickets for each in rounds), sum(each.tickets_in_time for each in rounds)
    gather = f"{1e3 * float(np.median([each.gather_seconds for each in rounds])):.2f} ms"
    told = {
        "of": "stall of a ticket",
        **params,
        "gather": gather,
        "of_step": f"{_stall_share(rounds):.3%}",
        "in_time": f"{in_time}/{tickets}",
    }
    return Row(name, told, "us", float(np.median(stalls)), float(np.percentile(stalls, 99)), len(stalls))


def _stall_share(rounds: Sequence[Round]) -> float:
    return sum(each.stall_seconds for each in rounds) / sum(each.step_seconds for each in rounds)


def _stall_goal(run: Run, rounds: Sequence[Round]) -> Goal:
    return Goal(f"{run.engine}: mapped, stall share of step time", _stall_share(rounds), STALL_GOAL)


def _look_for_mooncake(result: Result) -> None:
    """Whether Mooncake can be loaded here, where the pool runs; where not, that is written down."""
    from treadle.client.engram.mooncake_engine import load
    from treadle.contract import Unavailable

    try:
        load("mooncake.engine")
    except Unavailable as error:
        result.mooncake = False
        result.skipped.append(str(error))


def _line_with(words: str, text: str) -> str:
    return next(line for line in reversed(text.splitlines()) if words in line)
