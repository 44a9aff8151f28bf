"""Settings that stop the start, and limits that have a name."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from asm_store import messages as m
from asm_store.__main__ import main
from asm_store.adapters.replica_calls import CHANNELS_MAX, ReplicaCalls
from asm_store.domain import deleting as deleting_module
from asm_store.domain import pointers as pointers_module
from asm_store.domain.compute import Compute
from asm_store.domain.ports import End, Remote, Replica
from asm_store.domain.tombstones import TOMBSTONE_SECONDS, TOMBSTONES_MAX, Tombstones
from asm_store.domain.versions import Pin, Pointer, Record
from asm_store.settings import Settings
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.chassis.settings import WrongSetting
from treadle.client import Endpoint
from treadle.contract.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Serve

Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("file_bytes_max", 1000), ("tenant_bytes_max", 1 << 60), ("versions_max", 0), ("publishes_max", 0), ("lookups_max", 0),
        ("lists_probed", 0), ("watchers_max", 0), ("holds_max", 0), ("compute_threads", 1), ("publish_seconds_max", 0.0),
        ("publish_silence_seconds", -1.0), ("pin_seconds_max", float("nan")), ("verify_bytes_per_second", -1), ("tenant", "No Name"),
        ("replica", "../x"), ("advertise", "nowhere"), ("listen", "0.0.0.0:0"),
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_named(setting: str, value: Any) -> None:
    with pytest.raises(WrongSetting, match=setting if setting != "advertise" else "address"):
        Settings(**{setting: value})


def test_with_a_redis_others_must_be_able_to_reach_a_replica(tmp_path: Path) -> None:
    with pytest.raises(WrongSetting, match="advertise"):
        Settings(listen="0.0.0.0:0", api_key_file=tmp_path / "keys", redis_url="redis://127.0.0.1:1/0")


def test_a_folder_that_others_may_write_stops_the_start_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.chassis.log.configure", lambda *_: None)  # it would outlive this test
    folder = tmp_path / "data"
    folder.mkdir()
    os.chmod(folder, 0o777)
    assert main(["--data-dir", str(folder), "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]) == 2
    error = capsys.readouterr().err
    assert "writable by others" in error
    assert error.count("\n") == 1


async def test_one_watch_and_one_hold_too_many_are_refused(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve(watchers_max=1, holds_max=1) as served:
        await served.publish(made.messages(promote=True))
        hold = pb.HoldRequest(ref=pb.DictionaryRef(name="rules"))
        for method, request, setting in (
            (served.stub.Watch, pb.WatchRequest(), "watchers_max"),
            (served.stub.Hold, hold, "holds_max"),
        ):
            first = method(request)
            await first.read()
            code, text, details = await fails(method(request))
            assert (code, setting in text, "treadle-retry-after-seconds" in details) == (FULL, True, True)
            first.cancel()


async def test_a_watch_of_too_many_names_is_refused(serve: Serve, fails: Fails) -> None:
    async with serve() as served:
        watch = served.stub.Watch(pb.WatchRequest(names=["rules"] * (pointers_module.WATCHED_MAX + 1)))
        code, text, _ = await fails(watch)
        assert (code, "names: 1024 at most" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_long_work_leaves_a_thread_for_short_work() -> None:
    compute, over = Compute(3), threading.Event()
    try:
        long = [asyncio.ensure_future(compute.run_long(over.wait, 20)) for _ in range(5)]
        assert await asyncio.wait_for(compute.run(lambda: "short"), 10) == "short"
        over.set()
        assert all(await asyncio.gather(*long))
    finally:
        over.set()
        compute.close()


class Silent:
    """Another replica that has begun to answer, and says no more until it is over."""

    def __init__(self) -> None:
        self.asked, self.over = list[Any](), asyncio.Event()

    async def get(self, replica: Replica, key: Any) -> AsyncGenerator[End, None]:
        self.asked.append(key)
        await self.over.wait()
        raise Unavailable("it has gone")
        yield End()


def lookup(made: Made) -> pb.LookupRequest:
    return pb.LookupRequest(ref=pb.DictionaryRef(name=made.name, version=made.version), layer=0, queries=bytes(4 * 6 * 8))


async def test_what_goes_is_unmapped_however_it_goes(serve: Serve, make: Make) -> None:
    made = [make(seed=seed) for seed in range(3)]
    async with serve(versions_max=2) as served:
        for one in made[:2]:
            await served.publish(one.messages())
            await served.stub.Lookup(lookup(one))
        mapped = served.parts.server._lookups._mapped
        assert len(mapped) == 2
        await served.publish(made[2].messages())  # the first is evicted
        assert set(mapped) == {(made[1].name, made[1].version)}
        await served.parts.store.deleting.obey({(made[1].name, made[1].version): time.time() + 60})  # as another replica says
        assert not mapped


async def test_the_tensors_that_were_asked_lately_stay_mapped(serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asm_store.domain.lookup.MAPPED_MAX", 2)
    made = [make(seed=seed) for seed in range(3)]
    async with serve() as served:
        for one in made:
            await served.publish(one.messages())
        for one in (made[0], made[1], made[0], made[2]):
            await served.stub.Lookup(lookup(one))
        assert list(served.parts.server._lookups._mapped) == [(one.name, one.version) for one in (made[0], made[2])]


async def test_who_waits_for_a_copy_takes_no_lookup_from_others(
    serve: Serve, make: Make, fails: Fails, eventually: Callable[[Callable[[], bool], str], Awaitable[None]]
) -> None:
    here, away = make(seed=1), make(seed=2)
    async with serve(lookups_max=1, publish_silence_seconds=60) as served:
        await served.publish(here.messages())
        record = Record(away.name, away.version, "default", 5.0, m.file_infos(away.files()))
        versions = {(away.name, away.version): Remote(record, away.dictionary.to_json())}
        served.parts.store.sharing.others = (Replica("silent", "", alive=True, versions=versions),)  # type: ignore[misc]  # of Alone, which has none
        peers = served.parts.bringing._peers = Silent()  # type: ignore[assignment]  # nobody deletes here
        waiting = served.stub.Lookup(lookup(away))
        waiting_failed = asyncio.ensure_future(fails(waiting))
        await eventually(lambda: bool(peers.asked), "the copy has begun")
        assert len((await served.stub.Lookup(lookup(here))).states) == 4 * 6 * 8
        peers.over.set()
        assert (await waiting_failed)[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_publish_that_takes_too_long_is_ended(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve(publish_seconds_max=0.3) as served:
        over = asyncio.Event()

        async def dripping() -> Any:
            yield made.begin()
            await over.wait()

        code, text, _ = await fails(served.stub.Publish(dripping()))
        over.set()
        assert (code, "publish_seconds_max" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


async def test_names_are_bounded_and_those_that_mean_nothing_make_room(
    serve: Serve, make: Make, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointers_module, "POINTERS_MAX", 2)
    async with serve() as served:
        for name in ("a", "b"):
            await served.publish(make(name=name).messages(promote=True))
        code, text, _ = await fails(served.publish(make(name="c").messages(promote=True)))
        assert (code, "2 names" in text) == (FULL, True)
        await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="a")))
        await served.stub.Promote(pb.PromoteRequest(ref=(await served.stub.List(pb.ListRequest(name="c"))).dictionaries[0].ref))
        assert [pointer.name for pointer in served.parts.store.pointers.all()] == ["b", "c"]


async def test_room_for_a_name_is_made_while_the_loop_goes_on(serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointers_module, "POINTERS_MAX", 1)
    async with serve() as served:
        folder, threads = served.parts.folder, list[threading.Thread]()
        forget = folder.forget_pointer

        def noted(name: str) -> None:
            threads.append(threading.current_thread())
            forget(name)

        monkeypatch.setattr(folder, "forget_pointer", noted)
        await served.publish(make(name="a").messages(promote=True))
        await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="a")))
        await served.publish(make(name="b").messages(promote=True))
        assert [pointer.name for pointer in served.parts.store.pointers.all()] == ["b"]
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()


async def test_more_versions_than_whose_proof_fits_an_answer_are_deleted_one_by_one(
    serve: Serve, make: Make, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting_module, "PROOF_BYTES_MAX", 2 * 7 * 512)
    made = [make(seed=seed) for seed in range(3)]
    async with serve() as served:
        for one in made:
            await served.publish(one.messages())
        whole = pb.DeleteRequest(ref=pb.DictionaryRef(name="rules"))
        code, text, _ = await fails(served.stub.Delete(whole))
        assert (code, "one by one" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules", version=made[0].version)))
        assert len((await served.stub.Delete(whole)).files) == 2 * 4  # dictionary, manifest, record and lock


class Disk:
    """A folder that remembers tombstones."""

    def __init__(self) -> None:
        self.written: dict[Any, float] = {}

    def write_tombstones(self, tombstones: Any) -> None:
        self.written = dict(tombstones)


class Inline:
    """Computes at once."""

    async def run(self, work: Any, *arguments: Any) -> Any:
        return work(*arguments)


async def test_tombstones_are_bounded_and_forgotten_after_a_while() -> None:
    disk, now = Disk(), 1e9
    tombstones = Tombstones(disk, Inline(), lambda: now)  # type: ignore[arg-type]  # what it uses of both
    key = ("a", "ab" * 32)
    await tombstones.bury({key: now})
    assert tombstones.covers(key, now - 1)
    assert not tombstones.covers(key, now + 1)  # published again
    now += TOMBSTONE_SECONDS + 1
    await tombstones.bury({("b", f"{n:064x}"): now + n / 1e6 for n in range(TOMBSTONES_MAX + 5)})
    assert key not in disk.written
    assert len(disk.written) == TOMBSTONES_MAX
    assert ("b", f"{0:064x}") not in disk.written


def test_what_is_written_down_comes_back_and_what_is_damaged_does_not() -> None:
    for one in (
        Pin(5.0, 4.0),
        Pointer("rules", "ab" * 32, 3),
        Pointer("rules", "ab" * 32, 3, owner="t"),
        Record("rules", "ab" * 32, "t", 5.0, ()),
    ):
        assert type(one).from_json(one.to_json()) == one
        for wrong in (
            b"",
            b"[]",
            b"[" * 5000,
            b"{}",
            b"\xff",
            one.to_json()[:-1],
            one.to_json().replace(b"5.0", b'"x"').replace(b"3", b"-1"),
        ):
            with pytest.raises(InvalidArgument):
                type(one).from_json(wrong)


async def test_connections_to_other_replicas_are_bounded() -> None:
    asked: list[str] = []

    def endpoint(address: str) -> Endpoint:
        asked.append(address)
        return Endpoint(address)

    calls = ReplicaCalls(endpoint, get_seconds=1.0)
    try:
        for port in [*range(1, CHANNELS_MAX + 1), 1, CHANNELS_MAX + 1]:  # the first is used again, the second goes
            await calls._open(Replica("wanders", f"127.0.0.1:{port}", alive=True, versions={}))
        assert len(asked) == CHANNELS_MAX + 1
        assert {"127.0.0.1:1", "127.0.0.1:2"} & set(calls._channels) == {"127.0.0.1:1"}
        assert len(calls._channels) == CHANNELS_MAX
    finally:
        await calls.close()
