"""Calls that meet: a name taken while another publishes into it, a version that goes while it is promoted, a peer that says nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from asm_store import messages as m
from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.pointers import Pointers
from asm_store.domain.ports import Alone, Announced, End, Piece, Remote, Replica
from asm_store.domain.tenancy import Caller, check_may_change
from asm_store.domain.versions import Pointer, Record
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.errors import AccessDenied

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Serve

Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]


def ref(made: Made) -> pb.DictionaryRef:
    return pb.DictionaryRef(name=made.name, version=made.version)


def announced(made: Made, at: float = 5.0) -> Announced:
    return Announced(made.dictionary.to_json(), m.file_infos(made.files()), b"", "default", published_at_seconds=at)


def remote(made: Made, tenant: str = "default", at: float = 5.0) -> Remote:
    return Remote(Record(made.name, made.version, tenant, at, m.file_infos(made.files())), made.dictionary.to_json())


async def test_a_name_that_another_tenant_takes_while_bytes_come_is_not_shared(
    serve: Serve, make: Make, tmp_path: Path, fails: Fails
) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"key-{name}")
    path = tmp_path / "tenants.yaml"
    path.write_text(f"tenants: [{{name: a, token_file: {tmp_path}/a}}, {{name: b, token_file: {tmp_path}/b}}]")
    first, second = make(seed=1), make(seed=2)
    async with serve(tenants_file=path, key="key-a") as served:
        begun, taken = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncGenerator[pb.PublishRequest, None]:
            for message in second.messages(promote=True):
                if message.WhichOneof("event") == "end":
                    begun.set()
                    await taken.wait()
                yield message

        publishing = asyncio.ensure_future(fails(served.stub.Publish(slow(), metadata=(("authorization", "Bearer key-b"),))))
        await asyncio.wait_for(begun.wait(), 20)
        await served.publish(first.messages(promote=True))
        taken.set()
        code, text, _ = await publishing
        assert (code, "tenant b" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert [kept.key[1] for kept in served.parts.store.catalogue.all()] == [first.version]
        assert served.parts.store.pointers.of("rules").version == first.version


def test_the_names_of_a_replica_that_is_away_are_still_its_tenants(make: Make) -> None:
    made, sharing = make(), Alone("here")
    sharing.others = (Replica("away", "", alive=False, versions={(made.name, made.version): remote(made, "a")}),)
    pointers = Pointers(None, sharing, None, Changes(), watchers_max=1)  # type: ignore[arg-type]  # none is written
    catalogue = Catalogue(pointers, sharing)
    check_may_change(catalogue, Caller("a", admin=False), made.name)
    with pytest.raises(AccessDenied, match="another's"):
        check_may_change(catalogue, Caller("b", admin=False), made.name)


async def test_what_is_deleted_while_it_is_promoted_is_meant_by_nothing(
    serve: Serve, make: Make, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        store = served.parts.store
        flip = store.pointers.promote

        async def promote(*arguments: Any) -> Any:
            await served.stub.Delete(pb.DeleteRequest(ref=ref(made)))
            return await flip(*arguments)

        monkeypatch.setattr(store.pointers, "promote", promote)
        code, text, _ = await fails(served.stub.Promote(pb.PromoteRequest(ref=ref(made))))
        assert (code, "deleted meanwhile" in text) == (grpc.StatusCode.NOT_FOUND, True)
        assert store.pointers.of("rules").version == ""


async def test_nobody_is_told_of_a_version_whose_files_are_being_evicted(
    serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [make(seed=seed) for seed in range(3)]
    async with serve(versions_max=2) as served:
        delete, listed, read = served.parts.folder.delete, list[bool](), [True, False]

        def seen(stored: Any, *, unread_only: bool) -> Any:
            listed.append(served.parts.store.catalogue.get(stored.key) is not None)
            return None if read.pop(0) else delete(stored, unread_only=unread_only)

        monkeypatch.setattr(served.parts.folder, "delete", seen)
        for one in made:
            await served.publish(one.messages())
        assert listed == [False, False]
        kept = served.parts.store.catalogue.all()
        assert {one.key[1] for one in kept} == {made[0].version, made[2].version}  # the first was being read, and is back
        assert not any(one.gone for one in kept)


async def test_a_replica_that_asks_while_a_tombstone_deletes_gets_the_proof(
    serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        deleting, delete = served.parts.store.deleting, served.parts.folder.delete
        going, asked = threading.Event(), threading.Event()

        def slow(*arguments: Any, **options: Any) -> Any:
            going.set()
            asked.wait(20)
            return delete(*arguments, **options)

        monkeypatch.setattr(served.parts.folder, "delete", slow)
        at = time.time()
        obeying = asyncio.ensure_future(deleting.obey({(made.name, made.version): at}))
        assert await asyncio.to_thread(going.wait, 20)
        asking = asyncio.ensure_future(deleting.delete(made.name, made.version, here_only=True, at_seconds=at))
        await asyncio.sleep(0)  # it has begun
        asked.set()
        await obeying
        assert {file.version for file in (await asking).files} == {made.version}


async def test_a_deletion_that_is_refused_here_buries_nothing_that_others_keep(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve() as served:
        versions = {(made.name, made.version): remote(made)}
        served.parts.store.sharing.others = (Replica("other", "", alive=True, versions=versions),)  # type: ignore[misc]  # of Alone, which has none
        for beginning in (made.version[:4], made.version[:12]):
            what = pb.DictionaryRef(name=made.name, version=beginning)
            code, _, _ = await fails(served.stub.Delete(pb.DeleteRequest(ref=what, here_only=True)))
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert not served.parts.store._tombstones.all()


async def test_a_proof_is_of_its_deletion_and_of_no_later_one(serve: Serve, make: Make, fails: Fails) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        at = time.time()
        await served.parts.store.deleting.obey({(made.name, made.version): at})  # and nobody asks for the proof
        served.parts.store.sharing.others = (  # type: ignore[misc]  # of Alone, which has none
            Replica("other", "", alive=False, versions={(made.name, made.version): remote(made)}),
        )
        answer = await served.stub.Delete(pb.DeleteRequest(ref=ref(made)))
        assert (list(answer.files), list(answer.pending_replicas)) == ([], ["other"])


async def test_what_is_published_again_behind_its_deletion_stays_though_a_clock_is_ahead(serve: Serve, make: Make) -> None:
    made = make()
    key = made.name, made.version
    async with serve() as served:
        deleting, at = served.parts.store.deleting, time.time()
        await served.publish(made.messages(promote=True))
        deleting._clock = lambda: at + 3600  # of this replica; the one that asks says when
        await deleting.delete(*key, here_only=True, at_seconds=at + 1)
        assert served.parts.store._tombstones.deleted_at(key) == at + 1
        await served.publish(made.messages(promote=True))
        await deleting.obey({key: at + 1})  # as Redis has it of the one that asked
        assert served.parts.store.pointers.of(made.name).version == made.version


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, time.time() + 100 * 86_400])
async def test_a_deletion_is_of_a_time_that_a_clock_may_show(serve: Serve, make: Make, fails: Fails, seconds: float) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        code, text, _ = await fails(served.stub.Delete(pb.DeleteRequest(ref=ref(made), here_only=True, deleted_at_seconds=seconds)))
        assert (code, "deleted_at_seconds" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert served.parts.store.catalogue.all()


class TwoPeers:
    """One says nothing at all; the other has the version."""

    def __init__(self, made: Made, at: float = 5.0) -> None:
        self.made, self.at, self.asked = made, at, list[str]()

    async def get(self, replica: Replica, key: Any) -> AsyncGenerator[Announced | Piece | End, None]:
        self.asked.append(replica.name)
        if replica.name == "silent":
            await asyncio.Event().wait()
        yield announced(self.made, self.at)
        for message in self.made.pieces():
            yield m.piece_of(message.piece)
        yield End()


@pytest.mark.parametrize("whole_name", [False, True])
@pytest.mark.parametrize("ahead", [0.0, 3600.0])
async def test_a_copy_that_is_on_its_way_when_another_replica_asks_for_its_deletion_does_not_come(
    serve: Serve, make: Make, fails: Fails, whole_name: bool, ahead: float
) -> None:
    made = make()
    async with serve() as served:
        begun, deleted = asyncio.Event(), asyncio.Event()

        class Slow(TwoPeers):
            async def get(self, replica: Replica, key: Any) -> AsyncGenerator[Announced | Piece | End, None]:
                async for event in super().get(replica, key):
                    if isinstance(event, End):
                        begun.set()
                        await deleted.wait()
                    yield event

        at = time.time() + ahead  # of the clock of who has published it
        versions = {(made.name, made.version): remote(made, at=at)}
        served.parts.store.sharing.others = (Replica("whole", "", alive=True, versions=versions),)  # type: ignore[misc]  # of Alone, which has none
        served.parts.bringing._peers = Slow(made, at)  # type: ignore[assignment]  # nobody deletes there
        opening = asyncio.ensure_future(fails(served.stub.Open(pb.OpenRequest(ref=ref(made)), timeout=20)))
        await begun.wait()
        what = pb.DictionaryRef(name=made.name) if whole_name else ref(made)
        code, _, _ = await fails(served.stub.Delete(pb.DeleteRequest(ref=what, here_only=True, deleted_at_seconds=time.time())))
        assert code is grpc.StatusCode.NOT_FOUND  # nothing is here, and so it stays
        deleted.set()
        assert "was deleted meanwhile" in (await opening)[1]
        assert not served.parts.store.catalogue.all()
        assert not (served.parts.folder.path / made.name).exists()


@pytest.mark.parametrize("silence", [0.3])
async def test_a_replica_that_says_nothing_is_passed_over_for_the_next(serve: Serve, make: Make, silence: float) -> None:
    made = make()
    async with serve(publish_silence_seconds=silence) as served:
        peers, sharing = TwoPeers(made), served.parts.store.sharing
        versions = {(made.name, made.version): remote(made)}
        sharing.others = tuple(Replica(name, "", alive=True, versions=versions) for name in ("silent", "whole"))  # type: ignore[misc]  # of Alone, which has none
        served.parts.bringing._peers = peers  # type: ignore[assignment]  # nobody deletes here
        answer = await served.stub.Open(pb.OpenRequest(ref=ref(made)), timeout=20)
        assert (answer.dictionary.ref.version, peers.asked) == (made.version, ["silent", "whole"])


async def test_a_version_that_a_fast_clock_has_dated_stays_deleted(serve: Serve, make: Make) -> None:
    made = make()
    async with serve() as served:
        served.parts.bringing._publishing._clock = lambda: time.time() + 3600
        at = (await served.publish(made.messages())).dictionary.published_at_seconds
        await served.stub.Delete(pb.DeleteRequest(ref=ref(made)))
        assert served.parts.store._tombstones.covers((made.name, made.version), at)  # of a copy that comes back later


async def test_a_deletion_of_what_is_here_takes_the_beginning_of_a_version_and_refuses_what_is_not_here(
    serve: Serve, make: Make, fails: Fails
) -> None:
    made, other = make(seed=1), make(seed=2)

    def delete(name: str, version: str) -> pb.DeleteRequest:
        return pb.DeleteRequest(ref=pb.DictionaryRef(name=name, version=version), here_only=True)

    async with serve() as served:
        for one in (made, other):
            await served.publish(one.messages(promote=True))
        for name, version, expected in (
            ("rules", "0" * 64, grpc.StatusCode.NOT_FOUND), ("other", "", grpc.StatusCode.NOT_FOUND),
            ("rules", "zz", grpc.StatusCode.INVALID_ARGUMENT), ("no name", "", grpc.StatusCode.INVALID_ARGUMENT),
        ):  # fmt: skip
            code, text, _ = await fails(served.stub.Delete(delete(name, version)))
            assert code is expected, text
        answer = await served.stub.Delete(delete("rules", made.version[:12]))
        assert {file.ref.version for file in answer.files} == {made.version}
        assert {kept.key[1] for kept in served.parts.store.catalogue.all()} == {other.version}
        assert {file.ref.version for file in (await served.stub.Delete(delete("rules", ""))).files} == {other.version}


async def test_of_two_words_of_one_revision_the_shared_one_holds_and_watchers_hear_it(serve: Serve, make: Make) -> None:
    made, other = make(seed=1), make(seed=2)
    async with serve() as served:
        await served.publish(made.messages(promote=True))
        await served.publish(other.messages())
        pointers = served.parts.store.pointers
        await pointers.clear("rules", {made.version})  # as where the others cannot be asked
        watch = served.stub.Watch(pb.WatchRequest())
        assert [(one.version, one.revision) for one in (await watch.read()).pointers] == [("", 2)]
        await served.parts.replicating.learn([Pointer("rules", other.version, 2, owner="default")], {}, {})
        while not (told := (await watch.read()).pointers):
            pass
        assert [(one.version, one.revision) for one in told] == [(other.version, 2)]
        await served.parts.replicating.learn([Pointer("rules", made.version, 1)], {}, {})  # of who lags behind
        assert pointers.of("rules").version == other.version
        watch.cancel()
