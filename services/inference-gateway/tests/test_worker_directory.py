"""Workers that come and go by a directory: what a change means, and a real Redis that may hang, die and forget."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inference_gateway.domain.directory import GONE_SECONDS, STALE_SECONDS, Directory, Listed
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.member import Member
from inference_gateway.domain.served_model import WorkerWatch
from inference_gateway.settings import Settings
from treadle.chassis.leases import LEASE_SECONDS
from treadle.chassis.settings import WrongSetting
from treadle.client.worker_entry import ENTRY_BYTES_MAX, WorkerEntry, entry_bytes, entry_from_bytes
from treadle.contract.errors import InvalidArgument, Unavailable

REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="no redis-server here: apt-get install redis-server")


# -- what a change means ----------------------------------------------------------------------------------------------------------


class Ground:
    """A directory over a fleet of members that are opened by name and closed once they are idle."""

    def __init__(self) -> None:
        self.now = 0.0
        self.closed: list[str] = []
        self.fleet = Fleet()
        self.directory = Directory(self.fleet, self._make, self._retire, lambda: self.now)

    @property
    def names(self) -> str:
        return "".join(member.name for member in self.fleet.members)

    def member(self, name: str) -> Member:
        return next(member for member in self.fleet.members if member.name == name)

    def hear(self, *listed: Listed) -> None:
        self.directory.heard({entry.name: entry for entry in listed})

    def _make(self, name: str, address: str) -> Member:
        if ":" not in address:
            raise InvalidArgument("no address")
        watch = WorkerWatch(None, None, None, interval_seconds=1)  # type: ignore[arg-type]
        watch._trouble = ""  # as after a good poll
        return Member(name, address, watch)  # type: ignore[arg-type]

    def _retire(self, member: Member) -> None:
        member.when_idle(lambda: self.closed.append(member.name))


def listed(name: str, epoch: int = 1, *, draining: bool = False, address: str = "") -> Listed:
    return Listed(name, address or f"{name}:1", epoch, draining)


async def test_workers_join_drain_and_leave_and_what_runs_there_ends_first() -> None:
    ground = Ground()
    ground.hear(listed("a"), listed("b"))
    assert ground.names == "ab"
    leaving = ground.member("a")
    leaving.begin()
    ground.hear(listed("a", draining=True), listed("b"))
    assert leaving.not_usable_because() == "the worker is draining"
    assert ground.names == "ab"
    ground.hear(listed("b"))
    assert (ground.names, ground.closed) == ("b", [])
    leaving.end()
    assert ground.closed == ["a"]


async def test_a_worker_that_answers_outlives_a_directory_that_forgot_it() -> None:
    ground = Ground()
    ground.hear(listed("a"), listed("b"))
    ground.member("b").watch.lost()
    ground.hear()
    assert ground.names == "a"  # b does not answer and is not listed: dead
    ground.now = GONE_SECONDS
    ground.hear()
    assert ground.names == "a"
    ground.hear(listed("a"))  # it has put itself there again
    ground.now *= 2.5
    ground.hear()
    assert ground.names == "a"
    ground.now += GONE_SECONDS + 1
    ground.hear()
    assert ground.names == ""


async def test_silence_changes_nothing_and_is_called_stale() -> None:
    ground = Ground()
    ground.hear(listed("a"))
    ground.now = STALE_SECONDS + 1
    ground.directory.silent()
    assert ground.directory.stale
    assert ground.names == "a"
    ground.hear(listed("a"))
    assert not ground.directory.stale


async def test_a_newer_process_takes_the_place_of_an_older_one() -> None:
    ground = Ground()
    ground.hear(listed("a", 5, address="old:1"))
    first = ground.member("a")
    ground.hear(listed("a", 4, address="older:1"))
    assert ground.member("a") is first
    ground.hear(listed("a", 6, address="new:1"))
    assert str(ground.member("a").worker) == "new:1"
    assert ground.closed == ["a"]
    ground.hear(listed("a", 7, address="new:1", draining=True))
    ground.hear(listed("a", 8, address="new:1"))
    assert ground.member("a").not_usable_because() is None  # restarted where it was


async def test_an_entry_that_cannot_be_used_hides_nobody_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ground = Ground()
    for _ in range(3):
        ground.hear(listed("bad", address="nowhere"), listed("a"))
    assert ground.names == "a"
    assert sum("left out" in record.message for record in caplog.records) == 1
    ground.hear(listed("bad", 2), listed("a"))
    assert ground.names == "abad"


async def test_workers_beyond_the_limit_of_a_fleet_are_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_gateway.domain.fleet.MEMBERS_MAX", 1)
    ground = Ground()
    ground.hear(listed("a"), listed("b"))
    assert (ground.names, ground.closed) == ("a", ["b"])


# -- entries and settings ---------------------------------------------------------------------------------------------------------


def test_an_entry_comes_back_as_it_was_written_and_more_fields_do_no_harm() -> None:
    entry = WorkerEntry("a", "h:1", "m", 17, draining=True)
    assert entry_from_bytes(entry_bytes(entry)) == entry
    assert entry_from_bytes(entry_bytes(entry)[:-1] + b',"later":[1]}') == entry
    assert not entry_from_bytes(b'{"name":"a","address":"h:1","model":"m","epoch":1}').draining


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[]", b"{}", b"[" * 3000, b" " * (ENTRY_BYTES_MAX + 1),
        b'{"name":"","address":"h:1","model":"m","epoch":1}', b'{"name":"a","address":"h","model":"m","epoch":1}',
        b'{"name":"a\\n","address":"h:1","model":"m","epoch":1}', b'{"name":["a"],"address":"h:1","model":"m","epoch":1}',
        b'{"name":"a","address":"h:1","model":"m","epoch":-1}', b'{"name":"a","address":"h:1","model":"m","epoch":true}',
        b'{"name":"a","address":"h:1","model":"m","epoch":1,"draining":1}',
    ],
)  # fmt: skip
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="worker entry"):
        entry_from_bytes(data)


def test_workers_are_listed_or_looked_up_but_not_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_REDIS_URL", raising=False)
    assert Settings().workers == {"127.0.0.1:7404": "127.0.0.1:7404"}
    assert Settings(worker="h:1, b=h:2,unix:/s").workers == {"h:1": "h:1", "b": "h:2", "unix:/s": "unix:/s"}
    assert Settings(redis_url="redis://h").workers == {}
    monkeypatch.setenv("TREADLE_REDIS_URL", "redis://env")
    assert (Settings().directory_url, Settings().workers) == ("redis://env", {})
    assert Settings(worker="h:1").directory_url == ""
    for wrong in ("nowhere", "h:1,h:1", "=h:1", ","):
        with pytest.raises(WrongSetting, match="worker"):
            Settings(worker=wrong)
    with pytest.raises(WrongSetting, match="a list or a directory"):
        Settings(worker="h:1", redis_url="redis://h")


# -- a real Redis -----------------------------------------------------------------------------------------------------------------


class Redis:
    """A real one on a free port; nothing of it stays."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url, self._folder = f"redis://127.0.0.1:{self._port}/0", folder
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, until: Callable[[Callable[[], bool], str], None]) -> None:
        assert REDIS is not None
        command = [REDIS, "--port", str(self._port), "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
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
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


def until(holds: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    server.start(until)
    yield server
    server.stop()


class Registered:
    """Keeps an entry in Redis as a worker does, from a thread."""

    def __init__(self, url: str, entry: WorkerEntry) -> None:
        self._url, self.entry = url, entry
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep()))
        self._thread.start()

    def drain(self) -> None:
        self.entry = dataclasses.replace(self.entry, draining=True)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _keep(self) -> None:
        from treadle.chassis.leases import Leases

        leases, told = Leases(self._url, "inference:worker"), None
        while not self._stop.is_set():
            entry = self.entry
            try:
                await leases.put(entry.name, entry_bytes(entry), news=entry != told)
                told = entry
            except Unavailable:
                pass
            await asyncio.sleep(0.1)
        with suppress(Unavailable):  # then its lease ends
            await leases.remove(self.entry.name)
        await leases.close()


@contextmanager
def registered(url: str, name: str, address: str) -> Iterator[Registered]:
    keeper = Registered(url, WorkerEntry(name, address, "tiny-chat", time.time_ns()))
    try:
        yield keeper
    finally:
        keeper.end()


def workers_of(gateway: Any) -> set[str]:
    lines = gateway.http.get("/metrics").text.splitlines()
    return {line.split('worker="')[1].split('"')[0] for line in lines if line.startswith("treadle_gateway_index_blocks{")}


@needs_redis
def test_a_gateway_finds_workers_in_redis_and_outlives_it(
    start_gateway: Callable[..., Any], worker: Any, other_worker: Any, redis_server: Redis
) -> None:
    other_worker.start()
    gateway = start_gateway("--redis-url", redis_server.url)
    assert gateway.http.get("/ready").status_code == 503
    with ExitStack() as stack:
        stack.enter_context(registered(redis_server.url, "a", worker.address))
        gateway.wait_ready()
        b = stack.enter_context(registered(redis_server.url, "b", other_worker.address))
        until(lambda: workers_of(gateway) == {"a", "b"}, "both are found")
        until(lambda: gateway.figure("treadle_gateway_worker_state", state="ready", worker="b") == 1, "b is ready")

        redis_server.stop()
        until(lambda: gateway.figure("treadle_gateway_directory_stale") == 1, "a dead Redis is noticed")
        assert gateway.chat().status_code == 200
        assert workers_of(gateway) == {"a", "b"}
        redis_server.start(until)  # empty: it kept nothing
        until(lambda: gateway.figure("treadle_gateway_directory_stale") == 0, "it is back")
        assert gateway.chat().status_code == 200

        assert redis_server.child is not None
        redis_server.child.send_signal(signal.SIGSTOP)
        until(lambda: gateway.figure("treadle_gateway_directory_stale") == 1, "one that hangs is as good as dead")
        redis_server.child.send_signal(signal.SIGCONT)
        until(lambda: gateway.figure("treadle_gateway_directory_stale") == 0, "it answers again")

        b.drain()
        until(lambda: gateway.figure("treadle_gateway_worker_state", state="draining", worker="b") == 1, "b drains")
        before = len(other_worker.requests)
        assert all(gateway.chat().status_code == 200 for _ in range(8))
        assert len(other_worker.requests) == before
        b.end()
        until(lambda: workers_of(gateway) == {"a"}, "b has left")
    assert gateway.terminate() == 0


@needs_redis
def test_a_stream_at_a_worker_that_leaves_goes_on_to_its_end(
    start_gateway: Callable[..., Any], worker: Any, redis_server: Redis, scripts: dict[str, Any]
) -> None:
    gateway = start_gateway("--redis-url", redis_server.url)
    go_on = threading.Event()

    async def slow(request: Any, context: Any) -> Any:
        async for response in scripts["hello"](request, context):
            yield response
            if response.text_delta == "H":
                while not go_on.is_set():  # noqa: ASYNC110  # set from another thread
                    await asyncio.sleep(0.01)

    worker.script = slow
    with registered(redis_server.url, "a", worker.address) as a:
        gateway.wait_ready()
        body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert "assistant" in next(lines)
            a.drain()
            until(lambda: gateway.http.get("/ready").status_code == 503, "nobody is left")
            a.end()
            until(lambda: workers_of(gateway) == set(), "it has left")
            go_on.set()
            text = "".join(lines)
    assert text.endswith("data: [DONE]")
    assert '"error"' not in text


@needs_redis
def test_a_worker_whose_lease_ends_is_let_go_of_and_wrong_entries_are_left_out(
    start_gateway: Callable[..., Any], worker: Any, other_worker: Any, redis_server: Redis
) -> None:
    import redis

    other_worker.start()
    with redis.Redis.from_url(redis_server.url) as keys:
        keys.sadd("treadle:inference:workers", "evil", "other", "dead")
        keys.set("treadle:inference:worker:evil", b"\xff\x00 not an entry")
        keys.set("treadle:inference:worker:other", entry_bytes(WorkerEntry("somebody", "h:1", "m", 1)))
        gateway = start_gateway("--redis-url", redis_server.url)
        with registered(redis_server.url, "a", worker.address):
            until(lambda: workers_of(gateway) == {"a"}, "who lives is found")
            killed = entry_bytes(WorkerEntry("killed", other_worker.address, "m", 1))
            keys.set("treadle:inference:worker:killed", killed, px=round(LEASE_SECONDS * 1000))
            keys.sadd("treadle:inference:workers", "killed")
            until(lambda: workers_of(gateway) == {"a", "killed"}, "so is one that nobody tells of on the channel")
            assert gateway.log.count("an entry in Redis is none") == 2
            other_worker.stop()
            until(lambda: workers_of(gateway) == {"a"}, "one that neither answers nor renews is gone")
            assert keys.smembers("treadle:inference:workers") == {b"a", b"evil", b"other"}
