"""`treadle bench asm eval`: every method on every task and prefix seed, a cell each; goes on where it stopped.

Owns the order of cells and what a run without a figure says. Cells are independent: any of them may be deleted and measured anew.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from treadle.contract.dictionary import DictionarySettings
from treadle.contract.errors import TreadleError
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import PrefixUse
from treadle_bench.asm.answering import label_log_probs
from treadle_bench.asm.cells import Cells, cell_name, cell_of
from treadle_bench.asm.heatmap import Watched
from treadle_bench.asm.methods import RIVALS, Bench, Kind, Method, methods_of, named
from treadle_bench.asm.tasks import SIZES, Split, Task, load_task, load_tokenizer
from treadle_bench.report import progress

Say = Callable[[str], None]
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. only: beginnings of method names, none: all; quick: small prefixes, few questions and methods."""

    data: Path
    model: Path
    out: Path
    settings: DictionarySettings
    tasks: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    only: tuple[str, ...] = ()
    split: Split = Split.TEST
    quick: bool = False


@dataclass(slots=True)
class Outcome:
    """Cells that there are now; failed: name of a cell -> why it has no figure."""

    done: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def tasks_of(plan: Plan, tokenizer: Tokenizer) -> Iterator[Task]:
    """The tasks of a plan, seed by seed, so that one seed of everything is there before the next begins."""
    for seed in plan.seeds:
        for name in plan.tasks:
            sizes = SIZES[name].quick() if plan.quick else SIZES[name]
            yield load_task(name, seed, plan.data, tokenizer, split=plan.split, sizes=sizes)


def run(plan: Plan, say: Say, methods: Callable[[Task, CausalLM], Sequence[Method]] | None = None) -> Outcome:
    """Measure what is missing. methods: of a task; None: those of the comparison. A method that fails is said, and the others go on."""
    model, cells, outcome = CausalLM.load(plan.model), Cells(plan.out), Outcome()

    def compared(task: Task, model: CausalLM) -> Sequence[Method]:
        return methods_of(task, model, plan.settings, quick=plan.quick)

    for task in tasks_of(plan, load_tokenizer(plan.model)):
        wanted = named((methods or compared)(task, model), plan.only)
        missing = [each for each in wanted if not cells.has(task, each.name, repr(each))]
        outcome.done += len(wanted) - len(missing)
        say(
            f"{task.name} seed {task.seed}: prefix of {len(task.prefix)} tokens, {len(wanted) - len(missing)} of {len(wanted)} cells are there"
        )
        with tempfile.TemporaryDirectory(prefix="treadle-bench-asm-") as work:
            _measure_all(Bench(model, plan.model, task, Path(work), missing), missing, cells, outcome, say)
    return outcome


def _measure_all(bench: Bench, methods: Sequence[Method], cells: Cells, outcome: Outcome, say: Say) -> None:
    task = bench.task
    for method in progress(methods, len(methods), f"{task.name} seed {task.seed}"):
        begun = time.monotonic()
        try:
            _measure(bench, method, cells)
            outcome.done += 1
            say(f"  {method.name}: {time.monotonic() - begun:.0f} s")
        except TreadleError as error:
            outcome.failed[cell_name(task.name, task.seed, method.name)] = str(error)
            say(f"  {method.name}: no figure: {error}")


def _measure(bench: Bench, method: Method, cells: Cells) -> None:
    placed = bench.place(method)
    uses, begun = list[PrefixUse](), time.process_time()
    found = label_log_probs(bench.model, bench.task.questions, bench.task.labels, placed.before, uses)
    share = 100 * method.size / len(bench.task.prefix) if method.kind in RIVALS else placed.cost[0]
    notes = placed.notes | {"line": method.line(share), "answering_cpu_seconds": round(time.process_time() - begun, 2)}
    if method.kind is Kind.DICTIONARY:
        off = [use.off_task() for use in uses]
        notes |= {"lookups": sum(use.lookups for use in uses), "outside": sum(use.lookups_outside for use in uses)}
        notes |= {"off_task_percent": round(100 * float(np.mean(off)), 2)}
    if isinstance(watched := placed.before.memory, Watched):
        notes["recall"] = round(watched.recall, 5)
    cells.put(cell_of(bench.task, method.name, repr(method), found, placed.cost, notes))
