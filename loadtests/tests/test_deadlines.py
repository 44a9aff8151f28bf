"""The scenario `deadlines` works and counts what it says; how well the queue does is for a quiet machine to show."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from treadle.dataplane import IMPLEMENTATION
from treadle_bench.report import Goal
from treadle_loadtests.arrivals import Alone, Arrival, Kind, draw
from treadle_loadtests.commands import app
from treadle_loadtests.deadlines import Plan, run
from treadle_loadtests.driving import Seen, jobs_of
from treadle_loadtests.report import Report

needs_native = pytest.mark.skipif(
    IMPLEMENTATION != "native", reason="the native extension was not built: pip install needs a C++20 compiler"
)
KINDS = (Kind("small", 100, (2.0, 8.0)), Kind("large", 1000, (16.0,)))


def test_arrivals_take_the_part_of_a_workers_time_that_was_asked_for() -> None:
    alone = (Alone(150e-6, 100e-6), Alone(3e-3, 2e-3))
    arrivals = draw(KINDS, alone, (0.2, 0.6), 10.0, seed=1)
    busy = sum(alone[arrival.kind].busy_seconds for arrival in arrivals)
    assert busy == pytest.approx(8.0, rel=0.01)
    times = [arrival.at_ns for arrival in arrivals]
    assert times == sorted(times)
    assert {arrival.window for arrival in arrivals if arrival.kind == 0} == {2.0, 8.0}
    gaps = np.diff([arrival.at_ns for arrival in arrivals if arrival.kind == 0])
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1), "as strangers come: at random"


def test_a_refused_request_counts_with_the_mean_of_its_kind() -> None:
    arrival = Arrival(0, 0, 2.0)
    seen = [Seen(arrival, 10, 500, 200, 80), Seen(arrival, 20, 500, 300, 120), Seen(arrival, 30, 40)]
    jobs = jobs_of(seen, KINDS, 25)
    assert [job.service_ns for job in jobs] == [80, 120, 100]
    assert [job.piece_ns for job in jobs] == [20, 30, 25]
    assert [job.service_ns for job in jobs_of(seen, KINDS, 25, usual=True)] == [100] * 3


@needs_native
def test_every_request_is_met_late_or_refused_and_every_goal_is_judged() -> None:
    report = run(Plan(seconds=0.3, table_bytes=16 << 20, refusals=20))
    counts = report.counts
    assert counts["requests"] == counts["edf_met"] + counts["edf_admitted_and_late"] + counts["edf_refused"]
    assert counts["requests"] == counts["fifo_met"] + counts["fifo_late"]
    assert counts["edf_met_of_the_feasible"] <= min(counts["edf_met"], counts["feasible"])
    assert counts["edf_admitted_and_late_by_load"] <= counts["edf_admitted_and_late"]
    assert [goal.text.split(",")[0] for goal in report.goals] == [
        "edf met of the feasible / feasible", "prefill rows a second", "error of the predicted finish", "admitted and late because of overload",
        "decision to refuse in process", "refusal by socket / empty round trip",
    ]  # fmt: skip
    assert report.goals[0].value == counts["edf_met_of_the_feasible"] / max(1, counts["feasible"]) <= 1.0
    assert (
        len(report.times["refusal, 1,000 queued"])
        == len(report.times["refusal in process"])
        == len(report.times["refusal by socket"])
        == 20
    )


def test_what_may_be_the_cause_stands_beside_a_goal_that_was_missed() -> None:
    report = Report("deadlines", {}, goals=[Goal("a", 2.0, 1.0), Goal("b", 1.0, 2.0)], caveat="one core")
    told = [line for line in report.lines() if line.endswith("one core")]
    assert [line.split()[0] for line in told] == ["MISSED"]


@needs_native
def test_the_command_prints_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(_: Plan) -> Any:
        return run(Plan(seconds=0.1, table_bytes=8 << 20, refusals=5))

    monkeypatch.setattr("treadle_loadtests.deadlines.run", small)
    done = CliRunner().invoke(app, ["deadlines", "--quick", "--json"])
    assert done.exit_code in (0, 1), done.output
    document = json.loads(done.stdout)
    assert document["counts"]["requests"] > 0
    assert all(goal["met"] for goal in document["goals"]) == (done.exit_code == 0)
