"""Replicas that share a Redis: real processes, a real redis-server, and its death."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
import redis as client

from asm_store.adapters import redis_words as words
from treadle.client import Fabric
from treadle.contract.errors import AccessDenied, NotFound, Overtaken, TreadleError, Unavailable

if TYPE_CHECKING:
    from tests.conftest import Make, Process, Redis, Serve

Until = Callable[[Callable[[], bool], str], None]
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]


@contextmanager
def two(replica: Any, until: Until) -> Iterator[tuple[Process, Process]]:
    with replica("a") as a, replica("b") as b:
        until(lambda: sees(a, "b") and sees(b, "a"), "the replicas know each other")
        yield a, b


def sees(process: Process, *names: str) -> bool:
    return process.fabric.asm.status().replicas == names


def means(process: Process, name: str = "rules") -> str | None:
    return next((stored.version for stored in process.fabric.asm.list(name) if stored.current), None)


def lists(fabric: Fabric, owners: dict[str, str]) -> bool:
    return {each.name: each.tenant for each in fabric.asm.list()} == owners


def kept(folder: Path, name: str = "rules") -> set[str]:
    with suppress(FileNotFoundError):  # the folder of a name goes with its last version
        return {path.name for path in folder.joinpath(name).iterdir()}
    return set()


def has_copied(process: Process, folder: Path, version: str) -> bool:
    """Whether it keeps that version alone, and answers for it: its files are there a moment before."""
    return kept(folder) == {version} and process.fabric.asm.status().versions == 1


def metric(process: Process, line: str) -> float:
    with urlopen(f"http://{process.metrics}/metrics", timeout=10) as answer:
        return sum(float(each.rpartition(" ")[2]) for each in answer.read().decode().splitlines() if each.startswith(line))


def test_what_is_promoted_at_one_replica_is_copied_to_the_others_and_opened_there(
    replica: Any, make: Make, until: Until, tmp_path: Path
) -> None:
    current, spare = make(seed=1, prefix_kv=True), make(seed=2)
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(spare.folder, promote=False)
        until(lambda: len(b.fabric.asm.list()) == 1, "b lists it")
        assert not kept(tmp_path / "b")  # it lies at a alone
        with b.fabric.asm.open("rules", spare.version[:12], verify=True) as mapped:  # asked for, it comes
            assert mapped.version == spare.version
        a.fabric.asm.publish(current.folder)
        until(lambda: kept(tmp_path / "b") == {current.version, spare.version}, "b has copied what the name means")
        until(lambda: means(b) == current.version, "b serves it")
        # the folder is whole, and served, a moment before the fetch that brought it has ended and is counted
        until(lambda: metric(b, 'treadle_asm_fetches_total{outcome="ok"}') == 2, "b counts both")
        assert a.fabric.asm.list("rules")[0].published_at_seconds == b.fabric.asm.list("rules")[0].published_at_seconds
        a.kill()
        with b.fabric.asm.open("rules", verify=True) as mapped:
            assert mapped.version == current.version


def test_replicas_with_nothing_to_say_leave_redis_and_each_other_alone(
    replica: Any, redis: Redis, make: Make, until: Until
) -> None:
    made = make()
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(made.folder)
        a.fabric.asm.delete(made.name)  # a tombstone stays with both
        until(lambda: not b.fabric.asm.list(), "b has heard it")
        time.sleep(1.0)  # what was to be told is told
        before = commands(redis)
        time.sleep(3.0)
        assert commands(redis) - before < 3 * 60  # some 20 a second; each that made others read made thousands


def commands(redis: Redis) -> int:
    with client.Redis.from_url(redis.url) as connection:
        return int(connection.info("stats")["total_commands_processed"])


def test_of_two_that_flip_a_pointer_at_once_one_is_overtaken(replica: Any, make: Make, until: Until) -> None:
    base, one, other = (make(seed=seed) for seed in range(3))
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(base.folder)
        a.fabric.asm.publish(one.folder, promote=False)
        b.fabric.asm.publish(other.folder, promote=False)
        outcomes, ready = list[object](), threading.Barrier(2)

        def flip(process: Process, version: str) -> None:
            ready.wait(10)
            try:
                outcomes.append(process.fabric.asm.promote(f"rules@{version}", base.version).version)
            except Overtaken as error:
                outcomes.append(error)

        threads = [threading.Thread(target=flip, args=pair) for pair in ((a, one.version), (b, other.version))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(isinstance(outcome, Overtaken) for outcome in outcomes) == [False, True]
        winner = next(outcome for outcome in outcomes if isinstance(outcome, str))
        until(lambda: means(a) == means(b) == winner, "both know who won")


def test_of_two_tenants_that_publish_a_new_name_at_once_one_has_it(replica: Any, make: Make, until: Until, tmp_path: Path) -> None:
    for tenant in "xy":
        (tmp_path / tenant).write_text(f"key-{tenant}")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants: [{{name: x, token_file: {tmp_path}/x}}, {{name: y, token_file: {tmp_path}/y}}]")
    (tmp_path / "peers").write_text("key-peers")
    flags = ("--tenants-file", str(tenants), "--api-key-file", str(tmp_path / "peers"), "--peer-key-file", str(tmp_path / "peers"))
    with (
        replica("a", *flags) as a, replica("b", *flags) as b,
        Fabric(asm=a.address, key="key-x") as x, Fabric(asm=b.address, key="key-y") as y,
    ):  # fmt: skip
        until(lambda: x.asm.status().replicas == ("b",) and y.asm.status().replicas == ("a",), "the replicas know each other")
        names, ready = [f"new-{number}" for number in range(12)], threading.Barrier(2)
        outcomes: dict[str, list[object]] = {name: [] for name in names}

        def publish(fabric: Fabric, folders: list[Path]) -> None:
            for name, folder in zip(names, folders, strict=True):
                ready.wait(30)
                try:
                    outcomes[name].append(fabric.asm.publish(folder).stored.tenant)
                except TreadleError as error:
                    outcomes[name].append(error)

        made = [(fabric, [make(name=name, seed=seed).folder for name in names]) for seed, fabric in enumerate((x, y))]
        threads = [threading.Thread(target=publish, args=pair) for pair in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for name, (one, other) in outcomes.items():
            (refused,) = (outcome for outcome in (one, other) if not isinstance(outcome, str))
            assert isinstance(refused, AccessDenied), (name, refused)
            assert "another" in str(refused), (name, refused)
        owners = {name: next(each for each in pair if isinstance(each, str)) for name, pair in outcomes.items()}
        for fabric in (x, y):
            until(partial(lists, fabric, owners), "each lists the winners alone")


def test_watchers_of_every_replica_hear_of_a_flip_and_find_its_version(replica: Any, make: Make, until: Until) -> None:
    first, second = make(seed=1), make(seed=2)
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(first.folder)
        until(lambda: means(b) == first.version, "b knows the first")
        told = list[str]()

        def follow() -> None:
            with suppress(TreadleError):
                for pointers in b.fabric.asm.watch(["rules"]):
                    told.extend(pointer.version for pointer in pointers)
                    if second.version in told:
                        b.fabric.asm.open("rules", second.version).close()
                        told.append("opened")
                        return

        following = threading.Thread(target=follow)
        following.start()
        until(lambda: told == [first.version], "the watch has begun")
        a.fabric.asm.publish(second.folder)
        following.join(20)
        assert told == [first.version, second.version, "opened"]


def test_who_hears_at_another_replica_that_a_name_means_nothing_is_told_of_none_of_its_versions(
    replica: Any, make: Make, until: Until
) -> None:
    made = [make(seed=seed).folder for seed in range(3)]
    with two(replica, until) as (a, b):
        listed, ready, heard = list[int](), threading.Event(), threading.Event()

        def follow() -> None:
            with suppress(TreadleError):
                for pointers in b.fabric.asm.watch(["rules"]):
                    if any(not pointer.version for pointer in pointers):
                        listed.append(len(b.fabric.asm.list("rules")))
                        heard.set()
                    ready.set()

        following = threading.Thread(target=follow, daemon=True)
        following.start()
        assert ready.wait(20)
        for _ in range(5):
            heard.clear()
            for folder in made:
                a.fabric.asm.publish(folder)
            until(lambda: means(b) is not None and len(b.fabric.asm.list("rules")) == 3, "b knows them")
            a.fabric.asm.delete("rules")
            until(partial(heard.wait, 0.01), "b's watcher has heard")
        assert listed == [0] * 5


def test_a_pin_at_one_replica_pins_the_copies_of_all(replica: Any, make: Make, until: Until, tmp_path: Path) -> None:
    made = make()
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(made.folder)
        until(lambda: kept(tmp_path / "b") == {made.version}, "b has a copy")
        end = a.fabric.asm.pin("rules", 60.0)
        until(lambda: b.fabric.asm.list()[0].pinned_until_seconds == end, "b has pinned it")
        b.fabric.asm.unpin("rules")
        until(lambda: a.fabric.asm.list()[0].pinned_until_seconds == 0, "a has unpinned it")


async def test_of_what_another_replica_keeps_only_the_new_is_read_and_not_on_the_event_loop(
    serve: Serve, replica: Any, redis: Redis, make: Make, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, more = [make(seed=seed) for seed in range(10)], make(seed=10)
    read, plain = list[tuple[str, bool]](), words.read_remote

    def seen(text: bytes) -> Any:
        remote = plain(text)
        read.append((remote.record.version, threading.current_thread() is threading.main_thread()))
        return remote

    monkeypatch.setattr(words, "read_remote", seen)
    with replica("a") as a:
        for made in first:
            await asyncio.to_thread(a.fabric.asm.publish, made.folder, promote=False)
        async with serve(replica="b", redis_url=redis.url) as b:

            def published_at(version: str) -> float | None:
                found = b.parts.store.catalogue.remotes().get(("rules", version))
                return None if found is None else found.record.published_at_seconds

            await eventually(lambda: all(published_at(made.version) for made in first), "b knows what a keeps")
            read.clear()
            await asyncio.to_thread(a.fabric.asm.publish, more.folder, promote=False)
            await eventually(lambda: published_at(more.version) is not None, "b knows one more")
            again = first[0]
            await asyncio.to_thread(a.fabric.asm.delete, f"rules@{again.version}")
            await eventually(lambda: published_at(again.version) is None, "b knows of the deletion")
            at = (await asyncio.to_thread(a.fabric.asm.publish, again.folder, promote=False)).stored.published_at_seconds
            await eventually(lambda: published_at(again.version) == at, "b knows that it was published again")
            assert read == [(more.version, False), (again.version, False)]


def test_a_pin_makes_nobody_read_again_what_a_replica_keeps(
    replica: Any, make: Make, redis: Redis, until: Until, tmp_path: Path
) -> None:
    made, shared = make(), client.Redis.from_url(redis.url)

    def lease() -> Any:
        return json.loads(shared.get("treadle:asm:replica:a") or b"{}")

    with two(replica, until) as (a, b):
        a.fabric.asm.publish(made.folder)
        until(lambda: has_copied(b, tmp_path / "b", made.version), "b has a copy")
        until(lambda: bool(lease()), "a renews its lease")
        before = lease()
        end = a.fabric.asm.pin("rules", 60.0)
        until(lambda: b.fabric.asm.list()[0].pinned_until_seconds == end, "b has pinned it")
        until(lambda: bool(lease()), "a renews its lease")
        assert lease() == before


def test_delete_takes_every_copy_and_one_that_was_away_deletes_its_own(
    replica: Any, make: Make, until: Until, tmp_path: Path
) -> None:
    gone, again = make(seed=1), make(seed=2)
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(gone.folder)
        until(lambda: has_copied(b, tmp_path / "b", gone.version), "b has a copy")
        deleted = a.fabric.asm.delete(f"rules@{gone.version}")
        assert {file.replica for file in deleted.files} == {"a", "b"}
        assert all(file.freed for file in deleted.files)
        assert not deleted.pending_replicas
        assert not kept(tmp_path / "a")
        assert not kept(tmp_path / "b")
        b.fabric.asm.publish(again.folder)
        until(lambda: has_copied(a, tmp_path / "a", again.version), "a has a copy")
        b.kill()
        until(lambda: sees(a), "b is away")
        deleted = a.fabric.asm.delete("rules")
        assert {file.replica for file in deleted.files} == {"a"}
        assert deleted.pending_replicas == ("b",)
        assert kept(tmp_path / "b") == {again.version}
        with replica("b") as b_again:
            until(lambda: not kept(tmp_path / "b"), "b has heard of it and deleted its copy")
            assert b_again.fabric.asm.list() == ()
            assert means(b_again) is None


def test_a_replica_that_was_killed_while_it_deleted_starts_again_and_clears_the_pointer_of_all(
    replica: Any, make: Make, until: Until, tmp_path: Path
) -> None:
    made = make()
    with replica("a") as a:
        a.fabric.asm.publish(made.folder)
        a.kill()
    (tmp_path / "a" / ".deleted.json").write_text(json.dumps([["rules", made.version, time.time()]]))  # as far as it came
    with replica("b") as b, replica("a") as again:
        until(lambda: sees(again, "b") and sees(b, "a"), "the replicas know each other")
        assert again.fabric.asm.list() == ()
        until(lambda: [p.version for p in next(iter(b.fabric.asm.watch(["rules"])))] == [""], "the name means nothing at b")


def test_a_name_that_has_meant_nothing_for_long_is_forgotten_by_all(
    replica: Any, make: Make, redis: Redis, until: Until, tmp_path: Path
) -> None:
    made, shared = make(), client.Redis.from_url(redis.url)
    with replica("a") as a:
        a.fabric.asm.publish(made.folder)
        a.fabric.asm.delete("rules")
        (entry,) = shared.hgetall("treadle:asm:pointers").values()
        assert json.loads(entry)["cleared_at_seconds"] > time.time() - 60
        a.kill()
    old = json.dumps(json.loads(entry) | {"cleared_at_seconds": time.time() - 91 * 86_400})
    shared.hset("treadle:asm:pointers", "rules", old)
    path = tmp_path / "a" / ".pointers" / "rules.json"
    path.write_text(old)
    with replica("a") as a:
        until(lambda: not shared.hgetall("treadle:asm:pointers") and not path.exists(), "it is forgotten")
        a.fabric.asm.publish(made.folder)
        assert means(a) == made.version
        (entry,) = shared.hgetall("treadle:asm:pointers").values()
        assert json.loads(entry)["revision"] == 1


def test_a_replica_that_cleared_a_name_while_it_was_cut_off_takes_what_the_others_said_but_no_version_that_it_deleted(
    replica: Any, make: Make, redis: Redis, until: Until, tmp_path: Path
) -> None:
    made = {name: [make(name=name, seed=seed) for seed in range(2)] for name in ("rules", "other")}
    with replica("a") as a:
        for first, second in made.values():
            a.fabric.asm.publish(first.folder)
            a.fabric.asm.publish(second.folder, promote=False)
        redis.kill()
        a.fabric.asm.delete(f"rules@{made['rules'][0].version}")
        a.fabric.asm.delete("other")
        a.kill()
    redis.start()
    shared = client.Redis.from_url(redis.url)
    for name, (_, second) in made.items():  # the second change of each name, said by another meanwhile
        shared.hset("treadle:asm:pointers", name, json.dumps({"name": name, "version": second.version, "revision": 2}))

    def said(name: str) -> tuple[str, int]:
        entry = json.loads(shared.hgetall("treadle:asm:pointers")[name.encode()])
        return entry["version"], entry["revision"]

    with replica("a") as a:
        until(lambda: means(a) == made["rules"][1].version, "a means what the others mean")
        assert said("rules") == (made["rules"][1].version, 2)
        until(lambda: said("other") == ("", 3), "a has said that it deleted that version")
        assert [path.name for path in (tmp_path / "a").glob("other")] == []


def test_a_dead_redis_stops_nothing_that_is_here_and_what_it_lost_is_written_again(
    replica: Any, make: Make, redis: Redis, until: Until, tmp_path: Path
) -> None:
    first, second, third = make(seed=1), make(seed=2), make(seed=3)
    with two(replica, until) as (a, b):
        a.fabric.asm.publish(first.folder)
        until(lambda: kept(tmp_path / "b") == {first.version}, "b has a copy")
        redis.kill()
        until(lambda: metric(a, "treadle_asm_sharing_stale") == 1.0, "a has noticed")
        for process in (a, b):
            with process.fabric.asm.open("rules", verify=True) as mapped:
                assert mapped.version == first.version
        published = a.fabric.asm.publish(second.folder, promote=False)
        assert not published.existed
        with pytest.raises(Unavailable, match="Redis"):
            a.fabric.asm.promote(f"rules@{second.version}")
        with pytest.raises(Unavailable, match="published and not promoted"):
            a.fabric.asm.publish(third.folder)
        deleted = a.fabric.asm.delete(f"rules@{third.version}")
        assert any("unknown" in name for name in deleted.pending_replicas)
        with replica("c") as c:  # a start without Redis, too
            assert c.fabric.asm.list() == ()
        redis.start()  # it has forgotten everything
        until(lambda: sees(a, "b") and sees(b, "a"), "the replicas are there again")
        until(lambda: metric(a, "treadle_asm_sharing_stale") == 0.0, "a has noticed that too")
        assert means(a) == means(b) == first.version
        a.fabric.asm.promote(f"rules@{second.version}", first.version)
        until(lambda: means(b) == second.version, "b has heard of it")
        with replica("d") as d:
            until(lambda: means(d) == second.version, "a new one learns what the name means")
            with pytest.raises(NotFound):
                d.fabric.asm.open("rules", third.version)
