"""Owners that find each other: by a fixed list, and by a Redis that may die."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engram_pool.commands import app
from engram_pool.domain.directory import Listing
from engram_pool.owner_lists import LIST_BYTES_MAX, list_messages
from treadle.client.endpoint import Endpoint
from treadle.client.engram.owners import OwnerWatch, owner_bytes, owner_from, owner_from_bytes
from treadle.contract import EngramModel, InvalidArgument, Unavailable
from treadle.contract.owners import Door, Holding, Owner
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Process, Serve, StartPool

Until = Callable[[Callable[[], bool], str], None]
FreePort = Callable[[], int]
IDS = np.array([[1, 2]], dtype=np.int64)
REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="no redis-server here: apt-get install redis-server")


def states(process: Process) -> dict[str, tuple[bool, bool]]:
    """Owner -> reachable, leaving; as one pool tells."""
    return {owner.name: (owner.reachable, owner.leaving) for owner in process.fabric.engram.owners().owners}


def sees(process: Process, *names: str) -> bool:
    return states(process) == dict.fromkeys(names, (True, False))


def holders(process: Process) -> set[str]:
    return {owner.name for owner in process.fabric.engram.owners().owners if any(held.rows for held in owner.holdings)}


def metric(process: Process, name: str) -> float:
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"treadle_engram_{name} ")]
    return float(line.split()[-1])


# -- messages -----------------------------------------------------------------------------------------------------------------


def test_an_entry_survives_the_wire_and_a_wrong_one_is_refused() -> None:
    owner = Owner("a", "h:1", (Door("socket", "h:2"),), (Holding("m", "ab" * 32, {2: ((0, 5), (7, 9)), 15: ()}),), 7, True, False)
    again = owner_from_bytes(owner_bytes(owner))
    assert (again.name, again.epoch, again.leaving, again.reachable, again.doors) == ("a", 7, True, False, owner.doors)
    assert again.holdings[0].ranges(2).tolist() == [[0, 5], [7, 9]]
    for wrong in (b"\xff\xff\xff", owner_bytes(owner)[:-3], b""):
        with pytest.raises(InvalidArgument):
            owner_from_bytes(wrong)
    with pytest.raises(InvalidArgument, match="limit"):
        owner_from_bytes(bytes(5 << 20))


def test_a_long_list_comes_in_several_messages_and_is_the_same() -> None:
    ranges = tuple((n * 10, n * 10 + 5) for n in range(6_000))
    owners = tuple(
        Owner(f"o{n}", "h:1", (), tuple(Holding("m", f"{version:064x}", {2: ranges}) for version in range(5)), n) for n in range(4)
    )
    messages = list(list_messages(Listing(owners, stale=True), "", "", None))
    assert len(messages) > 2
    assert all(message.ByteSize() < LIST_BYTES_MAX + (128 << 10) for message in messages)
    assert [message.complete for message in messages] == [False] * (len(messages) - 1) + [True]
    watch = OwnerWatch(Endpoint("h:1"), Answers(messages))
    (listed,) = list(watch)
    assert listed.stale
    assert [(owner.name, len(owner.holdings)) for owner in listed.owners] == [(f"o{n}", 5) for n in range(4)]
    (one,) = list_messages(Listing(owners, stale=False), "m", f"{3:064x}", "o2")
    assert [[held.version for held in owner_from(owner).holdings] for owner in one.owners] == [[f"{3:064x}"]]


class Answers:
    """A call that has these answers and then, if told to, hangs until it is cancelled."""

    def __init__(self, answers: list[pb.WatchOwnersResponse], *, hangs: bool = False) -> None:
        self._answers, self._hangs, self._cancelled = answers, hangs, threading.Event()

    def __iter__(self) -> Iterator[pb.WatchOwnersResponse]:
        yield from self._answers
        if self._hangs:
            assert self._cancelled.wait(10)
            raise Unavailable("cancelled")

    def cancel(self) -> None:
        self._cancelled.set()


def test_a_watch_of_which_nothing_is_heard_ends() -> None:
    watch = OwnerWatch(Endpoint("h:1"), Answers([pb.WatchOwnersResponse(complete=True)], hangs=True), seconds=0.1)
    lists = iter(watch)
    assert next(lists).owners == ()
    with pytest.raises(Unavailable, match="nothing was heard"):
        next(lists)


async def test_a_pool_that_stands_alone_tells_of_itself(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        watching = served.stub.WatchOwners(pb.WatchOwnersRequest())
        first = await watching.read()
        assert (first.complete, list(first.owners)) == (True, [])  # it has told nothing yet
        watching.cancel()


# -- a fixed list ---------------------------------------------------------------------------------------------------------------


@contextmanager
def owners_of_a_list(
    start_pool: StartPool, folder: Path, ports: Sequence[int], *more: str
) -> Iterator[tuple[list[Process], Callable[[int], Any]]]:
    listed = ",".join(f"o{n}=127.0.0.1:{port}" for n, port in enumerate(ports))

    def start(number: int) -> Any:
        flags = ("--listen", f"127.0.0.1:{ports[number]}", "--owner", f"o{number}", "--owners", listed)
        return start_pool(folder / f"o{number}", *flags, *more)

    with ExitStack() as stack:
        yield [stack.enter_context(start(number)) for number in range(len(ports))], start


def test_owners_of_a_list_find_each_other_lose_each_other_and_meet_again(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel, until: Until, free_port: FreePort
) -> None:
    with owners_of_a_list(start_pool, shm_folder, [free_port() for _ in range(3)]) as (pools, start):
        for pool in pools:
            until(partial(sees, pool, "o0", "o1", "o2"), "all see all")
        pools[1].fabric.engram.load_random(ple)
        until(lambda: holders(pools[0]) == {"o1"}, "o0 learns what o1 holds")
        begun = time.monotonic()
        pools[1].kill()
        until(lambda: states(pools[2])["o1"] == (False, False), "a killed owner is not reachable")
        assert time.monotonic() - begun < 2
        assert holders(pools[2]) == {"o1"}  # what it held comes back with it
        with start(1) as again:
            until(lambda: states(pools[2])["o1"] == (True, False), "it is back")
            until(lambda: holders(pools[2]) == {"o1"}, "with its rows")
            again.child.send_signal(signal.SIGTERM)
            until(lambda: states(pools[2])["o1"] == (True, True), "it says that it leaves, and answers still")
            assert again.child.wait(20) == 0
            until(lambda: states(pools[2])["o1"] == (False, True), "it has left")


def test_a_pool_that_leaves_answers_until_nobody_holds_a_version_there(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel, until: Until, free_port: FreePort
) -> None:
    patient = ("--leave-seconds-max", "60")
    with owners_of_a_list(start_pool, shm_folder, [free_port(), free_port()], *patient) as (pools, _):
        until(lambda: states(pools[0]).get("o1") == (True, False), "they see each other")
        pools[0].fabric.engram.load_random(ple)
        with pools[0].fabric.engram.open("ple", transport="rpc") as handle:
            pools[0].child.send_signal(signal.SIGTERM)
            until(lambda: states(pools[1]).get("o0") == (True, True), "o0 leaves")
            time.sleep(1.5)  # longer than it waits where nobody holds
            assert handle.gather(0, IDS).shape == (1, 2, 320)
        assert pools[0].child.wait(20) == 0


def test_the_command_lists_owners_with_their_health(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel, until: Until, free_port: FreePort
) -> None:
    with owners_of_a_list(start_pool, shm_folder, [free_port(), free_port()]) as (pools, _):
        version = pools[1].fabric.engram.load_random(ple).version
        until(lambda: holders(pools[0]) == {"o1"}, "o0 learns what o1 holds")
        run = CliRunner().invoke(app, ["owners", "--pool", pools[0].address])
        assert (run.exit_code, "o1" in run.output, "up" in run.output) == (0, True, True), run.output
        pools[1].kill()
        until(lambda: not states(pools[0])["o1"][0], "o1 is not heard of")
        run = CliRunner().invoke(app, ["owners", "--pool", pools[0].address, "--json"])
        told = {owner["owner"]: owner for owner in json.loads(run.stdout)["owners"]}
        assert (run.exit_code, told["o0"]["state"], told["o1"]["state"]) == (1, "up", "unreachable")
        assert told["o1"]["endpoint"] == pools[1].address
        assert [held["version"] for held in told["o1"]["holdings"]] == [version]
        assert told["o1"]["holdings"][0]["layers"]["0"] == [[0, ple.rows_hashed(0)]]


def test_an_owner_under_a_wrong_name_is_left_out(
    start_pool: StartPool, shm_folder: Path, until: Until, free_port: FreePort
) -> None:
    with start_pool(shm_folder / "x", "--owner", "x") as other:
        flags = ("--owner", "a", "--owners", f"a=127.0.0.1:{free_port()},b={other.address}")
        with start_pool(shm_folder / "a", *flags) as pool:
            until(lambda: "calls itself otherwise" in pool.log.read_text(), "the log says so")
            assert states(pool)["b"] == (False, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--owners", "a=h:1,a=h:2"], "owners"),
        (["--owners", "a"], "owners"),
        (["--owners", "a=h:1"], "'pool' is none of"),
        (["--owner", "a/b"], "owner"),
        (["--owner", "a", "--owners", "a=h:1", "--redis-url", "redis://h"], "give one"),
        (["--advertise", "nowhere"], "host:port"),
        (["--redis-url", "nothing"], "redis://HOST"),
        (["--redis-url", "redis://h", "--listen", "0.0.0.0:0", "--api-key-file", "KEYS"], "advertise"),
    ],
)
def test_a_wrong_setting_stops_the_start(flags: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key\n")
    flags = [str(tmp_path / "keys") if flag == "KEYS" else flag for flag in flags]
    run = subprocess.run(
        [sys.executable, "-m", "engram_pool", "--segment-dir", str(tmp_path / "s"), *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, said in run.stderr) == (2, True), run.stderr


# -- Redis ------------------------------------------------------------------------------------------------------------------------


class Redis:
    """A real one on a free port; nothing of it stays."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port, self._folder = port, folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, until: Until) -> None:
        assert REDIS is not None
        command = [REDIS, "--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, "redis answers")

    def stop(self) -> None:
        if self.child is not None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
            self.child.wait()
            self.child = None

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def redis_server(tmp_path: Path, until: Until, free_port: FreePort) -> Iterator[Redis]:
    server = Redis(tmp_path, free_port())
    server.start(until)
    yield server
    server.stop()


@needs_redis
def test_owners_meet_in_redis_and_outlive_it(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel, until: Until, redis_server: Redis
) -> None:
    with ExitStack() as stack:
        pools = [
            stack.enter_context(start_pool(shm_folder / name, "--owner", name, "--redis-url", redis_server.url))
            for name in ("a", "b", "c")
        ]
        for pool in pools:
            until(partial(sees, pool, "a", "b", "c"), "all see all")
        loaded = pools[0].fabric.engram.load_random(ple)
        until(lambda: holders(pools[2]) == {"a"}, "news of a load")
        pools[1].kill()
        until(lambda: states(pools[2])["b"] == (False, False), "its lease ends")

        redis_server.stop()
        until(lambda: pools[2].fabric.engram.owners().stale, "a dead Redis is noticed")
        assert metric(pools[2], "directory_stale") == 1
        assert metric(pools[2], "directory_age_seconds") > 4
        assert (states(pools[2])["a"], holders(pools[2])) == ((True, False), {"a"})  # the last list known
        with pools[0].fabric.engram.open("ple", loaded.version, transport="rpc") as handle:
            assert handle.gather(0, IDS).shape == (1, 2, 320)

        redis_server.start(until)  # empty: it kept nothing
        until(lambda: not pools[2].fabric.engram.owners().stale, "it is back")
        until(lambda: states(pools[2])["a"] == (True, False), "its owners have written themselves in again")
        assert metric(pools[2], "directory_stale") == 0
        pools[0].child.send_signal(signal.SIGTERM)
        until(lambda: "a" not in states(pools[2]), "one that leaves is taken out")
        assert pools[0].child.wait(20) == 0


@needs_redis
def test_a_redis_that_hangs_is_a_redis_that_is_down(
    start_pool: StartPool, shm_folder: Path, until: Until, redis_server: Redis
) -> None:
    with start_pool(shm_folder, "--owner", "a", "--redis-url", redis_server.url) as pool:
        until(lambda: metric(pool, "directory_stale") == 0, "it is heard")
        assert redis_server.child is not None
        redis_server.child.send_signal(signal.SIGSTOP)
        until(lambda: metric(pool, "directory_stale") == 1, "silence is noticed")
        assert states(pool) == {"a": (True, False)}
        redis_server.child.send_signal(signal.SIGCONT)
        until(lambda: metric(pool, "directory_stale") == 0, "it answers again")


@needs_redis
def test_what_is_no_entry_is_left_out(start_pool: StartPool, shm_folder: Path, until: Until, redis_server: Redis) -> None:
    import redis

    with redis.Redis.from_url(redis_server.url) as keys:
        keys.sadd("treadle:engram:owners", "evil", "other", "\xff")
        keys.set("treadle:engram:owner:evil", b"\xff\x00 not an entry")
        keys.set("treadle:engram:owner:other", owner_bytes(Owner("somebody", "h:1")))
        with start_pool(shm_folder, "--owner", "a", "--redis-url", redis_server.url) as pool:
            until(lambda: pool.log.read_text().count("an entry in Redis is none") >= 2, "the log says so")
            assert states(pool) == {"a": (True, False)}


@needs_redis
def test_names_of_killed_owners_hide_nobody_and_are_taken_off_the_set(
    start_pool: StartPool, shm_folder: Path, until: Until, redis_server: Redis
) -> None:
    import redis

    with redis.Redis.from_url(redis_server.url) as keys, ExitStack() as stack:
        keys.sadd("treadle:engram:owners", *(f"dead-{number}" for number in range(64)))
        pools = [
            stack.enter_context(start_pool(shm_folder / name, "--owner", name, "--redis-url", redis_server.url)) for name in "yz"
        ]
        for pool in pools:
            until(partial(sees, pool, "y", "z"), "those who live find each other")
        until(lambda: keys.smembers("treadle:engram:owners") == {b"y", b"z"}, "names without an entry are gone")
