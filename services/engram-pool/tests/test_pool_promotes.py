"""Which version is current, which was before, which are kept to go back to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from treadle.contract import EngramModel
from treadle.engram.v1 import engram_pool_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Serve, Served

Code = grpc.StatusCode


async def load_several(served: Served, model: EngramModel, count: int, *, keep: bool = True) -> list[str]:
    return [(await served.load(model, None, seed=seed, keep=keep)).ref.version for seed in range(count)]


async def promote(served: Served, version: str = "", model: str = "ple") -> pb.PromoteModelResponse:
    answer: pb.PromoteModelResponse = await served.stub.PromoteModel(
        pb.PromoteModelRequest(ref=pb.ModelRef(model=model, version=version))
    )
    return answer


async def listed(served: Served) -> list[tuple[str, bool]]:
    answer = await served.stub.ListModels(pb.ListModelsRequest())
    return [(model.ref.version, model.current) for model in answer.models]


async def current(served: Served) -> str:
    opened = await served.stub.OpenModel(pb.OpenModelRequest(ref=pb.ModelRef(model="ple")))
    version: str = opened.model.ref.version
    return version


async def test_a_rollback_goes_back_and_another_one_forward_again(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        old, new = await load_several(served, ple, 2)
        answer = await promote(served)
        assert (answer.model.ref.version, answer.model.current, answer.previous_version) == (old, True, new)
        assert await current(served) == old
        assert (await promote(served)).model.ref.version == new
        assert served.metric("promotes_total") == 2


async def test_a_version_is_promoted_by_name_and_watchers_hear_of_it(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        first, second, third = await load_several(served, ple, 3)
        watch = served.stub.WatchModels(pb.WatchModelsRequest())
        await watch.read()
        assert (await promote(served, first)).previous_version == third
        heard = {model.ref.version for model in (await watch.read()).models if model.current}
        assert heard == {first}
        assert (await promote(served)).model.ref.version == third
        assert (await promote(served, second)).previous_version == third
        assert (await promote(served)).model.ref.version == third


async def test_promoting_what_is_current_changes_nothing(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        (only,) = await load_several(served, ple, 1)
        answer = await promote(served, only)
        assert (answer.model.ref.version, answer.previous_version) == (only, only)
        assert served.metric("promotes_total") == 0


async def test_what_is_not_there_cannot_be_promoted(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        code, text, _ = await served.failure(promote(served, model="nobody"))
        assert (code, "no model 'nobody'" in text) == (Code.NOT_FOUND, True)
        (only,) = await load_several(served, ple, 1)
        code, text, _ = await served.failure(promote(served, "ab" * 32))
        assert (code, only in text) == (Code.NOT_FOUND, True)
        code, text, _ = await served.failure(promote(served))
        assert (code, "no version was current before" in text) == (Code.NOT_FOUND, True)


async def test_a_rollback_skips_versions_that_were_removed(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        first, second, third = await load_several(served, ple, 3)
        await served.stub.RemoveModel(pb.RemoveModelRequest(ref=pb.ModelRef(model="ple", version=second)))
        answer = await promote(served)
        assert (answer.model.ref.version, answer.previous_version) == (first, third)


async def test_a_replaced_version_that_is_still_read_can_be_taken_back(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        old, new = await load_several(served, ple, 2, keep=False)
        assert await listed(served) == [(new, True), (old, False)]
        assert (await promote(served)).model.ref.version == old
        assert await served.pool.reap() == 0
        assert await listed(served) == [(old, True), (new, False)]


async def test_at_most_two_versions_are_kept_beside_the_current_one(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    async with serve() as served:
        versions = await load_several(served, ple, 5)
        await served.pool.reap()
        assert await listed(served) == [(versions[4], True), (versions[3], False), (versions[2], False)]
        on_disk = {path.name for path in (tmp_path / "segments" / "ple").iterdir()}
        assert on_disk == {*versions[2:], "current.json"}


async def test_versions_that_were_current_last_are_kept_longest(serve: Serve, ple: EngramModel) -> None:
    async with serve(versions_kept_max=1) as served:
        old, new = await load_several(served, ple, 2)
        await promote(served, old)
        newest = (await served.load(ple, None, seed=9, keep=True)).ref.version
        await served.pool.reap()
        assert await listed(served) == [(newest, True), (old, False)]
        assert new not in dict(await listed(served))


async def test_a_pool_that_keeps_none_replaces_whatever_a_load_asks(serve: Serve, ple: EngramModel) -> None:
    async with serve(versions_kept_max=0) as served:
        versions = await load_several(served, ple, 2)
        await served.pool.reap()
        assert await listed(served) == [(versions[1], True)]


async def test_what_was_before_is_known_after_a_restart(serve: Serve, ple: EngramModel, tmp_path: Path) -> None:
    async with serve() as served:
        first, second, third = await load_several(served, ple, 3)
        await promote(served, first)
    saved = json.loads((tmp_path / "segments" / "ple" / "current.json").read_text())
    assert saved == {"version": first, "before": [third, second]}
    async with serve() as served:
        assert (await promote(served)).model.ref.version == third


@pytest.mark.parametrize("before", [None, ["nonsense", 7], 7, {}])
async def test_a_current_file_without_a_past_or_with_a_wrong_one_does_not_stop_a_start(
    serve: Serve, ple: EngramModel, tmp_path: Path, before: object
) -> None:
    async with serve() as served:
        old, _ = await load_several(served, ple, 2)
    saved = {"version": old} | ({} if before is None else {"before": before})
    (tmp_path / "segments" / "ple" / "current.json").write_text(json.dumps(saved))
    async with serve() as served:
        assert await current(served) == old
        code, _, _ = await served.failure(promote(served))
        assert code is Code.NOT_FOUND


async def test_a_pool_that_stops_promotes_nothing(serve: Serve, ple: EngramModel) -> None:
    async with serve() as served:
        await load_several(served, ple, 2)
        await served.pool.drain()
        assert (await served.failure(promote(served)))[0] is Code.UNAVAILABLE
