"""Each peer fetches the table's rows, or says why it cannot; one whose rows are wrong is found out."""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from treadle.client.engram import EngramPool
from treadle.contract import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from treadle_bench.peers import mooncake_store, process, redis
from treadle_bench.peers.engramdb import engramdb_fetcher
from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.layouts import LAYOUTS
from treadle_bench.peers.measuring import PEERS, Extent, held_table
from treadle_bench.peers.peer import Call, Held, Peer
from treadle_bench.peers.process import ProcessFetcher, TableFile, process_fetcher

TINY = Extent(tokens=(1, 5), copied_rows=3000, table_bytes_max=2_000_000)
V41 = next(layout for layout in LAYOUTS if layout.model == "V4.1")


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with held_table(V41, TINY) as table:
        yield table


def left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("treadle-bench-peer*")}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_fetches_the_table_s_rows_and_leaves_nothing_behind(peer: Peer, held: Held) -> None:
    before, mine = left_behind(), {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        with peer.open(held) as fetchers:
            for fetcher in fetchers:
                ids = held.id_sets(fetcher.table_rows)
                for first, tokens in ((0, 1), (7, 5), (0, 300)):
                    assert fetcher.fetches_rightly(ids, first, tokens), fetcher.name
                    assert fetcher.microseconds(ids, first, tokens) > 0
            started = [child for child in psutil.Process().children(recursive=True) if child.pid not in mine]
    except (InvalidArgument, NotFound, ResourceExhausted, Unavailable) as error:
        pytest.skip(f"{peer.name} cannot run here: {error}. To have it: {peer.get}")
    assert fetchers
    assert bool(started) != peer.in_process
    psutil.wait_procs(started, timeout=10)
    assert not [child for child in started if child.is_running()]
    assert left_behind() == before


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
def test_a_layout_is_held_as_its_name_says(layout: object) -> None:
    chosen = next(each for each in LAYOUTS if each is layout)
    template = chosen.template(None)
    assert template.columns == chosen.columns
    assert chosen.name == f"{template.columns}x{template.row.bytes}"
    assert template.rows_hashed(0) / chosen.rows == pytest.approx(chosen.share, rel=0.01)
    assert chosen.template(10_000_000).rows_hashed(0) * chosen.row.bytes < 11_000_000


def test_ids_of_a_column_lie_in_the_range_of_its_head() -> None:
    ids = IdSets.uniform(1000, 8, 500)
    assert ids.sets(100) == 5
    assert (ids.rows(100, 50) // 125 == np.arange(8)).all()
    with pytest.raises(InvalidArgument, match="no 8 heads"):
        IdSets.uniform(7, 8, 1)


def test_wrong_rows_are_found_out_here_and_in_another_process(held: Held, tmp_path: Path) -> None:
    ids = held.id_sets(len(held.table))
    off_by_one = Call("off", held, lambda rows, _: held.table[rows - 1])
    untouched = Call("lazy", held, lambda rows, out: None)
    assert not off_by_one.fetches_rightly(ids, 0, 5)
    assert not untouched.fetches_rightly(ids, 0, 5)
    with scripted(
        tmp_path, "from answering import answer, task\nanswer(task(), list, lambda ids: bytes(264 * len(ids)))", held
    ) as zeros:
        assert zeros.microseconds(ids, 0, 5) > 0
        assert not zeros.fetches_rightly(ids, 0, 5)


def test_engramdb_reads_a_file_from_its_first_byte(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_bytes(np.random.default_rng(0).bytes(1000 * 320 + 7))
    ids = IdSets(np.random.default_rng(1).integers(0, 1000, (150, 1)))
    try:
        with engramdb_fetcher(TableFile(table, 0, 1000, 320), ids) as fetcher:
            assert fetcher.microseconds(ids, 0, 50) > 0
            assert fetcher.fetches_rightly(ids, 50, 100)
    except Unavailable as error:
        pytest.skip(f"engramdb-python cannot be installed or run here: {error}")


def test_a_peer_that_dies_or_hangs_is_unavailable_with_its_last_words(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = held.id_sets(len(held.table))
    with (
        pytest.raises(Unavailable, match="its process ended: no table today"),
        scripted(tmp_path, "raise SystemExit('no table today')", held),
    ):
        pass
    dies = "from answering import answer, task\ndef fetch(ids):\n    raise SystemExit('out of rows')\nanswer(task(), list, fetch)"
    with scripted(tmp_path, dies, held) as fetcher:
        for _ in range(2):
            with pytest.raises(Unavailable, match="out of rows"):
                fetcher.microseconds(ids, 0, 1)
    monkeypatch.setattr(process, "ANSWER_SECONDS_MAX", 0.2)
    monkeypatch.setattr(process, "END_SECONDS_MAX", 0.2)
    hangs = "import signal\nprint('ready', flush=True)\nsignal.pause()"
    begun = time.monotonic()
    with scripted(tmp_path, hangs, held) as fetcher, pytest.raises(Unavailable, match="gave no answer within 0 s"):
        fetcher.microseconds(ids, 0, 1)
    assert time.monotonic() - begun < 10


def test_a_server_that_listens_to_all_runs_in_a_network_of_its_own_or_not_at_all(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees = "raise SystemExit(open('/proc/net/dev').read())"
    with pytest.raises(Unavailable) as raised, scripted(tmp_path, sees, held, own_network=True):
        pass
    if "network of its own only" in str(raised.value):
        pytest.skip(f"no network namespaces here, which need root or user namespaces: {raised.value}")
    assert set(re.findall(r"(\w+):", str(raised.value).partition("ended: ")[2])) == {"lo"}
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with (
        pytest.raises(Unavailable, match="listens on all addresses without a key"),
        scripted(tmp_path, sees, held, own_network=True),
    ):
        pass


def test_what_is_missing_is_said(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="no EngramStore here"), mooncake_store.PEER.open(held):
        pass
    assert "libibverbs1" in mooncake_store.PEER.get
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(Unavailable, match="no redis-server is on PATH"), redis.PEER.open(held):
        pass
    assert redis.PEER.get == "apt-get install redis-server"


def test_a_transport_that_the_pool_does_not_offer_is_refused_by_name(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_door(*_: object, **__: object) -> None:
        raise InvalidArgument("transport: no such door")

    monkeypatch.setattr(EngramPool, "open", no_door)
    with pytest.raises(InvalidArgument, match="no such door"), PEERS[0].open(held):
        pass


def test_a_table_without_room_is_refused_before_it_is_made() -> None:
    with pytest.raises(ResourceExhausted, match="of memory and /dev/shm"), held_table(replace(V41, share=1.0), Extent()):
        pass


@contextmanager
def scripted(folder: Path, text: str, held: Held, own_network: bool = False) -> Iterator[ProcessFetcher]:
    """A peer whose script is `text`, beside the scripts of the real ones."""
    scripts = folder / "scripts"
    shutil.copytree(process.SCRIPTS, scripts, dirs_exist_ok=True)
    (scripts / "made_up.py").write_text(text)
    table = TableFile(held.path, held.offset_bytes, len(held.table), held.layout.row.bytes)
    with process_fetcher(
        "made up", str(scripts / "made_up.py"), Path(sys.executable), table, ids=held.id_sets(len(held.table)), truth=held.table,
        own_network=own_network,
    ) as fetcher:  # fmt: skip
        yield fetcher
