import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treadle.contract.errors import DataLoss, InvalidArgument
from treadle_bench.asm import tables
from treadle_bench.asm.cells import Cell, Cells, cell_of
from treadle_bench.asm.goals import goals_of
from treadle_bench.asm.scores import figure, gap_recovered, of_questions
from treadle_bench.asm.tasks import Task

QUESTIONS, LABELS = 40, 4


def task(seed: int = 0, name: str = "clinc20") -> Task:
    pieces = tuple((seed, number) for number in range(50))
    questions = tuple((number,) for number in range(QUESTIONS))
    return Task(
        name,
        seed,
        pieces,
        ((1,),),
        questions,
        tuple((label,) for label in range(LABELS)),
        tuple(n % LABELS for n in range(QUESTIONS)),
    )


def log_probs(right: float, *, seed: int = 0) -> np.ndarray:
    """Sure of the right label in `right` of the questions, of the next one in the others."""
    of = np.full((QUESTIONS, LABELS), 0.05)
    for number in range(QUESTIONS):
        hit = np.random.default_rng(seed).permutation(QUESTIONS)[number] < right * QUESTIONS
        of[number, (number + (0 if hit else 1)) % LABELS] = 0.85
    return np.asarray(np.log(of))


def put(
    cells: Cells, method: str, values: np.ndarray, share: float, *, seed: int = 0, name: str = "clinc20", line: str = ""
) -> None:
    cost = (share, share / 2 if method.startswith("asm") else share, 100)
    cells.put(cell_of(task(seed, name), method, "so", values, cost, {"line": line} if line else None))


def test_a_method_that_answers_as_the_whole_prefix_does_agrees_with_a_kl_of_nought() -> None:
    full = log_probs(0.8)
    found = of_questions(full, full, task().answers)
    assert found["agreement"].mean() == 1
    assert np.allclose(found["kl"], 0)
    assert found["accuracy"].mean() == pytest.approx(0.8)


def test_kl_is_that_of_the_formula() -> None:
    full, other = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    found = of_questions(other, full, (0,))
    assert found["kl"][0] == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))


def test_batch_calibration_takes_off_a_liking_for_one_label() -> None:
    liked = log_probs(1.0) + np.array([5.0, 0, 0, 0])
    found = of_questions(liked - np.logaddexp.reduce(liked, axis=1, keepdims=True), log_probs(1.0), task().answers)
    assert found["accuracy"].mean() < 0.5
    assert found["calibrated"].mean() == 1


def test_scores_of_other_questions_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="answers"):
        of_questions(log_probs(1)[:3], log_probs(1), task().answers)


def test_an_interval_holds_the_mean_and_narrows_with_more_questions() -> None:
    draw = np.random.default_rng(0)
    few, many = (figure([draw.random(count) for _ in range(3)]) for count in (20, 2000))
    assert few.interval is not None
    assert many.interval is not None
    assert few.interval[0] < few.value < few.interval[1]
    assert many.interval[1] - many.interval[0] < few.interval[1] - few.interval[0]
    assert figure([np.ones(3)]).interval is None


def test_the_gap_is_recovered_by_half_where_half_of_the_gain_is_there() -> None:
    full, none, half = [np.ones(40)], [np.zeros(40)], [np.repeat([1.0, 0.0], 20)]
    found = gap_recovered(half, full, none)
    assert found.value == pytest.approx(0.5)
    assert found.interval is not None
    assert found.interval[0] < 0.5 < found.interval[1]
    with pytest.raises(InvalidArgument, match="no gap"):
        gap_recovered(half, none, full)


def test_a_cell_comes_back_as_it_was_and_one_of_another_prefix_is_measured_again(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    put(cells, "full", log_probs(0.8), 100)
    cell = cells.get("clinc20", 0, "full")
    assert np.allclose(cell.scores, log_probs(0.8), atol=1e-5)
    assert cells.has(task(), "full", "so")
    assert not cells.has(replace(task(), pieces=((9,),)), "full", "so")
    assert not cells.has(task(), "none", "so")
    assert not cells.has(task(), "full", "with other settings")
    assert list(cells) == [cell]


def test_a_torn_cell_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"schema": "treadle.asm-cell/1"}))
    with pytest.raises(DataLoss, match=r"x\.json"):
        list(Cells(tmp_path))


def test_a_table_holds_every_method_whether_it_wins_or_loses(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for seed in (0, 1):
        put(cells, "full", log_probs(0.8), 100, seed=seed)
        put(cells, "asm-k64-m9", log_probs(0.5, seed=1), 20, seed=seed)
        put(cells, "am-64", log_probs(0.8), 20, seed=seed)
    lines = tables.lines_of(cells)
    assert {line.method: line.seeds for line in lines} == {"full": (0, 1), "asm-k64-m9": (0, 1), "am-64": (0, 1)}
    text = tables.markdown("eval", lines, "treadle bench asm eval")
    assert "am-64" in text
    assert "asm-k64-m9" in text
    assert "| storage % |" in text
    assert json.dumps(tables.rows_of(lines))


def test_cells_of_several_seeds_that_are_one_line_stand_in_it(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for seed, name in ((0, "am-205"), (1, "am-202")):
        put(cells, "full", log_probs(0.8), 100, seed=seed)
        put(cells, name, log_probs(0.8), 20, seed=seed, line="am-20%")
    assert {line.method: line.seeds for line in tables.lines_of(cells)} == {"full": (0, 1), "am-20%": (0, 1)}


def test_a_cell_without_the_whole_prefix_of_its_questions_is_in_no_table(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    put(cells, "asm-k64-m9", log_probs(0.5), 20)
    assert tables.lines_of(cells) == []


def found_goals(tmp_path: Path, mine: float, rival: float) -> dict[str, bool]:
    cells = Cells(tmp_path)
    for seed in (0, 1, 2):
        put(cells, "full", log_probs(1.0), 100, seed=seed)
        put(cells, "asm-k1024-m256", log_probs(mine), 100, seed=seed)
        put(cells, "icl-512", log_probs(rival), 50, seed=seed)
    return {goal.text: goal.met for goal in goals_of(list(cells))}


def test_goals_are_met_and_missed_by_the_figures(tmp_path: Path) -> None:
    good = found_goals(tmp_path / "good", 0.95, 0.5)
    bad = found_goals(tmp_path / "bad", 0.5, 0.95)
    assert good["clinc20, K=1024, agreement, worst seed"]
    assert not bad["clinc20, K=1024, agreement, worst seed"]
    over = "clinc20, K=1024, KL over truncated ICL's at equal traffic, worst seed"
    assert good[over]
    assert not bad[over]


def test_a_rival_of_quite_another_size_is_not_taken_for_one_of_equal_size(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    put(cells, "full", log_probs(1.0), 100)
    put(cells, "asm-k1024-m256", log_probs(0.9), 100)
    put(cells, "icl-10", log_probs(0.5), 1)
    (goal,) = (goal for goal in goals_of(list(cells)) if "truncated" in goal.text)
    assert not goal.met
    assert "seed 0: no icl of equal traffic was measured" in goal.line


def test_a_seed_without_a_rival_of_equal_traffic_is_no_seed_that_met_the_goal(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for seed in (0, 1, 2):
        put(cells, "full", log_probs(1.0), 100, seed=seed)
        put(cells, "asm-k1024-m256", log_probs(0.95 if seed < 2 else 0.1), 100, seed=seed)
    for seed in (0, 1):
        put(cells, "icl-512", log_probs(0.5), 50, seed=seed)
    (goal,) = (goal for goal in goals_of(list(cells)) if "truncated" in goal.text)
    assert not goal.met
    assert goal.line.startswith("MISSED")
    assert "seed 2: no icl of equal traffic was measured; the others: 0.1" in goal.line
    assert goal.to_json()["value"] is None
    assert json.loads(json.dumps(goal.to_json(), allow_nan=False))["not_comparable"] == goal.not_comparable


def test_a_dictionary_that_reads_as_much_as_the_prefix_cannot_meet_a_goal_at_equal_traffic(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for seed in (0, 1):
        put(cells, "full", log_probs(1.0), 100, seed=seed)
        put(cells, "asm-k1024-m256-c3", log_probs(0.95), 340, seed=seed)
        put(cells, "icl-900", log_probs(0.5), 90, seed=seed)
    goals = {goal.text: goal for goal in goals_of(list(cells))}
    missed = goals["clinc20, K=1024, groups joined, KL over truncated ICL's at equal traffic, worst seed"]
    assert not missed.met
    assert "seeds 0, 1: it reads as much as the whole prefix or more" in missed.line
    assert goals["clinc20, K=1024, groups joined, agreement, worst seed"].met


def test_a_dictionary_with_more_matched_keys_is_judged_by_itself(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    put(cells, "full", log_probs(1.0), 100)
    put(cells, "asm-k1024-m256", log_probs(0.1), 125)
    put(cells, "asm-k1024-m384-wide", log_probs(1.0), 138)
    goals = {goal.text: goal for goal in goals_of(list(cells))}
    assert goals["clinc20, K=1024, three eighths matched, agreement, worst seed"].met
    assert not goals["clinc20, K=1024, agreement, worst seed"].met


def test_a_seed_without_the_dictionary_is_missed_by_every_goal_of_it(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for seed in (0, 1):
        put(cells, "full", log_probs(1.0), 100, seed=seed)
    put(cells, "asm-k1024-m256", log_probs(1.0), 100)
    goals = goals_of(list(cells))
    assert len(goals) == 4
    assert all("seed 1: this dictionary was not measured" in goal.line and not goal.met for goal in goals)


def test_rivals_that_were_not_measured_at_equal_storage_are_named(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    for seed in (0, 1):
        put(cells, "full", log_probs(1.0), 100, seed=seed)
        put(cells, "asm-k20-m180", log_probs(0.9), 20, seed=seed)
        put(cells, "icl-200", log_probs(0.4), 20, seed=seed)
    put(cells, "kvzip-200", log_probs(0.4), 20)
    met = {goal.text: goal for goal in goals_of(list(cells))}
    assert met["clinc20, at <= 20 % of storage, KL over that of icl, mean of seeds"].met
    kvzip = met["clinc20, at <= 20 % of storage, KL over that of kvzip, mean of seeds"]
    assert not kvzip.met
    assert "seed 1: no kvzip of equal storage was measured" in kvzip.line


def test_the_gap_of_permuted_labels_is_judged_with_every_rival_that_was_measured(tmp_path: Path) -> None:
    cells, name = Cells(tmp_path), "clinc20-permuted"
    put(cells, "full", log_probs(0.9), 100, name=name)
    put(cells, "none", log_probs(0.1), 0, name=name)
    put(cells, "asm-k25-m225", log_probs(0.8), 25, name=name)
    put(cells, "am-250", log_probs(0.9), 25, name=name)
    goals = {goal.text: goal for goal in goals_of(list(cells))}
    share = goals[f"{name}, at <= 25 % of storage, share of the prefix's gain in accuracy"]
    assert share.met
    assert share.value == pytest.approx(0.875, abs=0.01)
    assert not goals[f"{name}, points of accuracy above am at equal storage"].met
    assert "no kvzip of equal storage was measured" in goals[f"{name}, points of accuracy above kvzip at equal storage"].line


def test_a_prefix_that_gains_nothing_leaves_no_share_to_recover(tmp_path: Path) -> None:
    cells, name = Cells(tmp_path), "clinc20-permuted"
    for method in ("full", "none"):
        put(cells, method, log_probs(0.4), 100, name=name)
    put(cells, "asm-k25-m225", log_probs(0.8), 25, name=name)
    put(cells, "none", log_probs(0.1), 0, name=name, seed=1)
    put(cells, "full", log_probs(0.1), 100, name=name, seed=1)
    goal = goals_of(list(cells))[0]
    assert not goal.met
    assert "seed 0: the whole prefix gains nothing" in goal.line
    assert "seed 1: no dictionary within 25 % of storage was measured" in goal.line


@pytest.fixture
def cell() -> Cell:
    return cell_of(task(), "full", "so", log_probs(1.0), (100.0, 100.0, 5), {"why": 1})


def test_a_cell_has_the_name_that_its_file_has(cell: Cell, tmp_path: Path) -> None:
    Cells(tmp_path).put(cell)
    assert [path.name for path in tmp_path.iterdir()] == [f"{cell.name}.json"]
