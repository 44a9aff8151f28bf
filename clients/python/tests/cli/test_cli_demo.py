"""The demo on fake services, and its tables."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from treadle.cli.demo_answers import PROMPTS, Completion, Pair
from treadle.cli.demo_evidence import PoolCounters, Served, gathered, wrong_counts
from treadle.cli.demo_report import bench_goals, bench_table, counted_words, pair_view, perplexity_view, served_table
from treadle.cli.held_out import Score
from treadle.client.engram.pool_types import ResidentModel
from treadle.contract import EngramModel
from treadle.inference.v1 import worker_pb2

VERSION = "39d7d9d911d0" + "ab" * 26
REPORT = {
    "name": "kjv",
    "version": VERSION,
    "transport": "mapped",
    "tickets": 4,
    "tickets_in_time": 3,
    "rows_missing": 0,
    "shadowed": False,
}


def rendered(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pair_of(plain: str = "he said", informed: str = "\n\nsaying,\n\nSpeak", **report: Any) -> Pair:
    treadle = {"degraded": False, "memory": [REPORT | report]}
    return Pair("And the LORD", Completion("m+none", plain, {}, {}, 0.5), Completion("m+kjv", informed, {}, treadle, 0.5))


def bench_document() -> dict[str, Any]:
    rows = [
        {"name": name, "params": {"phase": phase, "batch": batch, "prompt": 128}, "unit": "tok/s", "median": 1234.5,
         "ratio": None if name == "local" else 0.987, "ratio_ci95": None if name == "local" else [0.95, 1.02]}
        for phase in ("prefill", "decode") for batch in (1, 16) for name in ("no engram", "local", "mapped", "rpc")
    ]  # fmt: skip
    stall = {"name": "stall, mapped", "params": {"tickets": 5}, "unit": "us", "median": 0.0}
    goals = [{"text": "mapped: stall share", "value": 0.001, "limit": 0.01, "met": True}]
    return {"command": "treadle bench chat", "machine": {"cpu": "Loom 9000"}, "rows": [*rows, stall], "goals": goals}


def test_a_prompt_and_its_two_answers_stand_side_by_side_with_the_version_that_was_reported() -> None:
    text = rendered(pair_view(pair_of()))
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == [[">", "And", "the", "LORD"][0], "And", "the", "LORD"]
    assert lines[1] == ["without", "with", "kjv", "39d7d9d911d0,", "mapped"]
    assert lines[2] == ["he", "said", "saying,"]
    assert lines[3] == ["Speak"]  # blank lines of an answer are left out


def test_what_an_answer_says_of_markup_is_shown_as_it_is() -> None:
    assert "[bold]not bold[/]" in rendered(pair_view(pair_of(plain="[bold]not bold[/]")))


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (pair_of(plain=" "), "m+none answers nothing"),
        (pair_of(name="other"), "does not report kjv"),
        (Pair("p", Completion("m+none", "a", {}, {"memory": [REPORT]}, 1.0), pair_of().informed), "nobody had asked for"),
        (Pair("p", pair_of().plain, Completion("m+kjv", "a", {}, {"degraded": True, "memory": [REPORT]}, 1.0)), "rows missing"),
    ],
)
def test_what_is_wrong_with_a_pair_of_answers_is_said(pair: Pair, words: str) -> None:
    assert pair_of().wrong("kjv") == []
    (said,) = pair.wrong("kjv")
    assert words in said


def test_perplexities_are_told_with_their_difference() -> None:
    scores = [Score("", 4, [8.0]), Score("kjv", 4, [7.0]), Score("kjv-shuffled", 4, [8.004])]
    text = rendered(perplexity_view(scores, "±2 %"))
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split() for line in text.splitlines() if line.strip()][3:6] == [
        ["none", "7.39"], ["kjv", "5.75", "-22.1%"], ["kjv-shuffled", "7.40", "+0.1%"],
    ]  # fmt: skip
    note = " ".join(text.split())
    assert "kjv-shuffled: the same rows in each other's places" in note
    assert "within ±2 % of none expected on so few tokens" in note


def test_answers_worker_and_pool_are_held_side_by_side(grow: Any, tmp_path: Path) -> None:
    model: EngramModel = grow(tmp_path / "kjv", "kjv")
    score = Score("kjv", 511, [1.0], {model.version}, {"mapped"}, Counter(tickets=6, tickets_in_time=6, rows_missing=0))
    status = worker_pb2.StatusResponse(engram_models=[worker_pb2.EngramModelStatus(model="kjv", tokens=900, fused=True)])
    resident = ResidentModel(model, model.version, True, 12 << 20, 1, 0.0)
    pair = pair_of(version=model.version)
    served = gathered([pair], {"": Score(""), "kjv": score}, status, [resident], PoolCounters({}, 0, 0))["kjv"]
    assert served.document() == {
        "memory": "kjv", "versions": [model.version], "transports": ["mapped"], "tickets": 10, "tickets_in_time": 9, "rows_missing": 0,
        "shadowed": False, "worker": {"tokens": 900, "rows": 900 * 2 * 4, "fused": True},
        "pool": {"version": model.version, "bytes": 12 << 20, "readers_before": 0, "readers": 1},
    }  # fmt: skip
    assert served.wrong(model.version, "mapped") == []
    assert served.wrong(model.version, "auto") == []
    text = rendered(served_table([served]))
    for cell in (model.version[:12], "mapped", "9 of 10", "900", "7,200", "12.6 MB", "0 → 1"):
        assert cell in text


def test_whatever_does_not_fit_together_is_said() -> None:
    served = Served("kjv", {"b" * 64}, {"rpc"}, Counter(rows_missing=3), shadowed=True)
    said = "\n".join(served.wrong("a" * 64, "mapped"))
    for words in (
        "answers report version",
        "the pool holds version none",
        "by rpc, not by mapped",
        "0 tickets",
        "3 rows",
        "shadowed",
        "counts 0 readers",
    ):
        assert words in said


METRICS = """# HELP treadle_engram_rows_total Rows handed out
treadle_engram_rows_total{transport="rpc"} 7200.0
treadle_engram_fusion_bytes_total 2.364528e+06
"""


def test_the_pools_counters_are_read_from_its_metrics_and_told_as_what_was_added() -> None:
    before, after = PoolCounters.of([], ""), PoolCounters.of([], METRICS)
    assert (before.rows_sent, after.rows_sent) == (0, 7200)
    assert after.since(before) == PoolCounters({}, 7200, 2364528)
    assert "2.4 MB of fusion weights and 7,200 rows over gRPC" in counted_words(after.since(before))
    assert "no row over gRPC, as readers that map read in place" in counted_words(PoolCounters({}, 0, 1))


def test_a_pool_that_has_counted_less_than_was_looked_up_is_a_failure() -> None:
    by_rpc = Served("kjv", transports={"rpc"}, tokens=900, rows_a_token=8)
    assert wrong_counts([by_rpc], PoolCounters({}, 7200, 1)) == []
    assert wrong_counts([Served("kjv", transports={"mapped"}, tokens=900, rows_a_token=8)], PoolCounters({}, 0, 1)) == []
    few, no_weights = wrong_counts([by_rpc], PoolCounters({}, 7199, 0))[::-1]
    assert "sent 7199 rows, the worker looked up 7200" in few
    assert "no fusion weights" in no_weights


def test_the_comparison_has_a_column_for_each_variant_and_fits_the_screen() -> None:
    text = rendered(bench_table(bench_document()))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("baseline") == 4
    assert text.count("0.987x") == 12
    assert "0.950-1.020" in text
    assert "stall" not in text
    assert "prompt" not in text  # the same everywhere
    assert bench_goals(bench_document()) == ["met: mapped: stall share (0.001, goal 0.01)"]


def test_a_quick_comparison_is_told_as_the_impression_that_it_is() -> None:
    document = bench_document() | {"quick": True}
    document["rows"] = [row | {"n": 3, "ratio_ci95": None} for row in document["rows"]]
    document["goals"] += [{"text": "mapped: tokens/s against none", "value": 0.8, "limit": 0.95, "met": False}]
    text = rendered(bench_table(document))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("of 3 rounds") == 12
    assert "95 %" not in text
    impression, *goals = bench_goals(document)
    assert "impression" in impression
    assert goals == ["met: mapped: stall share (0.001, goal 0.01)"]


def test_a_comparison_of_enough_rounds_has_its_interval() -> None:
    document = bench_document()
    document["rows"] = [row | {"n": 8} for row in document["rows"]]
    text = rendered(bench_table(document))
    assert "rounds" not in text
    assert "its 95 % interval" in text


def test_the_demo_shows_answers_perplexities_and_origin_and_leaves_nothing(demo: Any, tmp_path: Path) -> None:
    run = demo("demo", "--bench")
    for words in (f"> {PROMPTS[0]}", f"{PROMPTS[0]} indeed", "-18.1%", "+0.0%", "pool: version", "inference-worker", "0.995x"):
        assert words in run.stdout
    assert "no process and nothing in shared memory is left" in run.stderr
    assert list((tmp_path / "temporary").iterdir()) == []
    assert demo.state() is None  # it has a home of its own


def test_so_few_tokens_that_chance_decides_are_refused_and_help_says_what_is_allowed(demo: Any) -> None:
    assert "4096" in demo("demo", "--tokens", "4095", code=2).stderr
    assert "within ±2 % of none" in " ".join(demo("demo", "--help").stdout.split())


def test_the_json_document_has_everything(demo: Any) -> None:
    document = json.loads(demo("demo", "--json").stdout)
    assert document["ok"] is True
    assert [answer["prompt"] for answer in document["answers"]] == list(PROMPTS)
    kjv, shuffled = document["served"]
    assert kjv["versions"] == [document["memory"]["version"]] == [kjv["pool"]["version"]]
    assert shuffled["memory"] == "kjv-shuffled"
    assert shuffled["versions"] != kjv["versions"]
    assert document["perplexity"]["with"]["perplexity"] < document["perplexity"]["without"]["perplexity"]
    assert document["perplexity"]["shuffled"]["tokens"] == 16 * 255
    assert set(document["processes"]) == {"engram-pool", "asm-store", "inference-worker", "inference-gateway"}
    assert document["bench"] == {}


def test_a_memory_that_changes_nothing_or_wrong_rows_that_do_are_failures(demo: Any) -> None:
    demo.extra["FAKE_NATS"] = json.dumps({"kjv": -0.05, "kjv-shuffled": 0.05})
    run = demo("demo", "--json", code=1)
    failures = "\n".join(json.loads(run.stdout)["failures"])
    for words in ("with the memory is 0.951x", "with shuffled rows is 1.051x of that without it; within ±2 % was expected"):
        assert words in failures
        assert words in run.stderr


def test_whatever_goes_wrong_is_a_failure_in_the_json_document_and_the_fabric_still_goes(demo: Any) -> None:
    demo.extra |= {"FAKE_ANSWER": "", "FAKE_MISSING": "5", "FAKE_WEIGHTS": "0"}
    (demo.packages / "treadle_fakes-9.9.dist-info" / "entry_points.txt").write_text(
        "[treadle.commands]\nmodel = fake_fabric:model_app\npool = fake_fabric:pool_app\nbench = no_such_module:app\n"
    )
    run = demo("demo", "--json", "--bench", code=1)
    document = json.loads(run.stdout)
    assert document["ok"] is False
    failures = "\n".join(document["failures"])
    for words in ("answers nothing", "kjv: 80 rows never came", "no fusion weights", "bench failed", "no_such_module"):
        assert words in failures
        assert words in run.stderr
    assert "logs are kept in" in run.stderr
    assert "nothing in shared memory is left" in run.stderr


def test_shared_memory_that_stays_is_a_failure_and_is_named(demo: Any) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="psm_treadle_test_") as shared:
        shared.write(b"rows")
        shared.flush()
        demo.extra["FAKE_SHARED"] = shared.name
        run = demo("demo", "--json", code=1)
    assert f"{shared.name} is still there" in json.loads(run.stdout)["failures"]
    assert "nothing in shared memory is left" not in run.stderr


def test_a_model_that_the_memory_was_not_made_for_has_no_demo(demo: Any) -> None:
    (demo.home / "model" / "config.json").write_text('{"num_hidden_layers": 32, "hidden_size": 960}')
    assert "kjv was made for fake-135m (30 layers of 576), model has 32 of 960" in demo("demo", code=1).stderr
