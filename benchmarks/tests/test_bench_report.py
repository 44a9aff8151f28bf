import json

import numpy as np
import pytest

from treadle_bench.report import ROOT, Goal, command_line, document, interleave, paired_ratio, rows_of, show


def test_every_round_calls_every_variant_once() -> None:
    calls: list[tuple[str, int]] = []

    def variant(name: str, seconds: float) -> float:
        calls.append((name, round(seconds)))
        return seconds

    samples = interleave({"a": lambda n: variant("a", n), "b": lambda n: variant("b", 10.0 * n)}, 5)
    assert samples == {"a": [0, 1, 2, 3, 4], "b": [0, 10, 20, 30, 40]}
    assert len(calls) == 10


def test_a_ratio_is_paired_by_round_and_its_interval_holds_it() -> None:
    base = np.random.default_rng(0).uniform(1, 100, size=200)  # a machine that is busy now and then, for both
    noise = np.random.default_rng(1).normal(1, 0.05, size=200)
    ratio, interval = paired_ratio(base * 0.5 * noise, base)
    assert ratio == pytest.approx(0.5, abs=0.02)
    assert interval is not None
    assert interval[0] < ratio < interval[1]
    assert interval[1] - interval[0] < 0.05


def test_few_rounds_have_no_interval() -> None:
    assert paired_ratio(np.array([1.0, 2.0, 4.0]), np.array([2.0, 2.0, 2.0])) == (1.0, None)


def test_rows_name_their_baseline_and_the_ratio_of_their_tails() -> None:
    base, half = rows_of({"base": [2.0] * 10, "half": [1.0] * 10}, {"tokens": 1}, "us", "base")
    assert (base.baseline, base.ratio) == (None, None)
    assert (half.baseline, half.ratio, half.p99_ratio, half.n) == ("base", 0.5, 0.5, 10)


def test_goals_are_met_on_the_right_side() -> None:
    assert Goal("time", 0.9, 1.0).met
    assert not Goal("time", 1.1, 1.0).met
    assert Goal("rate", 1.1, 1.0, at_least=True).met


def test_a_missed_goal_is_printed_and_a_quick_run_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    rows, goals = rows_of({"base": [2.0] * 10}, {"tokens": 1}, "us", "base"), [Goal("time", 2.0, 1.0)]
    show(rows, goals, as_json=False, title="t", quick=False)
    assert "MISSED time: 2" in capsys.readouterr().out
    show(rows, goals, as_json=True, title="t", quick=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["goals"] == []
    assert printed["quick"] is True
    assert document(rows, goals)["goals"][0]["met"] is False


def test_a_command_is_told_without_the_folders_of_one_machine() -> None:
    asked = ["loadtest", "--data", "/a/b/traces", f"--save={ROOT}/loadtests/results", str(ROOT), "--model", "c/d", "--rate=3"]
    told = "treadle loadtest --data FOLDER/traces --save=loadtests/results . --model c/d --rate=3"
    assert command_line(asked) == told
