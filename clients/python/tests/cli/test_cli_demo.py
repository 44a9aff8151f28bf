"""The demo on fake services, and its tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from treadle.cli.demo_report import bench_goals, bench_table, engram_figures, engram_table, fusion_words
from treadle.inference.v1 import worker_pb2


def rendered(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def status_of(**fields: Any) -> worker_pb2.StatusResponse:
    layer = worker_pb2.EngramLayerStatus(
        layer=15, tickets=1000, tickets_in_time=999, gather_seconds_p50=6e-5, gather_seconds_p99=0.0012, slack_seconds_p50=0.0183,
        slack_seconds_p01=-0.0001, stall_seconds=0.02, row_bytes=3 << 20,
    )  # fmt: skip
    return worker_pb2.StatusResponse(engram_model="smollm2-demo", engram_transport="mapped", engram_layers=[layer], **fields)


def bench_document() -> dict[str, Any]:
    rows = [
        {"name": name, "params": {"phase": phase, "batch": batch, "prompt": 128}, "unit": "tok/s", "median": 1234.5,
         "ratio": None if name == "local" else 0.987, "ratio_ci95": None if name == "local" else [0.95, 1.02]}
        for phase in ("prefill", "decode") for batch in (1, 16) for name in ("no engram", "local", "mapped", "rpc")
    ]  # fmt: skip
    stall = {"name": "stall, mapped", "params": {"tickets": 5}, "unit": "us", "median": 0.0}
    goals = [{"text": "mapped: stall share", "value": 0.001, "limit": 0.01, "met": True}]
    return {"command": "treadle bench chat", "machine": {"cpu": "Loom 9000"}, "rows": [*rows, stall], "goals": goals}


def test_each_layer_is_told_with_its_tickets_and_times() -> None:
    text = rendered(engram_table(engram_figures(status_of(steps=1000, step_seconds=10.0))))
    for cell in ("layer 15", "60 µs / 1.20 ms", "18.30 ms / -100 µs", "1,000", "99.90%", "0.200%", "3.00 MiB"):
        assert cell in text


def test_a_worker_that_has_done_nothing_yet_has_figures_too() -> None:
    figures = engram_figures(worker_pb2.StatusResponse(engram_layers=[worker_pb2.EngramLayerStatus(layer=2)]))
    assert figures["layers"][0]["stall_share"] == 0.0
    assert "0.00%" in rendered(engram_table(figures))


def test_what_became_of_the_random_rows_is_said() -> None:
    assert "nothing is added" in fusion_words({"fused": False})
    assert "change the answers" in fusion_words({"fused": True})


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


def test_the_demo_shows_answers_and_figures_and_leaves_nothing(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    cli.extra["TMPDIR"] = str(tmp_path / "temporary")
    run = cli("demo")
    for words in (
        "> What is the capital of France?",
        "What is the capital of France? indeed",
        "layer 15",
        "nothing is added",
        "0.995x",
    ):
        assert words in run.stdout
    assert "no process and nothing in shared memory is left" in run.stderr
    assert list((tmp_path / "temporary").iterdir()) == []
    assert cli.state() is None  # it has a home of its own


def test_whatever_goes_wrong_is_a_failure_in_the_json_document_and_the_fabric_still_goes(cli: Any, tmp_path: Path) -> None:
    cli.extra |= {"FAKE_ANSWER": "", "FAKE_TICKETS": "0", "TMPDIR": str(tmp_path)}
    (cli.packages / "treadle_fakes-9.9.dist-info" / "entry_points.txt").write_text(
        "[treadle.commands]\nmodel = fake_fabric:model_app\npool = fake_fabric:pool_app\nbench = no_such_module:app\n"
    )
    run = cli("demo", "--json", code=1)
    document = json.loads(run.stdout)
    assert document["ok"] is False
    assert [len(document["answers"]), len(document["engram"]["layers"])] == [3, 2]
    failures = "\n".join(document["failures"])
    for words in ("is empty", "layer 2: 0 tickets", "bench failed", "no_such_module"):
        assert words in failures
        assert words in run.stderr
    assert "logs are kept in" in run.stderr
    assert "nothing in shared memory is left" in run.stderr
