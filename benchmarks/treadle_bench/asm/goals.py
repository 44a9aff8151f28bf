"""What is asked of dictionaries, held against cells: met or missed, and by how much.

Owns the goals' words and limits. A goal without its cells is not there; nobody judges a quick run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from treadle_bench.asm import scores
from treadle_bench.asm.cells import Cell
from treadle_bench.asm.tables import per_question
from treadle_bench.report import Goal

ENTRIES = 1024
VARIANTS = ("", r"-c\d+")  # the large dictionary as a build makes it, and with all heads of a group in one key
SMALL_STORAGE, RECOVER_STORAGE = 20.0, 25.0  # % of the prefix's KV
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
    what = f"clinc20, K={ENTRIES}" + (", groups joined" if variant else "")
    goals = [
        Goal(f"{what}, agreement, worst seed", min(each["agreement"] for each in means), 0.85, at_least=True),
        Goal(f"{what}, agreement, all seeds (goal beyond the gate)", _mean(means, "agreement"), 0.90, at_least=True),
        Goal(f"{what}, KL, all seeds (goal beyond the gate)", _mean(means, "kl"), 0.12),
    ]
    ratios = [
        each["kl"] / _means(rival, found)["kl"] for cell, each in zip(mine, means, strict=True) for rival in [_nearest(cell, "icl", found, cell.traffic)]
        if rival is not None
    ]  # fmt: skip
    if ratios:
        goals.append(Goal(f"{what}, KL over truncated ICL's at equal traffic, worst seed", max(ratios), 1.0))
    return goals


def _small(found: Found, seeds: Sequence[int]) -> list[Goal]:
    goals = []
    for rival in ("icl", "kvzip"):
        ratios = []
        for seed in seeds:
            mine = _largest("clinc20", seed, SMALL_STORAGE, found)
            other = None if mine is None else _nearest(mine, rival, found, mine.storage)
            if mine is not None and other is not None:
                ratios.append(_means(mine, found)["kl"] / _means(other, found)["kl"])
        if ratios:
            goals.append(
                Goal(
                    f"clinc20, at <= {SMALL_STORAGE:.0f} % of storage, KL over that of {rival}, mean of seeds",
                    sum(ratios) / len(ratios),
                    0.5,
                )
            )
    return goals


def _gap(task: str, found: Found, seeds: Sequence[int]) -> list[Goal]:
    """Accuracy gained over no prefix, against what the whole prefix gains; and points above each rival at equal storage."""
    triples = []
    for seed in seeds:
        mine, none = _largest(task, seed, RECOVER_STORAGE, found), found.get((task, seed, "none"))
        if mine is not None and none is not None:
            triples.append((mine, found[task, seed, "full"], none))
    if not triples:
        return []
    mine_by_seed, full, none_by_seed = (
        [per_question(cell, found[task, cell.seed, "full"])["accuracy"] for cell in column] for column in zip(*triples, strict=True)
    )
    goals = []
    if sum(each.mean() for each in full) > sum(each.mean() for each in none_by_seed):
        share = scores.gap_recovered(mine_by_seed, full, none_by_seed).value
        goals.append(
            Goal(
                f"{task}, at <= {RECOVER_STORAGE:.0f} % of storage, share of the prefix's gain in accuracy",
                share,
                0.8,
                at_least=True,
            )
        )
    for rival in ("icl", "kvzip", "am"):
        points = []
        for cell, _, _ in triples:
            other = _nearest(cell, rival, found, cell.storage)
            if other is not None:
                points.append(100 * (_means(cell, found)["accuracy"] - _means(other, found)["accuracy"]))
        if points:
            goals.append(
                Goal(f"{task}, points of accuracy above {rival} at equal storage", sum(points) / len(points), 5.0, at_least=True)
            )
    return goals


def _means(cell: Cell, found: Found) -> dict[str, float]:
    full = found[cell.task, cell.seed, "full"]
    return {metric: float(values.mean()) for metric, values in per_question(cell, full).items()}


def _mean(means: Sequence[Mapping[str, float]], metric: str) -> float:
    return sum(each[metric] for each in means) / len(means)


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
