"""The SDK's other calls: promotion, lookups, lists, and the same from asyncio."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from treadle.client import AsyncFabric
from treadle.client.asm import AsmStore, ReadManifests
from treadle.contract import DeadlineExceeded, InvalidArgument, Overtaken, ProtocolMismatch

if TYPE_CHECKING:
    from tests.asm.conftest import ScriptedStore
    from tests.conftest import WriteDictionary


def test_promote_says_what_it_expects_and_a_lost_race_is_told_so(asm: AsmStore, scripted: ScriptedStore) -> None:
    assert asm.promote("rules@12345678").version == "12345678 over any"
    assert asm.promote("rules@12345678", "").version == "12345678 over "
    assert asm.promote("rules@12345678", "ab" * 32).version == f"12345678 over {'ab' * 32}"
    scripted.refusal = (grpc.StatusCode.ABORTED, (("treadle-error", "Overtaken"),))
    with pytest.raises(Overtaken, match="said so"):
        asm.promote("rules@12345678", "")


@pytest.mark.parametrize("ref", ["", "Rules", "rules@", "rules@123", "none", "a/b"])
def test_a_reference_that_means_nothing_is_refused_here(ref: str, asm: AsmStore) -> None:
    with pytest.raises(InvalidArgument):
        asm.unpin(ref)


def test_a_lookup_of_many_tokens_goes_in_several_messages(asm: AsmStore, scripted: ScriptedStore) -> None:
    stored = asm.publish(scripted.folder).stored
    queries = np.arange(10_000 * 16, dtype=np.float32).reshape(10_000, 2, 8)
    found = asm.lookup(stored, 1, queries)
    assert np.array_equal(found.states, queries + 1)
    assert np.array_equal(found.log_z, queries[:, :, 0])
    assert found.cosines.shape == (10_000, 1, 2)
    wrong: Any
    for wrong in (queries[:0], queries.astype(np.float64), queries[:, :1], queries * np.float32("nan")):
        with pytest.raises(InvalidArgument, match="queries"):
            asm.lookup(stored, 1, wrong)


def test_queries_after_rope_go_along_where_there_are_matched_keys(
    asm: AsmStore, scripted: ScriptedStore, write_dictionary: WriteDictionary, tmp_path: Path
) -> None:
    scripted.folder = tmp_path / "matched"
    write_dictionary(scripted.folder, matched_keys=3)
    stored = asm.publish(tmp_path / "matched").stored
    queries = np.arange(9 * 16, dtype=np.float32).reshape(9, 2, 8)
    with pytest.raises(InvalidArgument, match="rotated"):
        asm.lookup(stored, 1, queries)
    with pytest.raises(InvalidArgument, match="rotated: NaN"):
        asm.lookup(stored, 1, queries, queries * np.float32("nan"))
    assert np.array_equal(asm.lookup(stored, 1, queries, queries).states, queries + 1)
    assert scripted.rotated_bytes == [queries.nbytes]


def test_another_protocol_is_refused(asm: AsmStore, scripted: ScriptedStore) -> None:
    assert asm.status().tenant_bytes == {"a": 3}
    scripted.refusal = (grpc.StatusCode.OK, ())
    with pytest.raises(ProtocolMismatch, match=r"v9\.0"):
        asm.status()


def test_the_time_of_a_list_is_that_of_all_its_parts(asm: AsmStore, scripted: ScriptedStore) -> None:
    scripted.listing = lambda context, number: time.sleep(0.3)
    with pytest.raises(DeadlineExceeded):
        asm.list(timeout_seconds=0.5)
    assert len(asm.list(timeout_seconds=5.0)) == 2


def test_a_list_of_many_parts_takes_as_long_as_it_takes_where_each_comes_in_time(scripted: ScriptedStore, asm: AsmStore) -> None:
    scripted.parts, scripted.listing = 6, lambda context, number: time.sleep(0.5)
    with AsmStore(replace(asm._endpoint, timeout_seconds=2.75)) as patient:  # not as long as all six take, and much longer than one
        assert len(patient.list()) == 6
        with pytest.raises(DeadlineExceeded):
            patient.list(part_seconds=0.3)
        with pytest.raises(DeadlineExceeded):
            patient.list(timeout_seconds=1.0)


def test_a_manifest_that_somebody_has_is_not_read_again(asm: AsmStore, scripted: ScriptedStore) -> None:
    manifests = ReadManifests()
    with AsmStore(asm._endpoint, manifests) as again:
        first, second = again.list(), again.list()
        assert all(one.dictionary is first[0].dictionary for one in (*first, *second))
        assert first == asm.list()
        text = first[0].dictionary.to_json()
        spaced = text.replace(b'"name":', b'"name": ')
        assert manifests.read(spaced) == manifests.read(text)  # its digest is no version: the version is that of what it says
        assert manifests.count == 1
        del first, second
        gc.collect()
        assert manifests.count == 0


async def test_the_same_from_asyncio(asm: AsmStore, scripted: ScriptedStore, tmp_path: Path) -> None:
    async with AsyncFabric(asm=asm._endpoint.address) as fabric:
        stored = (await fabric.asm.publish(scripted.folder)).stored
        assert (await fabric.asm.get(stored.ref, tmp_path / "got")).version == stored.version
        with await fabric.asm.open("rules", stored.version) as mapped:
            assert scripted.held
            assert mapped.version == stored.version
        assert not scripted.held
        queries = np.ones((3, 2, 8), np.float32)
        assert (await fabric.asm.lookup(stored, 0, queries)).states.shape == (3, 2, 8)
