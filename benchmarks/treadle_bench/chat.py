"""`treadle bench chat`: the embedded engine without Engram, and with its rows local, mapped and by rpc.

The CXL paper's Table 2 on this machine. All variants share one model and one process and take turns round by round; the rows
are fused in shadow as in the paper (all computed, nothing added), so that every variant does the same work on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.limits import Limits
from inference_worker.domain.report import StepReport
from inference_worker.domain.request import Request, Sampling
from treadle.client import Endpoint
from treadle.client.engram import EngramPool, StepPrefetcher
from treadle.nn import demo_profile, model_fetch
from treadle.nn.memory_fit import fusion_of
from treadle.nn.model import CausalLM
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Goal, Row, interleave, rows_of

BASELINE, LOCAL, MAPPED, RPC = "no engram", "local", "mapped", "rpc"
BATCHES, BATCHES_QUICK = (1, 16), (1, 4)
PROMPT_TOKENS, NEW_TOKENS = 128, 24
STEP_TOKENS = 256  # a prefill step of the largest batch is cut into chunks of this many
ROUNDS, ROUNDS_QUICK = 12, 3
TICKETS_MIN = 5000  # for the share of tickets in time; the mapped variant goes on alone until it has them


@dataclass(slots=True)
class Tally:
    """What the Engram tickets of one variant did."""

    tickets: int = 0
    in_time: int = 0
    stall_seconds: float = 0.0
    step_seconds: float = 0.0
    rows_missing: int = 0
    stalls: list[float] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self.step_seconds += report.seconds
        for layer in report.layers:
            self.tickets += 1
            self.in_time += layer.in_time
            self.stall_seconds += layer.stall_seconds
            self.rows_missing += layer.rows_missing
            self.stalls.append(layer.stall_seconds)


def measure(*, quick: bool, pool_address: str, model_dir: Path | None) -> tuple[list[Row], list[Goal], dict[str, Any]]:
    """Tokens a second of prefill and decode for each batch, and what the tickets did. Needs 1.5 GB of memory."""
    folder = model_dir or model_fetch.fetch("smollm2-135m")
    with _pool(pool_address) as address, _engines(folder, address) as engines:
        tallies: dict[tuple[str, int, str], Tally] = {}
        rows: list[Row] = []
        for batch in BATCHES_QUICK if quick else BATCHES:
            rows += _measure_batch(engines, batch, ROUNDS_QUICK if quick else ROUNDS, tallies)
        if not quick:
            _until_enough_tickets(engines[MAPPED], tallies)
        figures = {
            name: engine.prefetcher.figures(engine.memory.handle)
            for name, engine in engines.items()
            if engine.memory is not None and engine.prefetcher is not None
        }
    memory = [
        {
            "transport": name, "layer": layer, "gather_us_p50": each.gather_seconds_p50 * 1e6, "gather_us_p99": each.gather_seconds_p99 * 1e6,
            "slack_ms_p50": each.slack_seconds_p50 * 1e3, "slack_ms_p01": each.slack_seconds_p01 * 1e3, "tickets": each.tickets,
            "tickets_in_time": each.tickets_in_time, "row_bytes": each.row_bytes,
        }
        for name, layers in figures.items() for layer, each in layers.items()
    ]  # fmt: skip
    stalls = [_stall_row(key, tally) for key, tally in sorted(tallies.items()) if tally.tickets]
    return rows + stalls, _goals(tallies), {"memory": memory}


def _measure_batch(engines: dict[str, Engine], batch: int, rounds: int, tallies: dict[tuple[str, int, str], Tally]) -> list[Row]:
    decode_rates: dict[str, dict[int, float]] = {name: {} for name in engines}

    def variant(name: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            prefill, decode = _round(engines[name], batch, seed=number)
            for phase, reports in (("prefill", prefill), ("decode", decode)):
                for report in reports:
                    tallies.setdefault((name, batch, phase), Tally()).add(report)
            decode_rates[name][number] = sum(r.completion_tokens for r in decode) / sum(r.seconds for r in decode)
            return sum(r.prefill_tokens for r in prefill) / sum(r.seconds for r in prefill)

        return run

    for engine in engines.values():
        _round(engine, batch, seed=-1)  # warm: buffers, learned deadlines
    prefill_rates = interleave({name: variant(name) for name in engines}, rounds, seed=batch, what=f"batch {batch}")
    decoded = {name: [rates[number] for number in range(rounds)] for name, rates in decode_rates.items()}
    shape = {"batch": batch, "prompt": PROMPT_TOKENS, "new": NEW_TOKENS}
    return [
        *rows_of(prefill_rates, {"phase": "prefill", **shape}, "tok/s", LOCAL),
        *rows_of(decoded, {"phase": "decode", **shape}, "tok/s", LOCAL),
    ]


def _round(engine: Engine, batch: int, *, seed: int) -> tuple[list[StepReport], list[StepReport]]:
    """Run `batch` requests of made-up prompts to their end; reports of the steps with prompt tokens, and of the others."""
    chance = np.random.default_rng(seed + 1)
    answers = []
    for _ in range(batch):
        answers.append(Answer())
        prompt = tuple(int(token) for token in chance.integers(100, 40_000, size=PROMPT_TOKENS))
        engine.submit(Request(prompt=prompt, sampling=Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)), answers[-1])
    reports = run_until_done(engine, answers)
    failed = [answer.error for answer in answers if answer.error is not None]
    if failed:
        raise failed[0]
    return [r for r in reports if r.prefill_tokens], [r for r in reports if not r.prefill_tokens]


def _until_enough_tickets(engine: Engine, tallies: dict[tuple[str, int, str], Tally]) -> None:
    number = 10_000
    while sum(tally.tickets for (name, _, _), tally in tallies.items() if name == MAPPED) < TICKETS_MIN:
        number += 1
        batch = BATCHES[number % len(BATCHES)]
        for phase, reports in zip(("prefill", "decode"), _round(engine, batch, seed=number), strict=True):
            for report in reports:
                tallies.setdefault((MAPPED, batch, phase), Tally()).add(report)


def _stall_row(key: tuple[str, int, str], tally: Tally) -> Row:
    name, batch, phase = key
    stalls = np.asarray(tally.stalls) * 1e6
    share = tally.stall_seconds / tally.step_seconds
    params = {"phase": phase, "batch": batch, "of_step": f"{share:.3%}", "in_time": f"{tally.in_time}/{tally.tickets}"}
    return Row(f"stall, {name}", params, "us", float(np.median(stalls)), float(np.percentile(stalls, 99)), len(stalls))


def _goals(tallies: dict[tuple[str, int, str], Tally]) -> list[Goal]:
    mapped = [(batch, phase, tally) for (name, batch, phase), tally in tallies.items() if name == MAPPED]
    goals = [
        Goal(f"mapped, batch {batch}, {phase}: stall share of step time", tally.stall_seconds / tally.step_seconds, 0.01)
        for batch, phase, tally in mapped
    ]
    tickets = sum(tally.tickets for _, _, tally in mapped)
    goals.append(
        Goal("mapped: share of tickets in time", sum(tally.in_time for _, _, tally in mapped) / tickets, 0.999, at_least=True)
    )
    goals.append(Goal("mapped: rows missing", sum(tally.rows_missing for _, _, tally in mapped), 0))
    return goals


@contextmanager
def _pool(address: str) -> Iterator[str]:
    if address:
        yield address
        return
    with pool_process() as process:
        yield process.address


@contextmanager
def _engines(folder: Path, address: str) -> Iterator[dict[str, Engine]]:
    """One engine a variant, all on one model. The demo table is loaded if the pool does not hold it."""
    vocabulary, model = read_vocabulary(folder / "tokenizer.json"), CausalLM.load(folder, torch.float32)
    limits = Limits(sequences_max=max(BATCHES), step_tokens_max=STEP_TOKENS, prefix_cache_bytes_max=0)
    template, token_map = demo_profile.smollm2_demo_template(folder / "tokenizer.json")
    with ExitStack() as stack:
        pool = stack.enter_context(EngramPool(Endpoint(address)))
        if template.name not in {resident.model.name for resident in pool.list_models()}:
            pool.load_random(template, token_map)
        engines = {BASELINE: Engine(model, vocabulary, limits)}
        for transport in (LOCAL, MAPPED, RPC):
            handle = stack.enter_context(pool.open(template.name, transport=transport))
            fusion = fusion_of(handle.model, model.config.hidden, None)
            engines[transport] = Engine(
                model, vocabulary, limits, EngramMemory(handle, fusion, fused=False), prefetcher=StepPrefetcher()
            )
        yield engines
