"""`treadle plan`: the CXL paper's numbers come out of it, and so do those of the models that people run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treadle.cli.main import OWN, build_app
from treadle.cli.plan.cost import Prices, break_even, cost_of
from treadle.cli.plan.demand import Workload, demands
from treadle.cli.plan.fabric import estimates, read_bench
from treadle.cli.plan.models import KNOWN, known_model, manifest_model
from treadle.cli.plan.placement import Room, placements
from treadle.contract import InvalidArgument, NotFound, RowLayout, Table
from treadle.contract.errors import TreadleError
from treadle.contract.families import qwen_ple_model

CASE_STUDY = Workload(hosts=1, batch=256, step_seconds=0.0036, tokens_second=70_000)  # Table 1 of the paper
MAP = "ab" * 32


def run(*words: str | Path, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(build_app("plan", {}), ["plan", *map(str, words)])
    if isinstance(result.exception, TreadleError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def planned(*words: str | Path) -> Any:
    return json.loads(run(*words, "--json"))


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Figures as `treadle bench gather --json` writes them."""
    rows = [
        row("mapped 2MiB", 191.0, 220.0), row("mapped 2MiB", 12.0, 15.0, tokens=16), row("mapped 4KiB", 310.0, 900.0),
        row("listing1 4KiB", 367.0, 881.0), row("mapped 2MiB", 300.0, 350.0, rows="24x264"), row("mapped 2MiB", 9.0, 9.0, unit="ns"),
        {"name": "socket", "params": {"tokens": 256, "rows_per_token": 16, "row_bytes": 320, "pages": "2MiB", "threads": 2},
         "unit": "ms", "median": 0.4, "p99": None},
        {"name": "mapped", "params": {"tokens": 0}}, "nonsense",
    ]  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": {"cpu": "Loom 9000", "cores": 2}, "rows": rows}))
    return path


def row(name: str, median: float, p99: float, *, tokens: int = 256, rows: str = "16x320", unit: str = "us") -> dict[str, Any]:
    params = {"rows": rows, "tokens": tokens, "threads": 1}
    return {"name": name, "params": params, "unit": unit, "median": median, "p99": p99, "n": 100, "baseline": None, "ratio": None}


TABLE_5 = [
    ("100b", 2, 6_000, 9_820, -3_820), ("100b", 4, 12_000, 10_840, 1_160), ("100b", 8, 24_000, 12_880, 11_120),
    ("100b", 16, 48_000, 16_960, 31_040), ("400b", 2, 24_000, 18_820, 5_180), ("400b", 4, 48_000, 19_840, 28_160),
    ("400b", 8, 96_000, 21_880, 74_120), ("400b", 16, 192_000, 25_960, 166_040),
]  # fmt: skip


@pytest.mark.parametrize(("model", "hosts", "local", "pool", "saving"), TABLE_5)
def test_table_5_of_the_paper_comes_out_exactly(model: str, hosts: int, local: float, pool: float, saving: float) -> None:
    cost = cost_of(known_model(model).table_bytes, hosts, Prices())
    assert (cost.local, cost.pool, cost.saving, cost.switches) == (local, pool, saving, 1)
    text = run(model, "--hosts", str(hosts))
    assert re.search(
        rf"^\s+{hosts}\s+\${local:,}\s+\${pool:,}\s+{'-' if saving < 0 else ''}\${abs(saving):,}\s*$", text, re.MULTILINE
    )


def test_the_pool_pays_back_from_as_many_hosts_as_the_paper_says() -> None:
    assert [break_even(known_model(model).table_bytes, Prices()) for model in ("100b", "400b")] == [4, 2]
    assert break_even(known_model("100b").table_bytes, Prices(dram_gb=0.0)) is None
    assert "never pays back" in run("100b", "--dram-price", "0")


def test_hosts_beyond_the_ports_of_a_switch_take_another_one() -> None:
    assert [cost_of(10**9, hosts, Prices()).switches for hosts in (1, 16, 17, 33)] == [1, 1, 2, 3]
    assert "take another switch" in run("100b", "--hosts", "17")
    assert "take another switch" not in run("100b", "--hosts", "16")


def test_prices_are_options() -> None:
    options = ("--dram-price", "10", "--switch-price", "1000", "--adapter-price", "20", "--controller-price", "30")
    (cost,) = [cost for cost in planned("100b", "--hosts", "3", *options)["cost"]["rows"] if cost["hosts"] == 3]
    assert (cost["local"], cost["pool"], cost["saving"]) == (6_000, 2_000 + 1_000 + 150, 2_850)


def test_the_case_study_of_the_paper_comes_out_of_its_two_inequalities() -> None:
    wide, narrow = demands(known_model("27b"), CASE_STUDY)
    assert wide.average_bytes_second == 70_000 * 5_120 * 2  # "0.7 GB/s"
    first, last = wide.layers
    assert first.window_seconds == pytest.approx(56.25e-6)  # "about 56 us": one of 64 layers runs before k = 2
    assert last.window_seconds == pytest.approx(14 * 56.25e-6)
    assert first.payload_bytes == 256 * 5_120
    assert first.bytes_second == pytest.approx(23.3e9, rel=0.01)
    assert narrow.average_bytes_second == wide.average_bytes_second / 2


def test_both_readings_of_the_papers_layout_are_named_and_hold_the_same_bytes() -> None:
    for model, parameters in (("27b", 5.7e9), ("40b", 18.5e9), ("100b", 100e9), ("400b", 400e9)):
        wide, narrow = known_model(model).readings
        assert wide.table_bytes == narrow.table_bytes == pytest.approx(2 * parameters, rel=0.02)
        assert [layer.token_bytes for layer in (wide.layers[0], narrow.layers[0])] == [5_120, 2_560]
    assert [layer.rows for layer in known_model("27b").readings[0].layers] == [16 * 1_131_200] * 2
    assert [layer.rows for layer in known_model("27b").readings[1].layers] == [16 * 2_262_400] * 2
    text = " ".join(run("27b").split())
    assert "16 x 320 B: 5 KB a token and layer: section 3.1" in text
    assert "16 x 160 B: 2.5 KB a token and layer: section 3.3" in text


def test_models_that_people_run_have_the_sizes_of_their_checkpoints() -> None:
    v41 = known_model("v4.1")
    assert [layer.rows for layer in v41.readings[0].layers] == [384_006_168, 384_016_682]
    assert v41.table_bytes == (384_006_168 + 384_016_682) * 264
    sizes = [known_model(f"qwen-ple{kind}").table_bytes for kind in ("", "-bf16", "-nf4")]
    assert sizes == [320_001_536 * row_bytes for row_bytes in (160, 320, 84)]
    (layer,) = known_model("qwen-ple").readings[0].layers
    assert (layer.index, layer.token_bytes) == (1, 2_560)


def test_throughput_is_that_of_all_hosts_unless_it_is_given() -> None:
    assert Workload(hosts=4, batch=100, step_seconds=0.01).throughput == 40_000
    assert planned("27b", "--hosts", "4")["workload"]["tokens_second"] == pytest.approx(4 * 256 / 0.0036)
    assert planned("27b", "--throughput", "70000")["demands"][0]["average_bytes_second"] == pytest.approx(716.8e6)


def test_a_manifest_is_planned_for_by_its_own_numbers(tmp_path: Path) -> None:
    model = qwen_ple_model("mine", layers=(0, 3), prime_base=1000, row=RowLayout(320, 160, "bf16"))
    path = tmp_path / "model.json"
    path.write_bytes(model.to_json())
    template = manifest_model(path, 12)
    assert template.table_bytes == sum(model.rows_hashed(layer) for layer in (0, 3)) * 320
    loaded = model.with_tables({0: Table(20_000, MAP), 3: Table(30_000, MAP)})
    path.write_bytes(loaded.to_json())
    made = planned("--manifest", path, "--decoder-layers", "12", "--step-ms", "12")
    assert made["model"]["table_bytes"] == 50_000 * 320
    at_once, later = made["demands"][0]["layers"]
    assert (at_once["window_seconds"], at_once["window_bytes_second"]) == (0.0, None)  # nothing runs before layer 0
    assert later["window_seconds"] == pytest.approx(0.003)
    assert "no window" in run("--manifest", path, "--decoder-layers", "12")
    with pytest.raises(InvalidArgument, match="--decoder-layers"):
        run("--manifest", path)
    with pytest.raises(InvalidArgument, match="deepest Engram layer of mine is 3"):
        run("--manifest", path, "--decoder-layers", "3")


def test_what_this_fabric_gives_comes_from_a_bench_file(bench: Path) -> None:
    (wide, _) = demands(known_model("27b"), CASE_STUDY)
    made = {(each.way, each.layer): each for each in estimates(read_bench(bench), wide)}
    assert set(made) == {(way, layer) for way in ("mapped 2MiB", "mapped 4KiB", "socket 2MiB 2 threads") for layer in (1, 14)}
    first, last = made["mapped 2MiB", 1], made["mapped 2MiB", 14]
    assert (first.takes_us, first.finishes_us, first.in_time) == (191.0, 191.0, False)
    assert (last.takes_us, last.finishes_us, last.in_time, last.in_time_p99) == (191.0, 382.0, True, True)
    assert first.bytes_second == pytest.approx(256 * 5_120 / 191e-6)
    slow = made["mapped 4KiB", 14]
    assert (slow.in_time, slow.in_time_p99) == (True, False)
    assert made["socket 2MiB 2 threads", 1].takes_us == 400.0


def test_a_time_is_carried_over_by_rows_from_the_nearest_layout(bench: Path) -> None:
    (v41,) = demands(known_model("v4.1"), Workload(batch=512))
    first = next(each for each in estimates(read_bench(bench), v41) if each.way == "mapped 2MiB")
    assert (first.measured.row_bytes, first.takes_us) == (264, 600.0)
    wider = next(each for each in estimates(read_bench(bench), v41) if each.way == "mapped 4KiB")
    assert wider.takes_us == pytest.approx(310 * 512 * 24 / (256 * 16))  # smaller rows are not held to be faster
    few = demands(known_model("27b"), Workload(batch=16))[0]
    assert estimates(read_bench(bench), few)[0].takes_us == 12.0


def test_without_a_bench_file_the_plan_says_so(bench: Path) -> None:
    assert "not measured: give --bench FILE" in run("27b")
    assert planned("27b")["fabric"] == []
    text = run("27b", "--bench", bench)
    assert "Loom 9000" in text
    assert "not measured" not in text
    (one,) = planned("27b", "--bench", bench)["fabric"]
    assert {each["reading"] for each in one["estimates"]} == {"16 x 320 B", "16 x 160 B"}


def test_several_bench_files_are_told_one_after_the_other(bench: Path, tmp_path: Path) -> None:
    other = tmp_path / "remote.json"
    other.write_text(json.dumps({"machine": {"cpu": "Shuttle", "cores": 64}, "rows": [row("socket", 400.0, 500.0)]}))
    first, second = planned("v4.1", "--bench", bench, "--bench", other)["fabric"]
    assert ("Loom 9000" in first["machine"], second["machine"]) == (True, "Shuttle, 64 cores")
    assert {each["way"] for each in second["estimates"]} == {"socket"}
    text = " ".join(run("v4.1", "--bench", bench, "--bench", other).split())  # where lines break depends on the length of a path
    assert text.index("Loom 9000") < text.index("Shuttle, 64 cores")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"), ("[]", "no list of rows"), ('{"rows": 7}', "no list of rows"), ('{"rows": []}', "none of them a gather"),
        (json.dumps({"rows": [row("listing1 4KiB", 1.0, 1.0)]}), "holds 1 rows, none of them a gather"),
        (json.dumps({"rows": [row("mapped", float("nan"), 1.0)]}), "none of them"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_figures_of_ours_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=says):
        run("27b", "--bench", path)


def test_what_fits_where_is_said_for_each_place() -> None:
    whole, spread, pool = placements(200 * 10**9, 4, Room(host_bytes=100e9, pool_bytes=256e9))
    assert [(place.needed_bytes, place.fits) for place in (whole, spread, pool)] == [
        (200 * 10**9, False), (50 * 10**9, True), (200 * 10**9, True),
    ]  # fmt: skip
    twice = placements(200 * 10**9, 4, Room(host_bytes=99e9, replicas=2))[1]
    assert (twice.needed_bytes, twice.fits) == (100 * 10**9, False)
    fits = planned("400b", "--hosts", "2", "--host-memory-gb", "500", "--pool-gb", "256", "--replicas", "1")["placements"]
    assert [place["fits"] for place in fits] == [False, True, False]
    with pytest.raises(InvalidArgument, match="at most one a host"):
        run("27b", "--replicas", "2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give a model"), (("27b", "--manifest", "x"), "give a model"), (("13b",), "no model '13b' to plan for; there are 27b, 40b"),
        (("27b", "--hosts", "0"), "1 to 4096 hosts"), (("27b", "--batch", "0"), "batch of 1 to"), (("27b", "--step-ms", "0"), "step: above 0"),
        (("27b", "--step-ms", "nan"), "step: above 0"), (("27b", "--throughput", "-1"), "throughput: above 0"),
        (("27b", "--dram-price", "-1"), "price of dram_gb"), (("27b", "--pool-gb", "nan"), "room: bytes"),
        (("27b", "--decoder-layers", "14"), "decoder layers: 15 to 1024"),
    ],
)  # fmt: skip
def test_words_that_make_no_plan_are_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        run(*words)


def test_files_that_are_not_there_are_not_found() -> None:
    for words in (("27b", "--bench", "/nowhere.json"), ("--manifest", "/nowhere.json")):
        with pytest.raises(NotFound, match=r"/nowhere\.json cannot be read"):
            run(*words)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_figure_is_cut_at_any_width(bench: Path, columns: int) -> None:
    for model in KNOWN:
        text = run(model, "--hosts", "16", "--bench", bench, columns=columns)
        assert "…" not in text


def test_the_command_lists_every_model_it_knows() -> None:
    assert "plan" in OWN
    text = CliRunner().invoke(build_app("plan", {}), ["plan", "--help"]).stdout
    assert ",".join(KNOWN) in "".join(text.split())  # folded anywhere
