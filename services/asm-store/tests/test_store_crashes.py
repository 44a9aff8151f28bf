"""Stores that are killed at whatever moment, and folders that something happened to: what was published is served, nothing half."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.dictionary import Dictionary, DictionarySettings, RowDtype
from treadle.contract.dictionary_file import check_digests, map_tensors
from treadle.contract.errors import DataLoss, NotFound, TreadleError
from treadle.kernels import IMPLEMENTATION

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Process, Serve, StartStore

ROUNDS = 6
LARGE = DictionarySettings(heads_joined=3, dtype=RowDtype.F32, entries=2048)


def all_whole(process: Process) -> dict[str, Dictionary]:
    """Every version that is listed can be opened, and each of its bytes is what was published."""
    found = {}
    for stored in process.fabric.asm.list():
        with process.fabric.asm.open(stored.name, stored.version, verify=True) as mapped:
            found[stored.version] = mapped.dictionary
    return found


def current(process: Process, name: str = "rules") -> str | None:
    return next((stored.version for stored in process.fabric.asm.list(name) if stored.current), None)


def metrics(process: Process) -> list[str]:
    with urlopen(f"http://{process.metrics}/metrics", timeout=10) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return lines


def visible(folder: Path) -> set[str]:
    """Names in the data folder that are no files of the store's own."""
    return {path.name for path in folder.iterdir()} - {".lock", ".pointers", ".replica", ".deleted.json", "rules"}


@pytest.mark.slow
def test_sigkill_at_any_moment_of_a_publish_a_promote_or_a_delete_leaves_what_was_there(
    start_store: StartStore, make: Make, tmp_path: Path
) -> None:
    chance, folder = random.Random(5), tmp_path / "data"
    base, others = make(seed=100, settings=LARGE), [make(seed=seed, settings=LARGE) for seed in range(ROUNDS)]
    with start_store(folder) as process:
        process.fabric.asm.publish(base.folder)
    served, seconds = {base.version}, 0.3
    pointed: str | None = base.version
    for number, made in enumerate(others):
        with start_store(folder) as process:
            asm = process.fabric.asm
            published = threading.Event()

            def work(asm: Any = asm, made: Made = made, published: threading.Event = published, number: int = number) -> None:
                with suppress(TreadleError, grpc.RpcError):
                    asm.publish(made.folder, promote=False)
                    published.set()
                    asm.promote(f"rules@{made.version}")
                    if number % 3 == 2:
                        asm.delete(f"rules@{made.version}")

            working, begun = threading.Thread(target=work), time.monotonic()
            working.start()
            if number == 0:
                working.join()  # how long it takes, to choose moments within that
                seconds = time.monotonic() - begun
            else:
                working.join(chance.uniform(0, 1.2 * seconds))
            process.kill()
            working.join()
        with start_store(folder) as process:
            found = set(all_whole(process))
            assert found >= served - {others[n].version for n in range(number + 1) if n % 3 == 2}
            assert found <= {base.version, *(one.version for one in others[: number + 1])}
            if published.is_set() and number % 3 != 2:
                assert made.version in found  # its answer had come
            now = current(process)
            assert now in {pointed, made.version, *([None] if number % 3 == 2 else [])}  # only a delete takes a pointer away
            assert now is None or now in found
            assert not visible(folder)
            served, pointed = found, now
            assert process.stop() == 0
    assert base.version in served


@pytest.mark.slow
def test_sigkill_while_a_version_is_extended_leaves_both_that_it_comes_from(
    start_store: StartStore, make: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    base, chunk = make(seed=1, settings=LARGE), make(seed=2, settings=LARGE, name="chunk", prefix_text="chunk", first=40)
    with start_store(folder) as process:
        process.fabric.asm.publish(base.folder)
        process.fabric.asm.publish(chunk.folder, promote=False)
        begun = time.monotonic()
        whole = process.fabric.asm.extend("rules", f"chunk@{chunk.version}", promote=False).version
        seconds = time.monotonic() - begun
        process.fabric.asm.delete(f"rules@{whole}")
    chance = random.Random(7)
    for _ in range(3):
        with start_store(folder) as process:
            extending = threading.Thread(
                target=lambda asm=process.fabric.asm: _quietly(lambda: asm.extend("rules", f"chunk@{chunk.version}", promote=True))
            )
            extending.start()
            extending.join(chance.uniform(0, seconds))
            process.kill()
            extending.join()
        with start_store(folder) as process:
            found = set(all_whole(process))
            assert {base.version, chunk.version} <= found <= {base.version, chunk.version, whole}
            assert current(process) in {base.version, whole}
            assert visible(folder) == {"chunk"}
            assert process.stop() == 0


def _quietly(work: Callable[[], Any]) -> None:
    with suppress(TreadleError, grpc.RpcError):
        work()


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: tear(folder / "dictionary.safetensors"), lambda folder: (folder / "dictionary.safetensors").unlink(),
        lambda folder: tear(folder / "manifest.json"), lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "record.json").unlink(), lambda folder: (folder / "record.json").write_text("{"),
    ],
)  # fmt: skip
async def test_a_torn_version_is_set_aside_at_the_start_and_counted(
    serve: Serve, make: Make, damage: Callable[[Path], None]
) -> None:
    torn, whole = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(torn.messages())
        await served.publish(whole.messages(promote=True))
        data = served.parts.folder.path
    damage(data / "rules" / torn.version)
    async with serve() as served:
        listed = (await served.stub.List(pb.ListRequest())).dictionaries
        assert [one.ref.version for one in listed] == [whole.version]
        assert served.metric("versions_torn_total") == 1
        assert [path.name.startswith(f".torn-rules-{torn.version}") for path in data.glob(".torn-*")] == [True]
        assert not (await served.publish(torn.messages())).existed  # it can come again


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def test_a_flipped_bit_is_found_by_a_full_start(serve: Serve, make: Make) -> None:
    made = make(prefix_kv=True)
    async with serve() as served:
        await served.publish(made.messages())
        folder = served.parts.folder.path / "rules" / made.version
    flip(folder / "prefix_kv.safetensors")
    async with serve(digests=True) as served:
        assert served.metric("versions_torn_total") == 1
        assert not (await served.stub.List(pb.ListRequest())).dictionaries


def test_a_flipped_bit_is_found_in_the_background_while_the_rest_is_served(
    start_store: StartStore, make: Make, tmp_path: Path, until: Callable[[Callable[[], bool], str], None]
) -> None:
    torn, whole = make(seed=1), make(seed=2)
    with start_store(tmp_path / "data") as process:
        process.fabric.asm.publish(torn.folder)
        process.fabric.asm.publish(whole.folder)
        assert process.stop() == 0
    flip(tmp_path / "data" / "rules" / torn.version / "dictionary.safetensors")
    with start_store(tmp_path / "data") as process:
        until(lambda: [stored.version for stored in process.fabric.asm.list()] == [whole.version], "it is set aside")
        until(lambda: "treadle_asm_versions_torn_total 1.0" in metrics(process), "it is counted, after its files are aside")
        with pytest.raises(NotFound):
            process.fabric.asm.open("rules", torn.version)
        with process.fabric.asm.open("rules") as mapped:
            check_digests(mapped.tensors, mapped.dictionary)


async def test_a_torn_version_that_cannot_be_set_aside_is_not_served_and_the_rest_is_compared(
    serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn, whole = [make(seed=seed) for seed in (1, 2)], make(seed=3)
    async with serve(verify_bytes_per_second=1 << 30) as served:
        for one in (*torn, whole):
            await served.publish(one.messages())
        for one in torn:
            flip(served.parts.folder.path / "rules" / one.version / "dictionary.safetensors")
        tried: list[str] = []

        def fail(stored: Any) -> None:
            tried.append(stored.key[1])
            raise OSError("the file system is read-only")

        monkeypatch.setattr(served.parts.folder, "set_aside", fail)
        await served.parts.verifying.run()
        assert sorted(tried) == sorted(one.version for one in torn)
        assert [one.ref.version for one in (await served.stub.List(pb.ListRequest())).dictionaries] == [whole.version]
        assert served.metric("versions_torn_total") == 2


async def test_a_manifest_of_another_release_is_left_as_it_is(serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        path = served.parts.folder.path / "rules" / made.version
    monkeypatch.setattr("treadle.contract.dictionary.SCHEMA", "treadle.dictionary/2")
    async with serve() as served:
        assert not (await served.stub.List(pb.ListRequest())).dictionaries
        assert served.metric("versions_torn_total") == 0
    assert map_tensors(path / "dictionary.safetensors", made.dictionary)


async def test_a_start_finishes_a_deletion_that_was_killed_also_where_replicas_share_a_redis(serve: Serve, make: Make) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        data = served.parts.folder.path
    (data / ".deleted.json").write_text(json.dumps([["rules", made.version, time.time()]]))  # the first step of a deletion
    async with serve(redis_url="redis://127.0.0.1:1/0") as served:
        assert not (await served.stub.List(pb.ListRequest())).dictionaries
        assert served.parts.store.pointers.of("rules").version == ""
    assert not (data / "rules").exists()


def put_in_what_cannot_be_unlinked(served: Any, made: Made) -> Path:
    """A folder in a version's folder: the data folder's path."""
    data: Path = served.parts.folder.path
    (data / made.name / made.version / "odd").mkdir()
    return data


async def test_what_cannot_be_taken_apart_is_evicted_all_the_same_and_swept_at_the_next_start(serve: Serve, make: Make) -> None:
    old, new = make(name="old", seed=1), make(seed=2)
    async with serve(versions_max=1) as served:
        await served.publish(old.messages())
        data = put_in_what_cannot_be_unlinked(served, old)
        await served.publish(new.messages())
        assert [one.ref.name for one in (await served.stub.List(pb.ListRequest())).dictionaries] == ["rules"]
        assert not (data / "old").exists()
        assert len(list(data.glob(".removing-*"))) == 1
    async with serve() as served:
        assert not list(data.glob(".removing-*"))
        assert [kept.key for kept in served.parts.store.catalogue.all()] == [("rules", new.version)]


async def test_the_proof_of_a_deletion_does_not_call_freed_what_is_not(serve: Serve, make: Make) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        put_in_what_cannot_be_unlinked(served, made)
        answer = await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules")))
        freed = {Path(file.path).name: file.freed for file in answer.files}
        assert (freed.pop("odd"), set(freed.values()), len(freed)) == (False, {True}, 4)
        assert not served.parts.store.catalogue.all()


async def test_a_version_that_cannot_be_deleted_now_is_kept_and_can_be_deleted_later(
    serve: Serve, make: Make, fails: Callable[[Any], Any]
) -> None:
    made, other = make(seed=1), make(seed=2)
    async with serve() as served:
        for one in (made, other):
            await served.publish(one.messages())
        lock = served.parts.folder.path / "rules" / made.version / "lock"
        lock.unlink()
        lock.symlink_to("record.json")  # a link is not followed: the lock cannot be taken
        delete = pb.DeleteRequest(ref=pb.DictionaryRef(name="rules"))
        code, text, _ = await fails(served.stub.Delete(delete))
        assert (code, made.version in text, other.version in text) == (grpc.StatusCode.UNAVAILABLE, True, False)
        assert [kept.key[1] for kept in served.parts.store.catalogue.all()] == [made.version]
        assert [one.ref.version for one in (await served.stub.List(pb.ListRequest())).dictionaries] == [made.version]
        assert (await served.publish(other.messages(promote=True))).dictionary.current
        refused = [await fails(served.stub.Promote(pb.PromoteRequest(ref=pb.DictionaryRef(name="rules", version=made.version))))]
        refused.append(await fails(served.publish(made.messages(promote=True))))
        assert [(code, "delete it again" in text) for code, text, _ in refused] == [
            (grpc.StatusCode.NOT_FOUND, True), (grpc.StatusCode.UNAVAILABLE, True),
        ]  # fmt: skip
        assert served.parts.store.pointers.of("rules").version == other.version
        lock.unlink()
        lock.touch()
        answer = await served.stub.Delete(delete)
        assert {file.ref.version for file in answer.files} >= {made.version}
        assert not (served.parts.folder.path / "rules").exists()


async def test_a_version_whose_pointer_cannot_be_cleared_is_listed_until_it_is_deleted(
    serve: Serve, make: Make, fails: Callable[[Any], Any]
) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        pointer, delete = (
            served.parts.folder.path / ".pointers" / "rules.json",
            pb.DeleteRequest(ref=pb.DictionaryRef(name="rules")),
        )
        pointer.unlink()
        pointer.mkdir()  # no file takes its place
        await fails(served.stub.Delete(delete))
        assert [one.ref.version for one in (await served.stub.List(pb.ListRequest())).dictionaries] == [made.version]
        pointer.rmdir()
        assert (await served.stub.Delete(delete)).files
        assert not (await served.stub.List(pb.ListRequest())).dictionaries


@pytest.mark.parametrize("name", ["x.partial", "store.lock", "lock"])
async def test_a_name_like_a_file_of_the_store_is_a_name(serve: Serve, make: Make, name: str) -> None:
    made = make(name=name)
    async with serve() as served:
        await served.publish(made.messages())
        (served.parts.folder.path / ".deleted.json.partial").write_text("left by a killed process")
        data = served.parts.folder.path
    async with serve() as served:
        listed = (await served.stub.List(pb.ListRequest())).dictionaries
        assert [one.ref.version for one in listed] == [made.version]
        assert not list(data.glob(".*.partial"))


def test_two_stores_do_not_share_a_folder(start_store: StartStore, tmp_path: Path) -> None:
    with start_store(tmp_path / "data"), pytest.raises(AssertionError, match="another asm-store"), start_store(tmp_path / "data"):
        pass


def truncate(process: Process, made: Any) -> None:
    """The last tensor of what was published loses three quarters; keys stay."""
    with process.fabric.asm.open(made.dictionary.name, made.version) as mapped:
        file = mapped.path
    file.chmod(0o640)
    with file.open("r+b") as held:
        held.truncate(file.stat().st_size - made.tensors["layers.2.states"].nbytes * 3 // 4)


@pytest.mark.parametrize("torn", ["base", "chunk"])
def test_extending_a_file_that_was_truncated_is_data_loss_and_the_store_goes_on(
    start_store: StartStore, make: Make, tmp_path: Path, torn: str
) -> None:
    base, chunk = make(seed=1, settings=LARGE), make(seed=2, settings=LARGE, name="chunk", prefix_text="chunk", first=40)
    with start_store(tmp_path / "data") as process:
        asm = process.fabric.asm
        for made in (base, chunk):
            asm.publish(made.folder, promote=made is base)
        truncate(process, {"base": base, "chunk": chunk}[torn])
        with pytest.raises(DataLoss, match="states"):
            asm.extend("rules", f"chunk@{chunk.version}", promote=True)
        assert {stored.version for stored in asm.list()} == {base.version, chunk.version}
        assert process.child.poll() is None


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="numpy reads a truncated mapping without a guard")
def test_a_lookup_in_a_file_that_was_truncated_is_data_loss_and_the_store_goes_on(
    start_store: StartStore, make: Make, tmp_path: Path
) -> None:
    made, whole = make(settings=LARGE), make(seed=1, name="whole")
    model = made.dictionary.model
    queries = np.random.default_rng(2).standard_normal((50, model.heads, model.head_dim), dtype=np.float32)
    with start_store(tmp_path / "data") as process:
        asm = process.fabric.asm
        stored, other = (asm.publish(one.folder).stored for one in (made, whole))
        asm.lookup(stored, 2, queries)
        truncate(process, made)
        with pytest.raises(DataLoss, match="states"):
            asm.lookup(stored, 2, queries)
        asm.lookup(other, 2, queries)
        assert process.child.poll() is None
