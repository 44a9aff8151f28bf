"""What `treadle bench peers` makes of its peers: figures, notes, tables, a plot. The peers here are small functions over a real table."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from treadle.cli.plan.fabric import read_bench
from treadle.contract import DataLoss, InvalidArgument, ResourceExhausted, Unavailable
from treadle_bench.commands import app
from treadle_bench.peers import measuring
from treadle_bench.peers.figure import by_model, check_plot, plot, tables
from treadle_bench.peers.layouts import LAYOUTS, Layout
from treadle_bench.peers.measuring import OURS, Extent, chosen_peers, measure
from treadle_bench.peers.numpy_rows import TAKE
from treadle_bench.peers.peer import Call, Fetcher, Held, Peer
from treadle_bench.report import Row, document

TINY = Extent((LAYOUTS[0],), (1, 4), 0.01, 0.01, 0.0, copied_rows=3000, table_bytes_max=2_000_000)
Act = Callable[[Held, NDArray[np.int64], NDArray[np.uint8]], object]


def peer_of(name: str, act: Act, *, in_process: bool = True) -> Peer:
    @contextmanager
    def opened(held: Held) -> Iterator[Sequence[Fetcher]]:
        yield [Call(name, held, lambda ids, out: act(held, ids, out))]

    return Peer(name, "pip install it", opened, in_process=in_process)


def right(held: Held, ids: NDArray[np.int64], _: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return held.table[ids]


def wrong(held: Held, ids: NDArray[np.int64], _: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return held.table[ids - 1]


@pytest.fixture
def no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in this process, where what becomes of the figures is looked at and not how they come."""

    @contextmanager
    def held_table(layout: Layout, _: Extent) -> Iterator[Held]:
        rows = np.random.default_rng(0).integers(0, 256, (3000, layout.row.bytes), dtype=np.uint8)
        yield Held(layout, rows, Path("none"), 0, "none", "none", 3000, "4KiB")

    monkeypatch.setattr(measuring, "held_table", held_table)


def missing(_: Held) -> AbstractContextManager[Sequence[Fetcher]]:
    raise Unavailable("no such library")


@pytest.mark.usefixtures("no_pool")
def test_every_figure_has_its_own_baseline_from_the_same_turns() -> None:
    found = measure(TINY, [peer_of("here", right), peer_of("apart", right, in_process=False)])
    assert [(row.name, row.params["tokens"]) for row in found.rows] == [
        (name, tokens) for name in ("here", "apart") for tokens in TINY.tokens for name in (TAKE, name)
    ]
    for row in found.rows:
        assert row.params["rows"] == "16x320"
        assert row.params["model"] == "27B"
        assert row.params["pages"] == "4KiB"
        assert row.n >= measuring.ROUNDS_MIN
        assert row.baseline == (None if row.name == TAKE else TAKE)
    assert not found.notes


@pytest.mark.usefixtures("no_pool")
def test_a_peer_with_wrong_rows_is_not_timed_and_ours_end_the_run() -> None:
    found = measure(TINY, [peer_of("bad", wrong), peer_of("good", right)])
    assert {row.name for row in found.rows} == {TAKE, "good"}
    assert any("bad, 27B, 1 tokens: it gives WRONG ROWS" in note for note in found.notes)
    with pytest.raises(DataLoss, match="mapped: wrong rows of 27B"):
        measure(TINY, [peer_of("mapped", wrong)])


@pytest.mark.usefixtures("no_pool")
def test_a_missing_peer_is_named_once_with_how_to_get_it() -> None:
    two = replace(TINY, layouts=LAYOUTS[:2])
    found = measure(two, [Peer("lost", "apt-get install lost", missing), peer_of("good", right)])
    assert found.notes == ["skipped: lost: no such library. To have it: apt-get install lost"]
    assert {row.params["model"] for row in found.rows} == {"27B", "40B"}


@pytest.mark.usefixtures("no_pool")
def test_a_peer_that_breaks_ends_its_own_turns_only() -> None:
    def breaks(held: Held, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if len(ids) > 1:
            raise Unavailable("its server is gone")
        return right(held, ids, out)

    found = measure(TINY, [peer_of("frail", breaks, in_process=False), peer_of("good", right, in_process=False)])
    assert {(row.name, row.params["tokens"]) for row in found.rows if row.name != TAKE} == {("frail", 1), ("good", 1), ("good", 4)}
    assert any("its server is gone" in note for note in found.notes)


@pytest.mark.usefixtures("no_pool")
def test_a_peer_whose_buffer_is_not_given_is_left_out_and_the_others_go_on() -> None:
    def none_left(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        raise ResourceExhausted(f"no room for {shape}")

    @contextmanager
    def opened(held: Held) -> Iterator[Sequence[Fetcher]]:
        yield [Call("ring", held, lambda ids, out: right(held, ids, out), buffer=none_left)]

    for extent, said in (
        (TINY, "27B, 1 tokens: no room for (1, 16, 320)"),
        (replace(TINY, settle_seconds=0.01), "27B: no room for (64, 16, 320)"),
    ):
        found = measure(extent, [Peer("ring", "a larger ring", opened, in_process=True), peer_of("good", right)])
        assert {row.name for row in found.rows} == {TAKE, "good"}
        assert found.notes == [f"not timed: ring, {said}"]


@pytest.mark.usefixtures("no_pool")
def test_a_slow_peer_is_not_asked_for_more_and_time_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FETCH_SECONDS_MAX", 0.0)
    found = measure(TINY, [peer_of("slow", right)])
    assert {row.params["tokens"] for row in found.rows} == {1}
    assert any("slow, 27B: takes 0.0 s for 1 tokens, so it was not asked for more" in note for note in found.notes)
    over = measure(replace(TINY, run_seconds_max=0.0), [peer_of("here", right), peer_of("apart", right, in_process=False)])
    assert not over.rows
    assert {note.split(":")[1] for note in over.notes} == {" calls in this process, 27B, 1 tokens and more", " apart, 27B"}


def test_only_names_peers_and_a_wrong_name_lists_them() -> None:
    assert [peer.name for peer in chosen_peers(["redis", "mapped"])] == ["mapped", "redis"]
    assert chosen_peers([]) == measuring.PEERS
    with pytest.raises(InvalidArgument, match=r"no peer.*memcached.*there are .*mapped.*redis"):
        chosen_peers(["memcached"])


def row(name: str, tokens: int, us: float, model: str = "27B", **params: Any) -> Row:
    return Row(
        name, {"model": model, "rows": "16x320", "tokens": tokens, **params}, "us", us, us, 9, None if name == TAKE else TAKE, 1.0
    )


ROWS = [
    row(TAKE, 1, 10.0), row("mapped", 1, 5.0, pages="4KiB"), row(TAKE, 64, 100.0), row("mapped", 64, 50.0, pages="4KiB"),
    row(TAKE, 1, 999.0, beside="redis"), row("redis MGET", 1, 60.0, beside="redis"),
]  # fmt: skip


def test_a_table_has_a_line_for_each_peer_the_fastest_first() -> None:
    assert by_model(ROWS) == {"27B": {TAKE: {1: 10.0, 64: 100.0}, "mapped": {1: 5.0, 64: 50.0}, "redis MGET": {1: 60.0}}}
    (title, table), *others = tables(ROWS, OURS).items()
    assert not others
    assert title == "27B (16x320), Figures 3 and 5: us, median"
    assert [list(column.cells) for column in table.columns] == [
        ["mapped", TAKE, "redis MGET"], ["5.000", "10.0", "60.0"], ["50.0", "100.0", ""],
    ]  # fmt: skip


@pytest.mark.parametrize(("ending", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_plot_is_written_without_a_display(ending: str, begin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    path = tmp_path / f"peers.{ending}"
    check_plot(path)
    plot(ROWS, OURS, path)
    assert path.read_bytes().startswith(begin)


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match=r"ends in \.svg or \.png"):
        check_plot(tmp_path / "peers.gif")
    with pytest.raises(InvalidArgument, match="there is no folder"):
        check_plot(tmp_path / "no" / "peers.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="pip install matplotlib"):
        check_plot(tmp_path / "peers.svg")


def test_a_plan_reads_the_rows_that_are_ours(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(document(ROWS, [])))
    measured = read_bench(file).measurements
    assert [(one.tokens, one.rows_per_token, one.row_bytes, one.median_us) for one in measured] == [
        (1, 16, 320, 5.0),
        (64, 16, 320, 50.0),
    ]


def test_the_command_prints_json_a_plot_and_the_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle_bench.peers.command.QUICK", TINY)
    words = ["peers", "--quick", "--only", "mapped", "--only", "rpc"]
    said = CliRunner().invoke(app, [*words, "--json", "--plot", str(tmp_path / "peers.svg")])
    assert said.exit_code == 0, said.output
    measured = json.loads(said.stdout)
    assert {each["name"] for each in measured["rows"]} == {TAKE, "mapped", "rpc"}
    assert measured["quick"]
    assert (tmp_path / "peers.svg").stat().st_size > 1000
    table = CliRunner().invoke(app, words)
    assert "27B (16x320), Figures 3 and 5: us, median" in table.stdout
    monkeypatch.setattr("treadle_bench.peers.command.QUICK", replace(TINY, run_seconds_max=0.0))
    nothing = CliRunner().invoke(app, words)
    assert nothing.exit_code == 1
    assert "the table's share of the run's time is over" in nothing.stdout.replace("\n", " ")
