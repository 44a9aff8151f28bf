import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treadle.contract.errors import DataLoss, InvalidArgument
from treadle_bench.grow import tables
from treadle_bench.grow.figures import PARTS, SETS, Figures, rows_of
from treadle_bench.grow.goals import MeasuredGoal, goals_of, largest_changes
from treadle_bench.grow.intervals import gain_difference, gain_growth, paired, perplexity, ratio
from treadle_bench.grow.measuring import OVERLAP_NOTE
from treadle_bench.grow.memory_run import STATES, states_of
from treadle_bench.grow.missing import missing_runs
from treadle_bench.grow.runs import ALL, MAIN_TOKENS, MARKS, Kind, Run, marks_kept, marks_of, needs, ordered_runs
from treadle_bench.grow.store import Record, Scores, Store, scores_of

TOKENS = 511
BLOCKS = 40


def scores(change: float, *, blocks: int = BLOCKS, first: int = 0, noise: float = 0.0, seed: int = 0) -> Scores:
    """Blocks that all sides share, `change` nats a token off, with noise of this side alone."""
    base = np.random.default_rng(99).normal(3.0, 0.3, size=200)[first : first + blocks]
    own = np.random.default_rng(seed).normal(0, noise, size=blocks) if noise else np.zeros(blocks)
    return scores_of(np.arange(first, first + blocks), (base + change + own) * TOKENS)


def record(
    kind: Kind, mark: int, change: float, *, state: str = "on", seed: int = 0, domain: str = "kjv", cpu_seconds: float = 1200.0,
    blocks: int = BLOCKS,
) -> Record:  # fmt: skip
    sets = {
        name: scores(change if name in SETS[:2] else change / 100, blocks=blocks, noise=0.01 if change else 0, seed=seed)
        for name in SETS
    }
    return Record(domain, kind, seed, mark, state, sets, TOKENS, mark, cpu_seconds, 8_400_000, "digest")


def full_store(folder: Path, memory_change: float = math.log(0.75)) -> Store:
    store = Store(folder)
    store.put(record(Kind.FROZEN, 0, 0.0))
    for seed in (0, 1, 2):
        for mark, toy in ((100_000, -0.08), (300_000, -0.12)):
            store.put(record(Kind.TOY, mark, toy, seed=seed))
            store.put(record(Kind.MEMORY, mark, 1.5 * toy, seed=seed))
        store.put(record(Kind.MEMORY, MAIN_TOKENS, memory_change, seed=seed))
        for state, change in {
            "bf16": memory_change,
            "fp8": memory_change,
            "int4": memory_change + 0.001,
            "shuffled": 0.0,
            "random": 0.001,
        }.items():
            store.put(record(Kind.MEMORY, MAIN_TOKENS, change, state=state, seed=seed))
    store.put(record(Kind.LORA, MAIN_TOKENS, -0.3))
    return store


def test_a_record_comes_back_as_it_was_put(tmp_path: Path) -> None:
    store, one = Store(tmp_path), record(Kind.MEMORY, 50_000, -0.1, seed=2)
    assert not store.has("kjv", Kind.MEMORY, 2, 50_000)
    path = store.put(one)
    assert path.name == "kjv.memory.s2.50000.on.json"
    assert store.has("kjv", Kind.MEMORY, 2, 50_000)
    assert store.get("kjv", Kind.MEMORY, 2, 50_000) == one
    assert list(store) == [one]
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # nothing half-written is left


def test_a_torn_record_says_to_measure_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.put(record(Kind.TOY, 50_000, -0.1))
    whole = path.read_text(encoding="utf-8")
    for text in (whole[:200], json.dumps({"schema": "another/1"}), json.dumps(json.loads(whole) | {"surplus": 1})):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataLoss, match="measure"):
            list(store)


def test_a_ratio_is_that_of_the_perplexities_and_its_interval_holds_it() -> None:
    base, mine = scores(0.0), scores(math.log(0.8), noise=0.05)
    found = ratio(paired([mine], [base], TOKENS))
    assert found.value == pytest.approx(perplexity([mine], TOKENS) / perplexity([base], TOKENS))
    assert found.value == pytest.approx(0.8, abs=0.03)
    assert found.interval is not None
    assert found.interval[0] < found.value < found.interval[1]
    assert ratio(paired([mine], [base], TOKENS)) == found  # seeded


def test_blocks_vary_by_far_more_than_the_pairing_lets_through() -> None:
    found = ratio(paired([scores(-0.2, noise=0.01)], [scores(0.0)], TOKENS))
    assert found.interval is not None
    assert found.interval[1] - found.interval[0] < 0.01  # of blocks that differ by a factor of two among themselves


def test_only_blocks_that_both_sides_have_are_compared() -> None:
    found = ratio(paired([scores(-0.1, first=10)], [scores(0.0, blocks=30)], TOKENS))
    assert found.blocks == 20
    assert found.value == pytest.approx(math.exp(-0.1))
    with pytest.raises(InvalidArgument, match="different blocks"):
        paired([scores(-0.1, first=100)], [scores(0.0)], TOKENS)
    with pytest.raises(InvalidArgument, match="paired"):
        paired([scores(0.0)] * 3, [scores(0.0)] * 2, TOKENS)


def test_seeds_that_differ_widen_the_interval_and_few_blocks_have_none() -> None:
    alike = ratio(paired([scores(-0.2)] * 3, [scores(0.0)], TOKENS))
    apart = ratio(paired([scores(change) for change in (-0.3, -0.2, -0.1)], [scores(0.0)], TOKENS))
    assert alike.interval is not None
    assert apart.interval is not None
    assert apart.interval[1] - apart.interval[0] > 0.1 > alike.interval[1] - alike.interval[0]
    assert apart.by_seed == pytest.approx([math.exp(change) for change in (-0.3, -0.2, -0.1)])
    assert ratio(paired([scores(-0.2, blocks=5)], [scores(0.0, blocks=5)], TOKENS)).interval is None


def test_a_gain_over_another_is_in_points_of_the_baseline() -> None:
    base = [scores(0.0)]
    mine, other = paired([scores(math.log(0.80))], base, TOKENS), paired([scores(math.log(0.86))], base, TOKENS)
    value, interval = gain_difference(mine, other)
    assert value == pytest.approx(6.0)
    assert interval == pytest.approx((6.0, 6.0))


def test_goals_are_judged_from_the_store_alone(tmp_path: Path) -> None:
    goals = {goal.text: goal for goal in goals_of(Figures(full_store(tmp_path)))}
    assert len(goals) == 12
    assert all(goal.met for goal in goals.values())
    (parts,) = [goal for text, goal in goals.items() if f"{PARTS}: of the frozen" in text]
    assert parts.value == pytest.approx(0.75, abs=0.01)
    (toy,) = [goal for text, goal in goals.items() if "points over the toy table" in text and "more at" not in text]
    assert toy.value == pytest.approx(100 * (math.exp(-0.12) - math.exp(-0.18)), abs=0.5)
    assert {goal.seeds for goal in goals.values()} == {3}
    assert [text for text, goal in goals.items() if goal.interval is None] == [
        f"kjv, {MAIN_TOKENS:,} tokens: CPU-minutes of the slowest seed"
    ]


def test_a_goal_says_its_seeds_and_interval_and_where_the_interval_crosses_the_limit() -> None:
    clear = MeasuredGoal("ratio", 0.7798, 0.8, seeds=1, interval=(0.7701, 0.7894))
    assert tables.goal_text(clear) == "met    ratio: 0.7798 [0.7701, 0.7894], 1 seed (goal <= 0.8)"
    narrow = MeasuredGoal("ratio", 0.846, 0.85, seeds=3, interval=(0.832, 0.861))
    assert tables.goal_text(narrow) == "met, the interval crosses the limit: ratio: 0.846 [0.832, 0.861], 3 seeds (goal <= 0.85)"
    missed = MeasuredGoal("points", 3.9, 4.0, at_least=True, seeds=2, interval=(3.2, 4.6))
    assert tables.goal_text(missed).startswith(
        "MISSED, the interval crosses the limit: points: 3.9 [3.2, 4.6], 2 seeds (goal >= 4)"
    )
    assert tables.goal_text(MeasuredGoal("minutes", 39.0, 25.0)) == "MISSED minutes: 39, 1 seed (goal <= 25)"


def test_a_change_s_interval_is_of_its_size_whatever_its_direction(tmp_path: Path) -> None:
    store = full_store(tmp_path)
    for seed, change in ((0, -0.02), (1, -0.02), (2, -0.02)):
        store.put(record(Kind.MEMORY, MAIN_TOKENS, change, state="shuffled", seed=seed))
    for seed, change in ((0, -0.004), (1, 0.0), (2, 0.004)):
        store.put(record(Kind.MEMORY, MAIN_TOKENS, change, state="random", seed=seed))
    goals = {goal.text: goal for goal in goals_of(Figures(store))}
    away, around = (
        goals[f"kjv, {state} rows, on {PARTS} alone: change from the frozen perplexity"] for state in ("shuffled", "random")
    )
    assert away.interval is not None
    assert 0.01 < away.interval[0] < away.value < away.interval[1] < 0.03
    assert around.interval is not None
    assert around.interval[0] == 0.0
    assert around.interval[1] > 0.002


def test_the_largest_change_over_all_sets_stands_beside_the_goal_on_one(tmp_path: Path) -> None:
    store = full_store(tmp_path)
    spoilt = record(Kind.MEMORY, MAIN_TOKENS, 0.0, state="shuffled")
    store.put(replace(spoilt, sets={**spoilt.sets, "complete-angler": scores(0.02), "jack-sheppard": scores(-0.03)}))
    for seed in (1, 2):
        (store.records_folder / f"kjv.memory.s{seed}.{MAIN_TOKENS}.shuffled.json").unlink()
    figures = Figures(store)
    (found,) = [each for each in largest_changes(figures, "kjv") if each.state == "shuffled"]
    assert (found.set_name, found.seeds, found.mark) == ("jack-sheppard", 1, MAIN_TOKENS)
    assert found.change == pytest.approx(math.exp(-0.03) - 1)
    (line,) = [text for text in tables.notes_of(figures, "kjv") if text.startswith("shuffled rows at 640 K tokens")]
    assert (
        "change from the frozen perplexity, the largest of all sets: -2.96 % [-2.96, -2.96] (jack-sheppard), 1 seed; no goal."
        in line
    )
    assert {each.state for each in largest_changes(figures, "kjv")} == {"shuffled", "random", "fp8", "int4"}


def test_every_run_without_figures_is_named_and_seeds_that_lack_the_same_share_a_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run in ordered_runs():
        for mark in marks_kept(run):
            for state in states_of(run, mark):
                store.put(record(run.kind, mark, 0.0, state=state, seed=run.seed, domain=run.domain))
    assert missing_runs(Figures(store)) == []
    gone = [
        f"kjv.memory.s0.{MAIN_TOKENS}.bf16",
        f"kjv.lora.s2.{MAIN_TOKENS}.on",
        "python.frozen.s0.all.on",
        "python.ngram.s1.all.on",
    ]
    gone += [f"kjv.memory.s{seed}.{mark}.on" for seed in (1, 2) for mark in MARKS[2:]]
    for name in gone:
        (store.records_folder / f"{name}.json").unlink()
    assert sorted(missing_runs(Figures(store))) == [
        "kjv lora, seed 2: in the CPU time of the memory's 640 K tokens",
        "kjv memory, seed 0: bf16 at 640 K tokens",
        "kjv memory, seeds 1, 2: 300 K, 640 K tokens",
        "python frozen",
        "python ngram, seed 1: all tokens",
    ]


def test_marks_kept_are_those_that_leave_a_record() -> None:
    assert marks_kept(Run("kjv", Kind.FROZEN)) == (0,)
    assert marks_kept(Run("kjv", Kind.LORA, 0, MAIN_TOKENS)) == (MAIN_TOKENS,)
    assert marks_kept(Run("kjv", Kind.MEMORY, 0, MAIN_TOKENS)) == MARKS
    assert marks_kept(Run("kjv", Kind.NGRAM, 0, ALL)) == (ALL,)


def test_growth_of_a_gain_is_over_the_seeds_and_blocks_that_both_marks_have(tmp_path: Path) -> None:
    store = full_store(tmp_path)
    (store.records_folder / "kjv.toy.s2.100000.on.json").unlink()
    growth = Figures(store).toy_growth("kjv", 100_000, 300_000)
    assert growth is not None
    assert growth.seeds == 2
    expected = 100 * ((math.exp(-0.12) - math.exp(-0.18)) - (math.exp(-0.08) - math.exp(-0.12)))
    assert growth.points == pytest.approx(expected, abs=0.2)
    assert growth.interval is not None
    assert growth.interval[0] < growth.points < growth.interval[1]
    one = paired([scores(-0.1)], [scores(0.0)], TOKENS)
    assert gain_growth((one, one), (one, one))[0] == 0.0


def test_lines_say_of_how_many_blocks_they_are(tmp_path: Path) -> None:
    store = full_store(tmp_path)
    store.put(record(Kind.NGRAM, MAIN_TOKENS, -0.1, blocks=16))
    spread = record(Kind.FROZEN, 0, 0.0)
    store.put(replace(spread, sets={**spread.sets, SETS[-1]: scores(0.0, blocks=BLOCKS - 1)}))
    text = tables.markdown(Figures(store), "treadle bench grow --report")
    assert "| frozen model, perplexity |  |  |  |  | 40/40/39-40 |" in text
    assert "| ngram | 640 K | 1 | 20.0 | 8.4 | 16/16/16 |" in text
    assert "| memory | 640 K | 3 | 20.0 | 8.4 | 40/40/39-40 |" in text  # of each seed, on blocks that the frozen model has too


def test_how_it_was_measured_says_what_was_chosen_on_what_and_what_is_not_comparable(tmp_path: Path) -> None:
    text = tables.markdown(Figures(full_store(tmp_path)), "treadle bench grow --report")
    for words in (
        "fixed before these runs, in an exploration that had looked at some King James chapters", "nothing of it was picked here",
        "compare within a line, or lines of equal blocks", "whose learning rate has not fallen yet", "torch's attention backward",
        "not comparable", "are of fp32 rows", "rows read back",
    ):  # fmt: skip
        assert words in text


def test_the_overlap_that_was_measured_with_the_frozen_model_stands_below_the_table(tmp_path: Path) -> None:
    store = full_store(tmp_path)
    assert not any("Overlap" in text for text in tables.notes_of(Figures(store), "kjv"))
    overlap = {"held-parts": {"ngram_tokens": 24, "held": 0.0113, "itself": 0.0164}}
    store.put(replace(record(Kind.FROZEN, 0, 0.0), notes={OVERLAP_NOTE: overlap}))
    assert (
        "Overlap. held-out chapters: 1.1 % of tokens lie in a 24-gram that the training text has too; "
        "as many chapters of the training text itself: 1.6 %."
    ) in tables.notes_of(Figures(store), "kjv")


def test_quick_figures_are_held_against_nothing_on_the_page_either(tmp_path: Path) -> None:
    figures = Figures(full_store(tmp_path))
    assert "not run:" in tables.markdown(figures, "treadle bench grow")
    quick = tables.markdown(figures, "treadle bench grow --quick", judged=False)
    assert "not run:" not in quick
    assert "goal <=" not in quick


def test_a_goal_that_is_missed_or_not_measured_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = full_store(tmp_path, memory_change=math.log(0.9))
    store.put(record(Kind.MEMORY, MAIN_TOKENS, -0.1, state="shuffled"))
    for seed in (0, 1, 2):
        (store.records_folder / f"kjv.memory.s{seed}.{MAIN_TOKENS}.int4.json").unlink()
    tables.show(Figures(store), "treadle bench grow --report")
    printed = capsys.readouterr().out
    assert f"MISSED kjv, {MAIN_TOKENS:,} tokens, held-parts" in printed
    assert "kjv, shuffled rows, on held-parts alone: change from the frozen perplexity: 0.03" in printed
    assert "not run: kjv memory, seed 0: 50 K tokens; int4, gate-fixed at 640 K tokens" in printed
    assert "lora" in printed


def test_the_table_names_every_state_and_stands_as_markdown(tmp_path: Path) -> None:
    figures = Figures(full_store(tmp_path))
    text = tables.markdown(figures, "treadle bench grow --report")
    assert "| frozen model, perplexity |" in text
    assert "held-out chapters | held-out books | jack-sheppard" in text
    for name in ("| memory |", "| memory, shuffled |", "| toy |", "| lora |", "| 640 K | 3 | 20.0 | 8.4 | 40/40/40 |"):
        assert name in text
    assert "100 K: +" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {12}


def test_rows_follow_the_bench_output_s_form(tmp_path: Path) -> None:
    figures = Figures(full_store(tmp_path))
    rows = rows_of(figures.lines("kjv"))
    assert len(rows) == len(SETS) * len(figures.lines("kjv"))
    frozen = [row for row in rows if row.name == "frozen"]
    assert all(row.ratio is None and row.baseline is None for row in frozen)
    (on,) = [row for row in rows if row.name == "memory" and row.params["tokens"] == MAIN_TOKENS and row.params["set"] == PARTS]
    assert (on.baseline, on.unit, on.n) == ("frozen", "perplexity", 3 * BLOCKS)
    assert on.ratio == pytest.approx(0.75, abs=0.01)
    assert on.ratio_ci95 is not None


def test_runs_have_names_that_read_back_and_come_with_what_they_need_before_them() -> None:
    runs = ordered_runs()
    assert len({run.key for run in runs}) == len(runs)
    for place, run in enumerate(runs):
        assert Run.parse(run.key) == run
        assert set(needs(run)) <= set(runs[:place])
    assert runs[0].kind is Kind.FROZEN
    assert {run.seed for run in runs if run.kind is Kind.MEMORY and run.tokens == MAIN_TOKENS} == {0, 1, 2}
    assert marks_of(Run("kjv", Kind.MEMORY, 0, MAIN_TOKENS)) == (50_000, 100_000, 300_000, 640_000)
    assert set(STATES) == {"shuffled", "random", "bf16", "fp8", "int4"}
    with pytest.raises(InvalidArgument, match="kjv-memory-s0-640000"):
        Run.parse("kjv-memory")
