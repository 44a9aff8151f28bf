import json
import math
from pathlib import Path

import numpy as np
import pytest

from treadle.contract.errors import DataLoss, InvalidArgument
from treadle_bench.grow import tables
from treadle_bench.grow.figures import PARTS, SETS, Figures, goals_of, missing_goals, rows_of
from treadle_bench.grow.intervals import gain_difference, paired, perplexity, ratio
from treadle_bench.grow.memory_run import STATES
from treadle_bench.grow.runs import MAIN_TOKENS, Kind, Run, marks_of, needs, ordered_runs
from treadle_bench.grow.store import Record, Scores, Store, scores_of

TOKENS = 511
BLOCKS = 40


def scores(change: float, *, blocks: int = BLOCKS, first: int = 0, noise: float = 0.0, seed: int = 0) -> Scores:
    """Blocks that all sides share, `change` nats a token off, with noise of this side alone."""
    base = np.random.default_rng(99).normal(3.0, 0.3, size=200)[first : first + blocks]
    own = np.random.default_rng(seed).normal(0, noise, size=blocks) if noise else np.zeros(blocks)
    return scores_of(np.arange(first, first + blocks), (base + change + own) * TOKENS)


def record(
    kind: Kind, mark: int, change: float, *, state: str = "on", seed: int = 0, domain: str = "kjv", cpu_seconds: float = 1200.0
) -> Record:
    sets = {name: scores(change if name in SETS[:2] else change / 100, noise=0.01 if change else 0, seed=seed) for name in SETS}
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
    assert missing_goals(Figures(Store(tmp_path))) == []


def test_a_goal_that_is_missed_or_not_measured_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = full_store(tmp_path, memory_change=math.log(0.9))
    store.put(record(Kind.MEMORY, MAIN_TOKENS, -0.1, state="shuffled"))
    for seed in (0, 1, 2):
        (store.records_folder / f"kjv.memory.s{seed}.{MAIN_TOKENS}.int4.json").unlink()
    tables.show(Figures(store), "treadle bench grow --report")
    printed = capsys.readouterr().out
    assert f"MISSED kjv, {MAIN_TOKENS:,} tokens, held-parts" in printed
    assert "MISSED kjv, held-parts, shuffled rows" in printed
    assert "not measured yet: kjv memory, int4" in printed
    assert "lora" in printed


def test_the_table_names_every_state_and_stands_as_markdown(tmp_path: Path) -> None:
    figures = Figures(full_store(tmp_path))
    text = tables.markdown(figures, "treadle bench grow --report")
    assert "| frozen model, perplexity |" in text
    assert "held-out chapters | held-out books | jack-sheppard" in text
    for name in ("| memory |", "| memory, shuffled |", "| toy |", "| lora |", "| 640 K | 3 | 20.0 | 8.4 |"):
        assert name in text
    assert "100 K: +" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {11}


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
