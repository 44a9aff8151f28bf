"""Versions pushed into a real Mooncake Store and pulled out of it: one master, two store nodes, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from engram_pool.commands import app
from treadle.client.engram.mooncake_store import SegmentStore, manifest_key, part_key
from treadle.contract import (
    DataLoss,
    EngramModel,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RowLayout,
    TreadleError,
    Unavailable,
)
from treadle.contract.families import qwen_ple_model

if TYPE_CHECKING:
    from tests.conftest import Grow, Process, StartPool

PART = 64 << 20
START_SECONDS_MAX = 30.0


@dataclass
class Store:
    """A store: its master, and its nodes, by pid."""

    master: str
    metrics: str
    nodes: list[subprocess.Popen[bytes]]


@contextmanager
def store_of(folder: Path, first_port: int, nodes: int, node_bytes: str) -> Iterator[Store]:
    """Start a master and its nodes; all ended by pid."""
    where = Path(sys.executable).parent
    with ExitStack() as stack:

        def start(name: str, program: str, *flags: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen([str(where / program), *flags], stdout=log, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
            return process

        master, metrics = f"127.0.0.1:{first_port}", f"127.0.0.1:{first_port + 1}"
        start("master", "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={first_port}", "--metrics_host=127.0.0.1",
              f"--metrics_port={first_port + 1}", "--default_kv_lease_ttl=1000", "--client_ttl=3")  # fmt: skip
        wait_for(lambda: answers(f"http://{metrics}/health"), "the master is up")
        each = [
            start(
                f"node{node}",
                "mooncake_client",
                "--host=127.0.0.1",
                f"--port={first_port + 10 + node}",
                f"--master_server_address={master}",
                "--metadata_server=P2PHANDSHAKE",
                f"--global_segment_size={node_bytes}",
                "--local_buffer_size=16MB",
                "--protocol=tcp",
            )
            for node in range(nodes)
        ]
        wait_for(lambda: nodes_of(metrics) == nodes, "the store nodes have joined")
        yield Store(master, metrics, each)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_SECONDS_MAX
    while not condition():
        assert time.monotonic() < until, f"still not: {what}"
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def nodes_of(metrics: str) -> int:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("master_active_clients"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store_of(tmp_path_factory.mktemp("store"), 21551, 2, "512MB") as store:
        yield store


@pytest.fixture
def pools(start_pool: StartPool, tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    """One to push from, and one to pull into."""
    with start_pool(tmp_path / "from") as one, start_pool(tmp_path / "into") as other:
        yield one, other


def run(process: Process, *words: str | Path) -> Any:
    result = CliRunner().invoke(app, [*map(str, words), "--pool", process.address])
    if isinstance(result.exception, TreadleError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in words else result.stdout


def rows_of(process: Process, name: str) -> dict[int, NDArray[np.uint8]]:
    with process.fabric.engram.open(name, transport="rpc") as handle:
        ids = {layer: np.arange(handle.model.table(layer).rows).reshape(-1, 1) for layer in handle.layers}
        return {layer: handle.gather(layer, rows) for layer, rows in ids.items()}


def test_a_version_of_several_parts_comes_back_as_itself(store: Store, pools: tuple[Process, Process]) -> None:
    large = qwen_ple_model("large", prime_base=20_000, row=RowLayout(320, 160, "bf16"))
    assert PART < large.rows_hashed(0) * 320 < 2 * PART
    loaded = pools[0].fabric.engram.load_random(large)
    pushed = run(pools[0], "push", "large", "--store", store.master, "--json")
    assert (pushed["version"], pushed["objects"], pushed["replicas"]) == (loaded.version, 3, 2)
    pulled = run(pools[1], "pull", "large", "--store", store.master, "--json")
    assert (pulled["version"], pulled["current"]) == (loaded.version, True)
    run(pools[1], "verify", "large")
    again = run(pools[0], "push", f"large@{loaded.version[:12]}", "--store", store.master)  # objects are there: compared
    assert "read back" in again


def test_token_map_weights_and_card_come_along(store: Store, pools: tuple[Process, Process], grow: Grow) -> None:
    grown = grow()
    pools[0].fabric.engram.load_grown(grown.path)
    run(pools[0], "push", grown.model.name, "--store", store.master, "--json")
    pulled = run(pools[1], "pull", f"{grown.model.name}@{grown.model.version}", "--store", store.master, "--json")
    assert pulled["version"] == grown.model.version
    assert pools[1].fabric.engram.read_fusion(grown.model.name) == grown.fusion
    with pools[1].fabric.engram.open(grown.model.name) as handle:
        assert handle.card == grown.card
    for layer, rows in rows_of(pools[1], grown.model.name).items():
        assert np.array_equal(rows.reshape(len(rows), -1), grown.tables[layer])


def test_the_last_version_pushed_is_the_one_that_is_pulled_without_naming_it(
    store: Store, pools: tuple[Process, Process], ple: EngramModel
) -> None:
    versions = []
    for seed in (1, 2):
        versions.append(pools[0].fabric.engram.load_random(ple, seed=seed, keep_previous=True).version)
        run(pools[0], "push", "ple", "--store", store.master, "--json")
    assert run(pools[1], "pull", "ple", "--store", store.master, "--json")["version"] == versions[1]
    assert run(pools[1], "pull", f"ple@{versions[0]}", "--store", store.master, "--json")["version"] == versions[0]


def test_three_replicas_on_two_nodes_fail_and_nothing_can_be_pulled(
    store: Store, pools: tuple[Process, Process], demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    version = pools[0].fabric.engram.load_random(demo, token_map).version
    with pytest.raises(Unavailable, match="2 of 3 replicas"):
        run(pools[0], "push", "demo", "--store", store.master, "--replicas", "3")
    with pytest.raises(NotFound, match="it was not pushed"):
        run(pools[1], "pull", f"demo@{version}", "--store", store.master)
    with pytest.raises(NotFound, match="it was not pushed"):
        run(pools[1], "pull", "demo", "--store", store.master)
    run(pools[0], "push", "demo", "--store", store.master, "--replicas", "2")  # goes on where the other stopped
    assert run(pools[1], "pull", "demo", "--store", store.master, "--json")["version"] == version


def test_other_bytes_under_a_key_are_found_when_pushing_and_when_pulling(
    store: Store, pools: tuple[Process, Process], v41: EngramModel, token_map: NDArray[np.int32]
) -> None:
    version = pools[0].fabric.engram.load_random(v41, token_map).version
    layer_bytes = v41.rows_hashed(1) * v41.row.bytes
    key = part_key("v41", version, "1", 0)
    put_junk(store, key, layer_bytes)
    with pytest.raises(DataLoss, match="--replace"):
        run(pools[0], "push", "v41", "--store", store.master)
    run(pools[0], "push", "v41", "--store", store.master, "--replace")
    with SegmentStore(store.master) as segments:
        segments.remove(key)
    put_junk(store, key, layer_bytes)
    with pytest.raises(DataLoss, match="CRC32C"):
        run(pools[1], "pull", "v41", "--store", store.master)
    with SegmentStore(store.master) as segments:
        segments.remove(key)
    with pytest.raises(NotFound, match=key):
        run(pools[1], "pull", "v41", "--store", store.master)
    assert not pools[1].fabric.engram.list_models()


def put_junk(store: Store, key: str, byte_count: int) -> None:
    with SegmentStore(store.master) as segments:
        junk = segments.buffer(byte_count)
        junk[:] = 7
        segments.put(key, junk, 2)


def test_a_manifest_of_another_version_is_not_believed(
    store: Store, pools: tuple[Process, Process], demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    version = pools[0].fabric.engram.load_random(demo, token_map, seed=5).version
    run(pools[0], "push", "demo", "--store", store.master)
    forged = "1" * 64
    with SegmentStore(store.master) as segments:
        size = segments.size(manifest_key("demo", version), 1 << 20)
        text = segments.read(manifest_key("demo", version), segments.buffer(size))
        segments.put(manifest_key("demo", forged), text, 2)
    with pytest.raises(DataLoss, match="holds the manifest of"):
        run(pools[1], "pull", f"demo@{forged}", "--store", store.master)


def test_what_is_asked_for_wrongly_is_refused(store: Store, pools: tuple[Process, Process], ple: EngramModel) -> None:
    pools[0].fabric.engram.load_random(ple)
    for words, match in (
        (("push", "ple@", "--store", store.master), "NAME@VERSION"),
        (("push", "ple", "--store", "nowhere"), "host:port"),
        (("push", "ple", "--store", store.master, "--part-mib", "65"), "multiple"),
        (("push", "ple", "--store", store.master, "--protocol", "udp"), "tcp or rdma"),
        (("pull", "ple@12ab", "--store", store.master), "64 hexadecimal digits"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            run(pools[0], *words)
    with pytest.raises(Unavailable, match="mooncake_master"):
        run(pools[0], "pull", "ple", "--store", "127.0.0.1:21999")


def test_a_store_without_room_and_one_that_lost_a_node(pools: tuple[Process, Process], ple: EngramModel, tmp_path: Path) -> None:
    with store_of(tmp_path, 21651, 2, "32MB") as small:
        version = pools[0].fabric.engram.load_random(ple).version
        run(pools[0], "push", "ple", "--store", small.master)
        small.nodes[0].kill()
        small.nodes[0].wait(10)
        assert run(pools[1], "pull", "ple", "--store", small.master, "--json")["version"] == version  # the other replica
        pools[0].fabric.engram.load_random(qwen_ple_model("large", prime_base=20_000, row=RowLayout(320, 160, "bf16")))
        with pytest.raises(ResourceExhausted, match="add store nodes"):
            run(pools[0], "push", "large", "--store", small.master, "--replicas", "1")
