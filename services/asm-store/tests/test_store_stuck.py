"""Versions whose files can be read and not changed: what can go on without them does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from treadle.asm.v1 import asm_store_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Make, Serve


async def test_what_cannot_be_evicted_is_passed_over_for_the_next(serve: Serve, make: Make) -> None:
    made = [make(seed=seed) for seed in range(3)]
    async with serve(versions_max=2) as served:
        for one in made[:2]:
            await served.publish(one.messages())
        lock = served.parts.folder.path / "rules" / made[0].version / "lock"  # of the least recently used
        lock.unlink()
        lock.symlink_to("record.json")  # a link is not followed: the lock cannot be taken
        await served.publish(made[2].messages())
        assert {kept.key[1] for kept in served.parts.store.catalogue.all()} == {made[0].version, made[2].version}
        assert (await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules", version=made[0].version)))).path
        assert [served.metric("evictions_total", outcome=outcome) for outcome in ("ok", "failed")] == [1, 1]


async def test_a_version_is_opened_where_its_last_use_cannot_be_written_and_that_is_said_once(
    serve: Serve, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = [make(seed=seed) for seed in range(3)]
    async with serve(versions_max=2) as served:
        for one in made[:2]:
            await served.publish(one.messages())
            (served.parts.folder.path / "rules" / one.version / "lock").unlink()
        for one in (made[1], made[0]):
            assert (await served.stub.Open(pb.OpenRequest(ref=pb.DictionaryRef(name="rules", version=one.version)))).path
        assert [record.message for record in caplog.records].count("last uses cannot be written") == 1
        (served.parts.folder.path / "rules" / made[1].version / "lock").touch()
        await served.publish(made[2].messages())  # what was used before the other goes, as memory knows
        assert {kept.key[1] for kept in served.parts.store.catalogue.all()} == {made[0].version, made[2].version}


async def test_a_version_without_its_lock_is_not_evicted_and_is_deleted_when_that_is_asked(serve: Serve, make: Make) -> None:
    made = [make(seed=seed) for seed in range(3)]
    async with serve(versions_max=2) as served:
        for one in made[:2]:
            await served.publish(one.messages())
        folder = served.parts.folder.path / "rules" / made[0].version
        (folder / "lock").unlink()
        await served.publish(made[2].messages())
        assert {kept.key[1] for kept in served.parts.store.catalogue.all()} == {made[0].version, made[2].version}
        answer = await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules", version=made[0].version)))
        assert {file.path.rpartition("/")[2] for file in answer.files} >= {"manifest.json", "dictionary.safetensors"}
        assert not any(file.freed for file in answer.files)  # who maps it cannot be known
        assert not folder.exists()


async def test_a_version_that_a_tombstone_cannot_remove_is_logged_once(
    serve: Serve, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        lock = served.parts.folder.path / "rules" / made.version / "lock"
        lock.unlink()
        lock.symlink_to("record.json")
        for _ in range(3):
            await served.parts.store.deleting.obey({("rules", made.version): time.time() + 1})
        assert [record.message for record in caplog.records].count("version cannot be deleted") == 1
        lock.unlink()
        lock.touch()
        await served.parts.store.deleting.obey({})
        assert not (served.parts.folder.path / "rules").exists()
