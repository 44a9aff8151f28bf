"""A file system that is full: what finds no room is refused and leaves nothing; a deletion, which frees it, is not."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import redis as client

from asm_store.adapters.pointer_files import PointerFiles
from asm_store.domain.tombstones import TOMBSTONES_MAX
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.dictionary import DictionarySettings, RowDtype
from treadle.contract.errors import NotFound

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Redis, Serve, Served, StartStore

Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]
Until = Callable[[Callable[[], bool], str], None]
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
LARGE = DictionarySettings(heads_joined=3, dtype=RowDtype.F32, entries=1024)  # about 800 KB


def versions(served: Served) -> set[str]:
    return {kept.key[1] for kept in served.parts.store.catalogue.all()}


def ref(made: Made) -> pb.DictionaryRef:
    return pb.DictionaryRef(name=made.name, version=made.version)


async def listed(served: Served) -> dict[str, bool]:
    """Version -> whether its name means it."""
    return {one.ref.version: one.current for one in (await served.stub.List(pb.ListRequest())).dictionaries}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """`tmp_path/data` on a file system of 2 MiB and 64 files of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=64,mode=750", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is for root, where it is allowed")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with suppress(OSError):
        for number in range(64):
            (folder / f"file-{number}").touch()


def empty(folder: Path) -> None:
    for file in folder.glob("file-*"):
        file.unlink()


def arrived(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob(".publishing-*/dictionary.safetensors"))


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob(".publishing-*"))


def fill_bytes(folder: Path) -> None:
    with suppress(OSError), (folder / "file-large").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def link_files(folder: Path, version: Path) -> None:
    for file in version.iterdir():
        (folder / f"file-{file.name}").hardlink_to(file)


async def test_nothing_is_evicted_for_what_a_full_disk_cannot_describe(
    serve: Serve, small_disk: Path, make: Make, fails: Fails, eventually: Eventually
) -> None:
    old, new = make(name="old", seed=1), make(seed=2)
    (info,) = new.files()
    async with serve(versions_max=1) as served:
        await served.publish(old.messages())
        link_files(small_disk, small_disk / "old" / old.version)  # that its bytes go frees none

        async def sending() -> AsyncGenerator[pb.PublishRequest, None]:
            for message in new.messages():
                if message.WhichOneof("event") == "end":
                    await eventually(lambda: arrived(small_disk) == info.bytes, "its file is there")
                    fill_bytes(small_disk)  # record and manifest find no room
                yield message

        code, text, _ = await fails(served.stub.Publish(sending()))
        assert (code, "no room for it on its file system" in text) == (FULL, True), text
        assert versions(served) == {old.version}
        empty(small_disk)
        await served.publish(new.messages())
        assert versions(served) == {new.version}


async def test_a_full_disk_refuses_a_publish_and_an_extend(serve: Serve, small_disk: Path, make: Make, fails: Fails) -> None:
    base, chunk, small = (
        make(seed=1, settings=LARGE),
        make(seed=2, settings=LARGE, name="chunk", prefix_text="second", first=40),
        make(seed=3),
    )
    async with serve() as served:
        for made in (base, chunk):
            await served.publish(made.messages(promote=made is base))
        extend = pb.ExtendRequest(ref=pb.DictionaryRef(name="rules"), chunk=chunk.ref)
        for call in (served.stub.Extend(extend), served.publish(make(seed=4, settings=LARGE).messages())):
            code, text, _ = await fails(call)
            assert (code, "no room for it on its file system" in text) == (FULL, True), text
        fill(small_disk)
        code, text, _ = await fails(served.publish(small.messages()))  # there is no room for its folder
        assert (code, "no room for it on its file system" in text) == (FULL, True), text
        empty(small_disk)
        assert leftovers(small_disk) == []
        assert not (await served.publish(small.messages())).existed


@pytest.mark.parametrize("full_of", [fill, fill_bytes])
async def test_a_deletion_frees_a_full_disk(serve: Serve, small_disk: Path, make: Make, full_of: Callable[[Path], None]) -> None:
    current, other = make(seed=1), make(seed=2)
    async with serve() as served:
        for made in (other, current):
            await served.publish(made.messages(promote=True))
        for made in (other, current):
            full_of(small_disk)
            await served.stub.Delete(pb.DeleteRequest(ref=ref(made)))
            assert made.version not in await listed(served)
        assert served.parts.store.pointers.of("rules").version == ""
        empty(small_disk)
        assert not (await served.publish(current.messages())).existed
    async with serve() as served:  # the deletion of the other is remembered, and earlier than that publish
        assert set(await listed(served)) == {current.version}


async def test_a_deletion_that_is_refused_on_a_full_disk_changes_nothing(
    serve: Serve, small_disk: Path, make: Make, fails: Fails
) -> None:
    current, other = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(current.messages(promote=True))
        await served.publish(other.messages())
        for reserved in (small_disk / ".pointers").glob(".reserve-*"):
            reserved.unlink()  # somebody has taken its room
        fill_bytes(small_disk)
        delete = pb.DeleteRequest(ref=ref(other))
        code, text, _ = await fails(served.stub.Delete(delete))
        assert (code, "no room for it on its file system" in text) == (FULL, True), text
        assert await listed(served) == {current.version: True, other.version: False}
        empty(small_disk)
        assert (await served.stub.Promote(pb.PromoteRequest(ref=ref(other)))).pointer.version == other.version
        assert await listed(served) == {current.version: False, other.version: True}
        assert (await served.stub.Delete(delete)).files
        assert await listed(served) == {current.version: False}


def test_a_replica_whose_disk_is_full_deletes_and_then_learns_what_found_no_room(
    start_store: StartStore, replica: Any, redis: Redis, small_disk: Path, make: Make, until: Until, tmp_path: Path
) -> None:
    old, new = make(name="old", settings=LARGE), make(seed=2)
    log = tmp_path / "store.log"
    with replica("a") as a, start_store(small_disk, "--replica", "b", "--redis-url", redis.url) as b:

        def means(version: str) -> bool:
            return any(stored.current and stored.version == version for stored in b.fabric.asm.list("rules"))

        b.fabric.asm.publish(old.folder)
        until(lambda: a.fabric.asm.status().versions == 1, "a has copied it")
        fill_bytes(small_disk)
        a.fabric.asm.publish(new.folder)
        until(lambda: "pointer rules" in log.read_text(), "b has no room for the pointer")
        a.fabric.asm.pin("old", 60.0)
        until(lambda: f"pin old {old.version}" in log.read_text(), "b goes on to the pin")
        files = b.fabric.asm.delete("old").files
        assert {file.replica for file in files} == {"a", "b"}
        until(lambda: means(new.version), "b has learnt the pointer")
    said = log.read_text()
    assert said.count("pointer rules") == said.count("pin old") == 1
    assert "begins again" not in said


def test_a_deletion_that_a_full_disk_cannot_remember_stays_in_redis_until_it_can(
    start_store: StartStore, redis: Redis, small_disk: Path, until: Until, tmp_path: Path
) -> None:
    shared, log, version = client.Redis.from_url(redis.url), tmp_path / "store.log", "0" * 64
    with start_store(small_disk, "--replica", "b", "--redis-url", redis.url) as b:
        for reserved in (small_disk / ".pointers").glob(".reserve-*"):
            reserved.unlink()  # somebody has taken its room
        fill_bytes(small_disk)
        shared.hset("treadle:asm:deleted", f"rules/{version}", repr(time.time()))
        until(lambda: "no room for what other replicas said" in log.read_text(), "b has no room for it")
        with pytest.raises(NotFound):
            b.fabric.asm.delete("rules")  # once all is exchanged again
        assert shared.hkeys("treadle:asm:deleted") == [f"rules/{version}".encode()]
        empty(small_disk)
        until(lambda: (small_disk / ".deleted.json").exists(), "b remembers it")
        assert version in (small_disk / ".deleted.json").read_text()
    assert "begins again" not in log.read_text()


def test_room_is_kept_for_the_list_of_deletions_as_it_grows(tmp_path: Path) -> None:
    files = PointerFiles(tmp_path)
    files.write_tombstones({("rules", f"{number:064x}"): 5.0 for number in range(TOMBSTONES_MAX)})
    assert (tmp_path / ".pointers" / ".reserve-deleted").stat().st_size > (tmp_path / ".deleted.json").stat().st_size
    assert files.read() == []  # what is kept is no pointer
