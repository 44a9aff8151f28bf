"""What is asked of dictionaries, held against cells: met or missed, and by how much.

Owns the goals' words and limits. Without any of its dictionaries a goal is not there; where a seed or a rival is missing it is
there, not comparable and so missed. Nobody judges a quick run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from treadle_bench.asm import scores
from treadle_bench.asm.cells import Cell
from treadle_bench.asm.methods import WIDE
from treadle_bench.asm.tables import per_question
from treadle_bench.report import Goal

ENTRIES = 1024
# The large dictionary as a build makes it, with all heads of a group in one key, and with more matched keys: end of its name -> words.
VARIANTS = {"": "", r"-c\d+": ", groups joined", f"-{WIDE}": ", three eighths matched"}
SMALL_STORAGE, RECOVER_STORAGE = 20.0, 25.0  # % of the prefix's KV
WHOLE_PREFIX = 100.0  # % of the traffic
SIZE_TOLERANCE = 0.25  # a truncated prefix holds whole examples, so it may be somewhat shorter than asked for
GAP_TASKS = ("clinc20-permuted", "banking77")
Found = Mapping[tuple[str, int, str], Cell]


def goals_of(cells: Sequence[Cell]) -> list[Goal]:
    """Every goal that there are cells for."""
    found: Found = {(cell.task, cell.seed, cell.method): cell for cell in cells}
    seeds = {task: sorted({cell.seed for cell in cells if cell.task == task and cell.method == "full"}) for task in _tasks(cells)}
    goals = [goal for variant in VARIANTS for goal in _fidelity(found, seeds.get("clinc20", []), variant)]
    goals += _small(found, seeds.get("clinc20", []))
    for task in GAP_TASKS:
        goals += _gap(task, found, seeds.get(task, []))
    return goals


def _fidelity(found: Found, seeds: Sequence[int], variant: str) -> list[Goal]:
    """The worst seed, since it is asked of every one. variant: what stands behind the entries in the method's name."""
    wanted = re.compile(rf"asm-k{ENTRIES}-m\d+{variant}")
    mine = [cell for (task, seed, name), cell in found.items() if task == "clinc20" and seed in seeds and wanted.fullmatch(name)]
    if not mine:
        return []
    means = [_means(cell, found) for cell in mine]
    unmeasured = dict.fromkeys(set(seeds) - {cell.seed for cell in mine}, "this dictionary was not measured")
    ratios, unequal = list[float](), dict(unmeasured)
    for cell, each in zip(mine, means, strict=True):
        rival = _nearest(cell, "icl", found, cell.traffic)
        if cell.traffic >= WHOLE_PREFIX:
            unequal[cell.seed] = "it reads as much as the whole prefix or more, so that this is its equal, with a KL of 0"
        elif rival is None:
            unequal[cell.seed] = "no icl of equal traffic was measured"
        else:
            ratios.append(each["kl"] / _means(rival, found)["kl"])
    what = f"clinc20, K={ENTRIES}{VARIANTS[variant]}"
    agreement, kl = [each["agreement"] for each in means], [each["kl"] for each in means]
    return [
        _judged(f"{what}, agreement, worst seed", agreement, unmeasured, min, 0.85, at_least=True),
        _judged(f"{what}, agreement, all seeds (goal beyond the gate)", agreement, unmeasured, fmean, 0.90, at_least=True),
        _judged(f"{what}, KL, all seeds (goal beyond the gate)", kl, unmeasured, fmean, 0.12),
        _judged(f"{what}, KL over truncated ICL's at equal traffic, worst seed", ratios, unequal, max, 1.0),
    ]


def _small(found: Found, seeds: Sequence[int]) -> list[Goal]:
    mine, unmeasured = _largest_of("clinc20", seeds, SMALL_STORAGE, found)
    goals = []
    for rival in ("icl", "kvzip") if mine else ():
        ratios, without = list[float](), dict(unmeasured)
        for cell in mine:
            other = _nearest(cell, rival, found, cell.storage)
            if other is None:
                without[cell.seed] = f"no {rival} of equal storage was measured"
            else:
                ratios.append(_means(cell, found)["kl"] / _means(other, found)["kl"])
        text = f"clinc20, at <= {SMALL_STORAGE:.0f} % of storage, KL over that of {rival}, mean of seeds"
        goals.append(_judged(text, ratios, without, fmean, 0.5))
    return goals


def _gap(task: str, found: Found, seeds: Sequence[int]) -> list[Goal]:
    """Accuracy gained over no prefix, against what the whole prefix gains; and points above each rival at equal storage."""
    mine, unmeasured = _largest_of(task, seeds, RECOVER_STORAGE, found)
    if not mine:
        return []
    goals = [_gain(task, mine, found, unmeasured)]
    for rival in ("icl", "kvzip", "am"):
        points, without = list[float](), dict(unmeasured)
        for cell in mine:
            other = _nearest(cell, rival, found, cell.storage)
            if other is None:
                without[cell.seed] = f"no {rival} of equal storage was measured"
            else:
                points.append(100 * (_means(cell, found)["accuracy"] - _means(other, found)["accuracy"]))
        text = f"{task}, points of accuracy above {rival} at equal storage"
        goals.append(_judged(text, points, without, fmean, 5.0, at_least=True))
    return goals


def _gain(task: str, mine: Sequence[Cell], found: Found, unmeasured: Mapping[int, str]) -> Goal:
    text = f"{task}, at <= {RECOVER_STORAGE:.0f} % of storage, share of the prefix's gain in accuracy"
    without, compared = dict(unmeasured), [cell.seed for cell in mine if (task, cell.seed, "none") in found]
    without |= {cell.seed: "the answers without a prefix were not measured" for cell in mine if cell.seed not in compared}
    full, none = ([_accuracy(found[task, seed, method], found) for seed in compared] for method in ("full", "none"))
    if sum(each.mean() for each in full) > sum(each.mean() for each in none):
        ours = [_accuracy(cell, found) for cell in mine if cell.seed in compared]
        shares = [scores.gap_recovered(ours, full, none).value]
    else:
        shares, without = [], without | dict.fromkeys(compared, "the whole prefix gains nothing")
    return _judged(text, shares, without, fmean, 0.8, at_least=True)


def _judged(
    text: str, figures: Sequence[float], without: Mapping[int, str], of_seeds: Callable[[Sequence[float]], float], limit: float,
    *, at_least: bool = False,
) -> Goal:  # fmt: skip
    """A goal asked of every seed. without: seeds that have no figure and why; what the others have is said, and meets nothing."""
    if not without:
        return Goal(text, of_seeds(figures), limit, at_least)
    reasons = []
    for why in dict.fromkeys(without.values()):
        which = sorted(seed for seed, reason in without.items() if reason == why)
        reasons.append(f"seed{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}: {why}")
    if figures:
        reasons.append(f"the others: {of_seeds(figures):.4g}")
    return Goal(text, math.nan, limit, at_least, "; ".join(reasons))


def _accuracy(cell: Cell, found: Found) -> NDArray[np.float64]:
    """Of each question."""
    return per_question(cell, found[cell.task, cell.seed, "full"])["accuracy"]


def _means(cell: Cell, found: Found) -> dict[str, float]:
    full = found[cell.task, cell.seed, "full"]
    return {metric: float(values.mean()) for metric, values in per_question(cell, full).items()}


def _largest_of(task: str, seeds: Sequence[int], storage: float, found: Found) -> tuple[list[Cell], dict[int, str]]:
    """`_largest` of each seed, and which seeds have none and why."""
    cells = {seed: _largest(task, seed, storage, found) for seed in seeds}
    unmeasured = {seed: f"no dictionary within {storage:.0f} % of storage was measured" for seed in seeds if cells[seed] is None}
    return [cell for cell in cells.values() if cell is not None], unmeasured


def _largest(task: str, seed: int, storage: float, found: Found) -> Cell | None:
    """The dictionary of the comparison with the most entries within so many per cent of storage."""
    cells = [
        cell for (of, at, name), cell in found.items() if of == task and at == seed and re.fullmatch(r"asm-k\d+(-m\d+)?", name) and cell.storage <= storage
    ]  # fmt: skip
    return max(cells, key=lambda cell: cell.storage, default=None)


def _nearest(mine: Cell, rival: str, found: Found, percent: float) -> Cell | None:
    """A rival's cell of the size that was chosen for this budget; None where none is near it, as where it would be the whole prefix."""
    cells = [
        cell
        for (task, seed, name), cell in found.items()
        if task == mine.task and seed == mine.seed and re.fullmatch(rf"{rival}-\d+", name)
    ]
    near = [cell for cell in cells if abs(cell.storage - percent) <= SIZE_TOLERANCE * percent]
    return min(near, key=lambda cell: abs(cell.storage - percent), default=None)


def _tasks(cells: Sequence[Cell]) -> set[str]:
    return {cell.task for cell in cells}
