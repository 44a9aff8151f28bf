"""Lists while versions come, go, become current and are copied: what stays is told once, what is being deleted is not told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from asm_store import messages as m
from asm_store.domain.ports import Remote, Replica
from asm_store.domain.versions import Record
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.dictionary import DictionarySettings

if TYPE_CHECKING:
    from tests.conftest import Make, Serve


async def test_a_long_list_tells_once_what_stays_whatever_comes_goes_and_becomes_current(
    serve: Serve, make: Make, plain: DictionarySettings
) -> None:
    made = [make(seed=seed, settings=plain) for seed in range(6)]
    card = b'{"text": "' + b"x" * (250 << 10) + b'"}'
    async with serve() as served:
        for one in made:
            await served.publish(one.messages(card_json=card))
        whole = await asyncio.to_thread(served.fabric.asm.list, "rules")
        assert [one.version for one in whole] == [one.version for one in reversed(made)]  # the last published first
        by_version = sorted(one.version for one in made)
        found, answer = [], await served.stub.List(pb.ListRequest(name="rules"))
        while True:
            found += [one.ref.version for one in answer.dictionaries]
            if not answer.more:
                break
            last = answer.dictionaries[-1].ref
            await served.stub.Promote(pb.PromoteRequest(ref=pb.DictionaryRef(name="rules", version=by_version[-1])))
            await served.stub.Delete(pb.DeleteRequest(ref=last))
            await served.publish(make(seed=len(found) + 10, settings=plain).messages(card_json=card))
            answer = await served.stub.List(pb.ListRequest(name="rules", after=last))
        assert len(answer.dictionaries) < 6
        assert sorted(version for version in found if version in by_version) == by_version
        assert len(set(found)) == len(found)


async def test_what_is_copied_here_while_a_list_is_made_is_in_it(serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    record = Record(made.name, made.version, "default", 5.0, m.file_infos(made.files()))
    elsewhere = Replica("b", "", alive=True, versions={(made.name, made.version): Remote(record, made.dictionary.to_json())})
    async with serve() as served:
        store = served.parts.store
        monkeypatch.setattr(store.sharing, "others", (elsewhere,))
        readers = store._readers

        async def copied(kept: Any) -> list[int]:
            counts = await readers(kept)
            monkeypatch.setattr(store, "_readers", readers)
            await served.publish(made.messages())
            return counts

        monkeypatch.setattr(store, "_readers", copied)
        assert [one.key[1] for one in await store.listing("")] == [made.version]


async def test_who_hears_that_a_name_means_nothing_is_told_of_none_of_its_versions(
    serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served:
        for seed in range(3):
            await served.publish(make(seed=seed).messages(promote=True))
        watch = served.stub.Watch(pb.WatchRequest())
        assert (await watch.read()).pointers[0].version
        told, delete = asyncio.Event(), served.parts.folder.delete
        loop = asyncio.get_running_loop()

        def slow(*arguments: Any, **options: Any) -> Any:  # runs in a thread: the files go one version after the other
            asyncio.run_coroutine_threadsafe(told.wait(), loop).result(20)
            return delete(*arguments, **options)

        monkeypatch.setattr(served.parts.folder, "delete", slow)
        deleting = asyncio.ensure_future(served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules"))))
        while not (pointers := (await watch.read()).pointers):
            pass
        assert pointers[0].version == ""
        assert not (await served.stub.List(pb.ListRequest())).dictionaries
        told.set()
        assert len({file.ref.version for file in (await deleting).files}) == 3
        watch.cancel()


async def test_what_a_replica_that_is_away_keeps_is_listed_until_it_is_deleted(
    serve: Serve, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    record = Record(made.name, made.version, "default", 5.0, m.file_infos(made.files()))
    away = Replica("b", "", alive=False, versions={(made.name, made.version): Remote(record, made.dictionary.to_json())})
    async with serve() as served:
        monkeypatch.setattr(served.parts.store.sharing, "others", (away,))
        (listed,) = (await served.stub.List(pb.ListRequest())).dictionaries
        assert listed.ref.version == made.version  # who keeps a copy of it, does not remove that
        answer = await served.stub.Delete(pb.DeleteRequest(ref=listed.ref))
        assert list(answer.pending_replicas) == ["b"]
        assert not (await served.stub.List(pb.ListRequest())).dictionaries
